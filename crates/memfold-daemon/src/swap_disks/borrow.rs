//! Moves a VM's swap disk from this host's disk to RAM that other hosts lend.

use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use memfold_api::{BorrowRequest, Borrowed, SwapPlace};
use memfold_host::chain;
use memfold_lend::graph::{
    self, Borrowing, Copying, Failed, GraphError, NO_GAIN, Part, Phase, Stripe, Top,
};
use memfold_lend::iscsi::bridge;
use memfold_lend::wire::{Wire, patience};
use memfold_lend::{Durability, Endpoint, Lease, LeaseId, Transport};
use memfold_units::ByteSize;
use memfold_vm::{VmDirectory, swap};
use tracing::{info, warn};

use crate::error::{DaemonError, refused, state_error};
use crate::leases::{LenderFault, RENEW, RESUMED, lease_ttl, ms};
use crate::locks::SwapRight;
use crate::machine::Machine;
use crate::move_progress::MoveProgress;
use crate::swap_disks::SwapDisks;
use crate::swap_disks::give_back::new_generation;
use crate::swap_disks::guard::Guard;
use crate::swap_disks::note::{
    note, remove_note, save_request, saved_request, swap_directory, write_note,
};
use crate::swap_disks::relays::{connect, hear_end_of, wait_longer};
use crate::swap_disks::renew::waited;

/// Who asks for a loan of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    /// An operator's request.
    Operator,
    /// An operator's earlier request, repeated after the lender was lost.
    SavedRequest,
    /// The VM itself, because it swaps (automatic loan).
    Itself,
}

/// Resources of an attempt to borrow. They are released if the attempt fails.
#[derive(Default)]
pub(crate) struct BorrowAttempt {
    pub leases: Vec<Lease>,
    /// Parts of the loan whose relay process was started.
    pub parts: Vec<Part>,
    pub wires: Vec<Option<Wire>>,
    /// Number of the monitor connection that has received all events about the new block nodes
    /// since their creation.
    pub heard_on: Option<u64>,
    /// The loan that QEMU was told to switch to.
    pub borrowing: Option<Borrowing>,
    /// Lenders that have failed in earlier attempts of the same request.
    pub faults: Vec<LenderFault>,
}

impl BorrowAttempt {
    /// Returns the fault of the lender because of which this attempt failed with `error`; `None` if
    /// other lenders would not help.
    fn fault(&self, error: &DaemonError) -> Option<LenderFault> {
        let fault = LenderFault::of(error)?;
        let mut lenders = self.leases.iter().map(|lease| &lease.lender.host);
        lenders.any(|host| *host == fault.lender).then_some(fault)
    }

    pub fn cut(&self) {
        self.wires.iter().flatten().for_each(Wire::cut);
    }
}

impl SwapDisks {
    /// Moves a VM's swap disk to lent RAM, on an operator's request. The request is saved, and
    /// repeated if the lender is lost.
    pub fn borrow_memory(
        self: &Arc<Self>,
        vm: &str,
        request: &BorrowRequest,
    ) -> Result<Borrowed, DaemonError> {
        self.borrow_as(vm, request, Asker::Operator)
    }

    /// Moves a VM's swap disk to lent RAM, whoever asked for it.
    pub(super) fn borrow_as(
        self: &Arc<Self>,
        vm: &str,
        request: &BorrowRequest,
        asker: Asker,
    ) -> Result<Borrowed, DaemonError> {
        let machine = self.registry.machine(vm)?;
        let directory = swap_directory(&machine)?;
        let right = machine.swap_right();
        if asker == Asker::SavedRequest && saved_request(&machine).as_ref() != Some(request) {
            return Err(refused(
                format!("the request that VM '{vm}' borrow was withdrawn"),
                "no action is needed",
            ));
        }
        let done = self.borrow_alone(&machine, directory, request, asker, &right)?;
        if asker == Asker::Operator {
            save_request(directory, vm, request);
        }
        Ok(done)
    }

    fn borrow_alone(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        directory: &VmDirectory,
        request: &BorrowRequest,
        asker: Asker,
        right: &SwapRight<'_>,
    ) -> Result<Borrowed, DaemonError> {
        let (began, vm) = (Instant::now(), machine.name());
        self.leases.check_host()?;
        let guard = self.reconciled_guard(machine, right)?;
        let top = graph::top(&mut machine.monitor(), vm)?;
        check_size(vm, top.bytes, request, asker)?;
        if let Some(guard) = guard {
            if let Some(now) = same_loan(guard.borrowed(), request)? {
                return Ok(now);
            }
            // The disk is on this host, even if the note of a loan says otherwise.
            self.drop_note(machine, right);
        }
        let mut begun = BorrowAttempt::default();
        let by_itself = asker == Asker::Itself;
        let mut done =
            self.switch_to_lent(machine, directory, &top, request, by_itself, &mut begun);
        // Each lender fails at most once, so there are at most as many attempts as lenders.
        while let Some(fault) = done.as_ref().err().and_then(|error| begun.fault(error)) {
            warn!(
                vm,
                lender = fault.lender,
                error = fault.why,
                "lender cannot serve the lease, asking other lenders; see the log of the lender's daemon"
            );
            self.undo(machine, &begun);
            begun = self.after_fault(begun, fault);
            done = self.switch_to_lent(machine, directory, &top, request, by_itself, &mut begun);
        }
        let watch = |borrowing, begun: BorrowAttempt| {
            let guard = Guard::new(vm, borrowing, begun.wires);
            guard.state.lock().heard_on = begun.heard_on;
            self.watch(machine, &guard);
            guard
        };
        match done {
            Ok(borrowing) => {
                Self::clean_up(machine);
                info!(vm, lenders = ?borrowing.parts.iter().map(Part::lenders).collect::<Vec<_>>(), "swap disk moved to a lender");
                let guard = watch(borrowing, begun);
                Ok(Borrowed {
                    changed: true,
                    took_ms: ms(began),
                    ..guard.borrowed()
                })
            }
            Err(error @ DaemonError::Graph(GraphError::Unknown(_))) => {
                warn!(
                    vm,
                    error = chain(&error),
                    "location of the swap disk (this host or a lender) unknown: QEMU did not answer; asking again every second"
                );
                if let Some(borrowing) = begun.borrowing.take() {
                    // The loan is kept and renewed, because QEMU may use it.
                    watch(borrowing, begun);
                }
                Err(error)
            }
            Err(error) => {
                warn!(
                    vm,
                    error = chain(&error),
                    "swap disk not moved to a lender; fix the cause and repeat 'memfold borrow'"
                );
                self.undo(machine, &begun);
                Err(error)
            }
        }
    }

    /// Undoes a failed attempt to borrow, and releases its leases.
    fn undo(&self, machine: &Machine, begun: &BorrowAttempt) {
        begun.cut();
        Self::clean_up(machine);
        for part in &begun.parts {
            hear_end_of(&self.leases, machine.name(), part);
        }
        self.leases
            .release(begun.leases.iter().map(|lease| lease.id));
        remove_note(machine);
    }

    /// Returns the next attempt after one that a lender's fault has ended. Waits until the other
    /// lenders of the failed attempt can lend the same memory again.
    fn after_fault(&self, failed: BorrowAttempt, fault: LenderFault) -> BorrowAttempt {
        let leases = failed.leases.iter();
        let others = leases.filter(|lease| lease.lender.host != fault.lender);
        let others: Vec<LeaseId> = others.map(|lease| lease.id).collect();
        self.leases.wait_freed(&others);
        let mut faults = failed.faults;
        faults.push(fault);
        BorrowAttempt {
            faults,
            ..BorrowAttempt::default()
        }
    }

    fn switch_to_lent(
        &self,
        machine: &Machine,
        directory: &VmDirectory,
        top: &Top,
        request: &BorrowRequest,
        by_itself: bool,
        begun: &mut BorrowAttempt,
    ) -> Result<Borrowing, DaemonError> {
        let progress =
            MoveProgress::begin(&self.moves, machine.name(), "lender prepares its memory");
        let (faults, leases) = (&begun.faults, &mut begun.leases);
        let stripes =
            self.leases
                .take_leases(machine.name(), top.bytes, request, faults, leases)?;
        let mut endpoints = Vec::new();
        for lease in &begun.leases {
            let endpoint = self.leases.wait_exported(lease, &begun.leases)?;
            endpoints.push(reach(directory, lease, endpoint)?);
        }
        let place = state_error(directory.path());
        let durability = request.durability;
        let copy = match durability {
            Durability::Disk => Some(swap::place(machine.name()).map_err(place)?),
            Durability::Replica | Durability::None => None,
        };
        let mut borrowing = Borrowing {
            generation: new_generation(machine)?,
            durability,
            bytes: top.bytes,
            parts: parts(&begun.leases, &endpoints, usize::from(stripes)),
            copy,
            copy_failed: false,
            copy_unwatched: false,
            phase: Phase::Switching,
            by_itself,
        };
        write_note(directory, &borrowing).map_err(place)?;
        if let Some(copy) = &borrowing.copy {
            let add = |files: &mut Vec<PathBuf>| files.push(copy.clone());
            machine.vm().change_temporary(add).map_err(place)?;
        }
        for (number, endpoints) in endpoints.chunks(usize::from(stripes)).enumerate() {
            let (relay, wire) = connect(machine, directory, &borrowing, number, endpoints)?;
            let part = &mut borrowing.parts[number];
            part.relay = Some(relay);
            begun.parts.push(part.clone());
            begun.wires.push(Some(wire));
        }
        // Relays are recorded now, so that the next daemon finds them if this one dies.
        write_note(directory, &borrowing).map_err(place)?;
        let mut qmp = machine.monitor();
        begun.heard_on = Some(qmp.connections());
        graph::build(&mut qmp, &borrowing, machine.vm().user())?;
        drop(qmp);
        let asked = Cell::new(Instant::now());
        let give_up = |copying: &Copying| {
            progress.show("swap disk copied to the lender", copying);
            failed_write(machine, &borrowing)
                // QEMU cannot abandon a request that waits for an answer.
                .or_else(|| endless(copying).inspect(|_| begun.cut()))
                .or_else(|| self.why_to_give_up(&borrowing, begun, &asked))
        };
        let switched = graph::switch(&|| machine.monitor(), &top.node, &borrowing.top(), &give_up);
        begun.borrowing = Some(borrowing.clone());
        switched?;
        borrowing.phase = Phase::Lent;
        note(machine, &borrowing);
        Ok(borrowing)
    }

    /// Returns the reason to abandon a move in progress: a connection has ended, or a lender hangs
    /// or recalls its memory. Lenders are checked once a second; `asked`: time of the last check.
    /// If there is a reason, the connections are cut, because QEMU cannot abandon a request that
    /// waits for an answer.
    fn why_to_give_up(
        &self,
        borrowing: &Borrowing,
        begun: &BorrowAttempt,
        asked: &Cell<Instant>,
    ) -> Option<String> {
        let is_cut = |wire: &Option<Wire>| wire.as_ref().is_none_or(Wire::is_cut);
        if let Some(gone) = begun.wires.iter().position(is_cut) {
            let lenders = borrowing.parts[gone].lenders();
            return Some(format!(
                "the connection to the lenders ({lenders}) has ended"
            ));
        }
        if asked.get().elapsed() < RENEW {
            return None;
        }
        asked.set(Instant::now());
        let ttl = lease_ttl(borrowing.durability, borrowing.bytes);
        let ids = begun.leases.iter().map(|lease| lease.id);
        let patience = patience(borrowing.durability, 0);
        let silent = self.leases.silent_parts(borrowing, patience);
        let silent = silent.first().map(|part| &borrowing.parts[*part]);
        let is_late = |part: &&Part| {
            let waited = part.relay.as_ref().and_then(waited);
            waited.is_some_and(|waited| waited >= patience)
        };
        let silent = silent.or_else(|| begun.parts.iter().find(is_late));
        let silent = silent.map(|part| format!("a lender is silent ({})", part.lenders()));
        let why = self.leases.keep(ids, ttl, false).or(silent);
        if why.is_some() {
            begun.cut();
        }
        why
    }

    /// Continues an earlier daemon's loan for a VM, including a move that was in progress.
    pub(crate) fn resume(self: &Arc<Self>, machine: &Arc<Machine>) {
        let Some(directory) = machine.vm().directory() else {
            return;
        };
        // The user may have borrowed again before this thread got the lock: that loan is watched
        // already.
        let _right = machine.swap_right();
        if self.guard(machine.name()).is_some() {
            return;
        }
        let mut borrowing = match VmDirectory::read_json::<Borrowing>(&directory.borrowed()) {
            Ok(borrowing) => borrowing,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => {
                warn!(vm = machine.name(), %error, "cannot read which memory the VM has borrowed, so its leases are not renewed; if its swap disk is lent ('memfold leases'), fix the cause and restart the daemon within a minute");
                return;
            }
        };
        machine.use_generation(borrowing.generation);
        // If a move was in progress, QEMU's device shows how the move ended.
        Self::clean_up(machine);
        let ended = graph::cancel(&|| machine.monitor()).map_err(GraphError::from);
        let top = ended.and_then(|()| graph::top(&mut machine.monitor(), machine.name()));
        if top.as_ref().is_ok_and(|top| top.node != borrowing.top()) {
            remove_note(machine);
            for part in &borrowing.parts {
                hear_end_of(&self.leases, machine.name(), part);
            }
            self.leases.release(borrowing.leases());
            return;
        }
        // If QEMU did not answer, the state is determined before any other operation.
        borrowing.phase = top.map_or(Phase::Switching, |_| Phase::Lent);
        // Since the earlier daemon ended, no daemon has received events about failed writes.
        borrowing.copy_unwatched = borrowing.copy.is_some();
        info!(
            vm = machine.name(),
            "daemon restarted; it watches the lease of the VM's borrowed memory again"
        );
        let ttl = lease_ttl(borrowing.durability_now(), borrowing.bytes);
        let wires = borrowing.parts.iter().map(|_| None).collect();
        let unknown = borrowing.reached().map(|(part, _)| part).collect();
        let guard = Guard::new(machine.name(), borrowing, wires);
        let mut state = guard.state.lock();
        // The thread that watches the loan looks for the connections first.
        state.unknown = unknown;
        // The time of the last renewal is unknown, so half of the lease's duration is assumed to be
        // left.
        state.holds = Some(Instant::now() + ttl / 2 + RESUMED);
        let is_unwatched = state.borrowing.copy_unwatched;
        drop(state);
        if is_unwatched {
            wait_longer(&guard);
        }
        self.watch(machine, &guard);
    }
}

/// Checks that a request asks for the size of the VM's swap disk, `disk_bytes`. Earlier versions
/// saved requests for more, so only a new request for more is refused.
fn check_size(
    vm: &str,
    disk_bytes: u64,
    request: &BorrowRequest,
    asker: Asker,
) -> Result<(), DaemonError> {
    let Some(bytes) = request.bytes else {
        return Ok(());
    };
    let (disk, asked) = (ByteSize(disk_bytes), ByteSize(bytes));
    let (why, swap) = if bytes < disk_bytes {
        (format!("{asked} of lent RAM cannot hold it"), "smaller")
    } else if bytes > disk_bytes && asker == Asker::Operator {
        (format!("it cannot use {asked} of lent RAM"), "larger")
    } else {
        return Ok(());
    };
    Err(refused(
        format!("the swap disk of VM '{vm}' has {disk}, and {why}"),
        format!(
            "borrow the whole size (memfold borrow {vm}), or start the VM with a {swap} --swap"
        ),
    ))
}

/// Returns the present loan of a VM, `now`, if the request asks for the same; `None` if the swap
/// disk is on this host, so that the VM can borrow.
///
/// # Errors
///
/// [`DaemonError::Refused`] if the VM has borrowed in another way, or its loan is damaged.
fn same_loan(now: Borrowed, request: &BorrowRequest) -> Result<Option<Borrowed>, DaemonError> {
    let vm = &now.vm;
    let is_laid_out = request.stripes.is_none_or(|n| now.stripes == Some(n));
    let is_as_asked = now.durability == Some(request.durability) && is_laid_out;
    let (why, fix) = match now.place {
        SwapPlace::OnCopy | SwapPlace::OnDisk => return Ok(None),
        SwapPlace::Lent if is_as_asked => return Ok(Some(now)),
        SwapPlace::Lent => (
            format!("VM '{vm}' has already borrowed, with other durability, copies or stripes"),
            format!("return the loan first: memfold return {vm}"),
        ),
        SwapPlace::Degraded => (
            format!(
                "the swap disk of VM '{vm}' has lost a copy: it is on {}",
                now.where_it_is()
            ),
            format!(
                "wait until memfold has moved the swap disk to this host's disk, or do so now (memfold return {vm}), and borrow again"
            ),
        ),
        SwapPlace::Lost => (
            format!("the swap disk of VM '{vm}' is lost with its lender"),
            format!("end the VM (memfold vm stop {vm}), and start it again"),
        ),
    };
    Err(refused(why, fix))
}

/// Returns why a copy to lent RAM that never ends is given up; `None` if the copy may end.
fn endless(copying: &Copying) -> Option<String> {
    (copying.stalled >= NO_GAIN).then(|| {
        let left = copying.total_bytes.saturating_sub(copying.done_bytes);
        format!(
            "its guest writes faster than the lender takes the data: {} left, and no less in {} s; borrow when the guest swaps less, or from a lender with a faster network",
            ByteSize(left),
            NO_GAIN.as_secs()
        )
    })
}

/// Returns which part of the new disk has failed during the move, if QEMU has reported that. The
/// move itself goes on with the other part, but the disk would then be without a second copy.
fn failed_write(machine: &Machine, borrowing: &Borrowing) -> Option<String> {
    let events = machine.monitor().take_events_named(&["QUORUM_REPORT_BAD"]);
    let mut failed = events
        .iter()
        .filter_map(|event| graph::failed(event, borrowing));
    Some(match failed.next()? {
        Failed::Copy => "the copy on this host's disk cannot be written; free space there".into(),
        Failed::Lent(part) => {
            let lenders = borrowing.parts[part].lenders();
            format!("the memory of lender {lenders} cannot be written")
        }
    })
}

/// Returns an endpoint that a relay can connect to. For a lender that exports by iSCSI, it is a
/// bridge on this host, which is connected to an iSCSI session.
fn reach(
    directory: &VmDirectory,
    lease: &Lease,
    endpoint: Endpoint,
) -> Result<Endpoint, DaemonError> {
    if endpoint.transport == Transport::Nbd {
        return Ok(endpoint);
    }
    let lender = &lease.lender.host;
    bridge::begin(directory.path(), lease.id, &endpoint).map_err(|error| {
        DaemonError::LenderFailed {
            lender: lender.clone(),
            why: format!("lender '{lender}' exports by iSCSI and cannot be reached ({error})"),
            fix: "check the lender's log and the network between the hosts; or lend by NBD there (memfold lend --transport nbd)".into(),
        }
    })
}

/// Groups the leases into copies of `stripes` stripes each.
fn parts(leases: &[Lease], endpoints: &[Endpoint], stripes: usize) -> Vec<Part> {
    let stripe = |(lease, endpoint): (&Lease, &Endpoint)| Stripe {
        lease: lease.id,
        lender: lease.lender.host.clone(),
        address: endpoint.address.clone(),
    };
    let mut all = leases.iter().zip(endpoints).map(stripe);
    let mut parts = Vec::new();
    while let Some(first) = all.next() {
        parts.push(Part {
            first,
            others: all.by_ref().take(stripes.saturating_sub(1)).collect(),
            relay: None,
            lost: false,
        });
    }
    parts
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_request_for_another_size_than_that_of_the_swap_disk_is_refused() {
        for (mib, asker, word) in [
            (63, Asker::Operator, Some("smaller")),
            (63, Asker::SavedRequest, Some("smaller")),
            (65, Asker::Operator, Some("larger")),
            (65, Asker::SavedRequest, None),
            (64, Asker::Operator, None),
        ] {
            let request = BorrowRequest {
                bytes: Some(mib * MIB),
                ..BorrowRequest::default()
            };
            let done = check_size("v", 64 * MIB, &request, asker);
            let hint = done.err().and_then(|error| error.hint());
            let wanted = word.map(|word| {
                format!(
                    "borrow the whole size (memfold borrow v), or start the VM with a {word} --swap"
                )
            });
            assert_eq!(hint, wanted, "{mib} {asker:?}");
        }
        check_size("v", 64 * MIB, &BorrowRequest::default(), Asker::Operator).unwrap();
    }

    #[test]
    fn a_copy_to_lent_memory_that_stalls_for_a_minute_is_given_up_with_the_cause() {
        let copying = |seconds| Copying {
            done_bytes: 10 * MIB,
            total_bytes: 74 * MIB,
            stalled: Duration::from_secs(seconds),
        };
        assert_eq!(endless(&copying(59)), None);
        let why = endless(&copying(60)).unwrap();
        for word in ["guest writes faster", "64.0 MiB left", "60 s"] {
            assert!(why.contains(word), "{why}");
        }
    }

    #[test]
    fn borrowing_again_returns_the_same_loan_or_names_the_state_of_the_present_one() {
        let loan = |place| Borrowed {
            vm: "v".into(),
            place,
            bytes: 64 * MIB,
            durability: Some(Durability::Disk),
            lenders: vec!["a".into()],
            stripes: Some(1),
            waits: None,
            changed: false,
            took_ms: 0,
        };
        let same = BorrowRequest::default();
        let other = BorrowRequest {
            durability: Durability::None,
            ..BorrowRequest::default()
        };
        let lent = loan(SwapPlace::Lent);
        assert_eq!(same_loan(lent.clone(), &same).unwrap(), Some(lent));
        assert_eq!(same_loan(loan(SwapPlace::OnCopy), &same).unwrap(), None);
        for (place, request, words) in [
            (SwapPlace::Lent, &other, ["other durability", "return v"]),
            (SwapPlace::Degraded, &same, ["with one copy only", "wait"]),
            (SwapPlace::Lost, &same, ["is lost", "memfold vm stop v"]),
        ] {
            let error = same_loan(loan(place), request).unwrap_err();
            let said = format!("{error}; {}", error.hint().unwrap_or_default());
            assert!(words.iter().all(|word| said.contains(word)), "{said}");
        }
    }
}

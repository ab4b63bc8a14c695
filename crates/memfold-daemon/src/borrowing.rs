//! Swap disks of this host's VMs on lent RAM: borrowed, watched, given back.
//!
//! Everything here can be cut off at any instant. What QEMU's device uses is the truth; `borrowed.json` names leases, and is written before
//! the first of them is used. [`Daemon::tidy`] removes what nothing uses. So a new daemon ends or undoes what the one before began.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{BorrowRequest, Borrowed, SwapPlace};
use memfold_lend::graph::{self, Borrowing, GraphError, Part, Phase, Stripe, Top};
use memfold_lend::iscsi::bridge;
use memfold_lend::relay::start::Running;
use memfold_lend::wire::Wire;
use memfold_lend::{Durability, Endpoint, Lease, RegistryError, Transport};
use memfold_units::ByteSize;
use memfold_vm::{QmpError, VmDirectory, swap};
use tracing::{error, info, warn};

use super::booted::when_booted;
use super::borrow_again::{forget_wish, note_wish, wish};
use super::leasing::{RESUMED, lease_ttl};
use super::machine::Machine;
use super::relays::{connect, wait_longer};
use super::watched::Guard;
use super::watching::{hear, keep_watch};
use super::{Daemon, DaemonError, chain};

pub(super) const RENEW: Duration = Duration::from_secs(1);

/// How long a guest may take to use its swap disk.
const SWAP_ON_TIMEOUT: Duration = Duration::from_secs(60);

/// Who wants a VM to borrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    /// A person.
    Operator,
    /// The same, a while ago: it has lost its lender since.
    Wish,
    /// Nobody: it swaps.
    Itself,
}

/// What a borrowing that fails has to undo.
#[derive(Default)]
pub(super) struct Begun {
    pub leases: Vec<Lease>,
    /// With the names of their lenders.
    relays: Vec<(Running, Vec<String>)>,
    wires: Vec<Option<Wire>>,
    /// The monitor's connection on which failures of its nodes are told from their beginning.
    heard_on: Option<u64>,
    /// What QEMU was told to go over to.
    borrowing: Option<Borrowing>,
}

impl Begun {
    fn cut(&self) {
        self.wires.iter().flatten().for_each(Wire::cut);
    }
}

pub(super) fn lending(why: impl Into<String>, fix: impl Into<String>) -> DaemonError {
    DaemonError::Lending {
        why: why.into(),
        fix: fix.into(),
    }
}

fn ms(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

impl Daemon {
    /// Switches a VM's swap disk to lent RAM, and again should it lose its lender.
    pub fn borrow_memory(
        self: &Arc<Self>,
        vm: &str,
        request: &BorrowRequest,
    ) -> Result<Borrowed, DaemonError> {
        self.borrow_as(vm, request, Asker::Operator)
    }

    /// The same for whoever asks.
    pub(super) fn borrow_as(
        self: &Arc<Self>,
        vm: &str,
        request: &BorrowRequest,
        asker: Asker,
    ) -> Result<Borrowed, DaemonError> {
        let machine = self.machine(vm)?;
        let directory = swap_directory(&machine)?;
        let _alone = machine.swap_right();
        if asker == Asker::Wish && wish(&machine).as_ref() != Some(request) {
            return Err(lending(
                format!("nobody wants VM '{vm}' to borrow any more"),
                "nothing is to be done",
            ));
        }
        let done = self.borrow_alone(&machine, directory, request, asker)?;
        if asker == Asker::Operator {
            note_wish(directory, vm, request);
        }
        Ok(done)
    }

    /// The machine's swap right is held by the caller.
    fn borrow_alone(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        directory: &VmDirectory,
        request: &BorrowRequest,
        asker: Asker,
    ) -> Result<Borrowed, DaemonError> {
        let (began, vm) = (Instant::now(), machine.name());
        super::lending::check_host(&self.lending.host)?;
        let guard = self.settled_guard(machine, directory)?;
        let top = graph::top(&mut machine.monitor(), vm)?;
        if let Some(bytes) = request.bytes.filter(|bytes| *bytes < top.bytes) {
            return Err(lending(
                format!(
                    "the swap disk of VM '{vm}' has {}, and {} of lent RAM can't hold it",
                    ByteSize(top.bytes),
                    ByteSize(bytes)
                ),
                format!(
                    "borrow all of it (memfold borrow {vm}), or start the VM with a smaller --swap"
                ),
            ));
        }
        if let Some(guard) = guard {
            let now = guard.borrowed();
            let laid_out = request.stripes.is_none_or(|n| now.stripes == Some(n));
            if now.place == SwapPlace::Lent
                && now.durability == Some(request.durability)
                && laid_out
            {
                return Ok(now);
            }
            if now.place != SwapPlace::OnCopy {
                return Err(lending(
                    format!(
                        "VM '{vm}' has borrowed already, with other durability, copies or stripes"
                    ),
                    format!("give that back first: memfold return {vm}"),
                ));
            }
            // On its disk, whatever the note says.
            self.drop_note(machine, directory);
        }
        let mut begun = Begun::default();
        let by_itself = asker == Asker::Itself;
        let done = self.switch_to_lent(machine, directory, &top, request, by_itself, &mut begun);
        match done {
            Ok(borrowing) => {
                self.tidy(machine);
                info!(vm, lenders = ?borrowing.parts.iter().map(Part::lenders).collect::<Vec<_>>(), "its swap disk is on lent RAM");
                let guard = Guard::new(vm, borrowing, begun.wires);
                guard.state().heard_on = begun.heard_on;
                self.watch(machine, &guard);
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
                    "what its swap disk uses is not known now"
                );
                if let Some(borrowing) = begun.borrowing {
                    // Kept, and renewed, as if it were there.
                    let guard = Guard::new(vm, borrowing, begun.wires);
                    guard.state().heard_on = begun.heard_on;
                    self.watch(machine, &guard);
                }
                Err(error)
            }
            Err(error) => {
                warn!(vm, error = chain(&error), "its swap disk stays where it is");
                begun.cut();
                self.tidy(machine);
                for (relay, lenders) in &begun.relays {
                    self.hear_end(vm, relay, lenders);
                }
                self.release(begun.leases.iter().map(|lease| lease.id));
                remove_note(directory);
                Err(error)
            }
        }
    }

    fn switch_to_lent(
        &self,
        machine: &Machine,
        directory: &VmDirectory,
        top: &Top,
        request: &BorrowRequest,
        by_itself: bool,
        begun: &mut Begun,
    ) -> Result<Borrowing, DaemonError> {
        let stripes = self.take_leases(machine.name(), top.bytes, request, begun)?;
        let mut endpoints = Vec::new();
        for lease in &begun.leases {
            endpoints.push(reach(directory, lease, self.wait_exported(lease)?)?);
        }
        let place = |source| DaemonError::State {
            path: directory.path().to_owned(),
            source,
        };
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
            let relay = connect(machine, directory, &borrowing, number, endpoints);
            let relay = relay?;
            let lenders = borrowing.parts[number].stripes();
            let lenders = lenders.map(|stripe| stripe.lender.clone()).collect();
            borrowing.parts[number].relay = Some(relay.running.clone());
            begun.relays.push((relay.running, lenders));
            begun.wires.push(Some(relay.wire));
        }
        // A daemon that dies now leaves relays that the next one is to find.
        write_note(directory, &borrowing).map_err(place)?;
        let mut qmp = machine.monitor();
        begun.heard_on = Some(qmp.connections());
        graph::build(&mut qmp, &borrowing)?;
        drop(qmp);
        let cut = || {
            let is_cut = |wire: &Option<Wire>| wire.as_ref().is_none_or(Wire::is_cut);
            let gone = begun.wires.iter().position(is_cut)?;
            Some(format!(
                "the connection to its lenders ({}) has ended",
                borrowing.parts[gone].lenders()
            ))
        };
        // Its lender may hang meanwhile. QEMU can't give up what waits for an answer before the connection is cut.
        let asked = Cell::new(Instant::now());
        let ttl = lease_ttl(durability, top.bytes);
        let silent = || {
            if asked.get().elapsed() < RENEW {
                return None;
            }
            asked.set(Instant::now());
            let ids = begun.leases.iter().map(|lease| lease.id);
            let part = self.silent_part(&borrowing);
            let silent = part.map(|part| {
                let lenders = borrowing.parts[part].lenders();
                format!("a lender isn't heard of ({lenders})")
            });
            let why = self.keep(ids, ttl, false).or(silent);
            if why.is_some() {
                begun.cut();
            }
            why
        };
        let silent = || cut().or_else(silent);
        let switched = graph::switch(&|| machine.monitor(), &top.node, &borrowing.top(), &silent);
        begun.borrowing = Some(borrowing.clone());
        switched?;
        borrowing.phase = Phase::Lent;
        if let Err(error) = write_note(directory, &borrowing) {
            // The next daemon sees by the device itself that it went over.
            warn!(vm = machine.name(), %error, "its note can't be written");
        }
        Ok(borrowing)
    }

    /// Switches a VM's swap disk back to this host's disk, for good.
    pub fn return_memory(&self, vm: &str) -> Result<Borrowed, DaemonError> {
        self.return_as(vm, true)
    }

    /// The same; not `for_good`: what an operator has asked for stays asked for.
    pub(super) fn return_as(&self, vm: &str, for_good: bool) -> Result<Borrowed, DaemonError> {
        let began = Instant::now();
        let machine = self.machine(vm)?;
        let directory = swap_directory(&machine)?;
        let _alone = machine.swap_right();
        if for_good {
            // First: whatever fails or is killed on the way, it isn't borrowed again against the operator's word.
            forget_wish(directory);
        }
        let guard = self.settled_guard(&machine, directory)?;
        let top = graph::top(&mut machine.monitor(), vm)?;
        let mut changed = false;
        if let Some(guard) = guard {
            let before = guard.borrowed();
            if before.place == SwapPlace::Lost {
                return Err(lending(
                    format!("the swap disk of VM '{vm}' is lost with its lender (durability none)"),
                    format!("end the VM: memfold vm stop {vm}"),
                ));
            }
            self.give_back(&machine, directory, &guard)?;
            changed = before.place != SwapPlace::OnCopy;
        }
        Ok(Borrowed {
            vm: vm.to_owned(),
            place: SwapPlace::OnDisk,
            bytes: top.bytes,
            durability: None,
            lenders: Vec::new(),
            stripes: None,
            waits: None,
            changed,
            took_ms: ms(began),
        })
    }

    /// `_alone` is held by the caller.
    fn give_back(
        &self,
        machine: &Machine,
        directory: &VmDirectory,
        guard: &Guard,
    ) -> Result<(), DaemonError> {
        hear(machine, guard);
        let borrowing = guard.borrowing();
        let is_last = borrowing.reached().next().is_none();
        if borrowing.copy_failed && !is_last {
            graph::take_copy_out(&mut machine.monitor(), &borrowing)?;
        }
        let is_whole = borrowing.has_copy() && !borrowing.copy_unwatched;
        if is_whole || is_last {
            // Every write has gone to the copy too, as far as is known; or there is nothing else.
            for (part, _) in borrowing.reached() {
                graph::take_out(&mut machine.monitor(), &borrowing, part)?;
                guard.state().borrowing.parts[part].lost = true;
            }
        } else {
            self.move_to_disk(machine, directory, guard)?;
        }
        // Released when nothing uses it any more.
        self.tidy(machine);
        self.drop_note(machine, directory);
        info!(vm = machine.name(), "its swap disk is on this host's disk");
        Ok(())
    }

    /// Copies what is lent to a new file.
    fn move_to_disk(
        &self,
        machine: &Machine,
        directory: &VmDirectory,
        guard: &Guard,
    ) -> Result<(), DaemonError> {
        let borrowing = guard.borrowing();
        let place = |source| DaemonError::State {
            path: directory.path().to_owned(),
            source,
        };
        let file = swap::place(machine.name()).map_err(place)?;
        let add = |files: &mut Vec<PathBuf>| files.push(file.clone());
        machine.vm().change_temporary(add).map_err(place)?;
        let moved = (|| {
            let generation = new_generation(machine)?;
            let mut qmp = machine.monitor();
            let to = graph::build_on_disk(&mut qmp, generation, &file, borrowing.bytes)?;
            drop(qmp);
            // The thread that renews may be this one.
            let kept: Cell<Option<Instant>> = Cell::default();
            let keep = || {
                if kept.get().is_none_or(|kept| kept.elapsed() >= RENEW) {
                    kept.set(Some(Instant::now()));
                    let parts = borrowing.reached().flat_map(|(_, part)| part.stripes());
                    let ttl = lease_ttl(borrowing.durability_now(), borrowing.bytes);
                    let leases = parts.map(|stripe| stripe.lease);
                    self.keep(leases, ttl, borrowing.copy_failed);
                }
                None
            };
            graph::switch(&|| machine.monitor(), &borrowing.top(), &to, &keep)
        })();
        match &moved {
            // Whether it is lent is found out before anything else is done.
            Err(GraphError::Unknown(_)) => guard.state().borrowing.phase = Phase::Switching,
            Err(_) => self.tidy(machine),
            Ok(()) => {}
        }
        Ok(moved?)
    }

    /// Nothing is borrowed any more: watches no longer, releases the leases, and forgets.
    pub(super) fn drop_note(&self, machine: &Machine, directory: &VmDirectory) {
        let guard = self.lending.guards().remove(machine.name());
        remove_note(directory);
        if let Some(guard) = guard {
            guard.stop();
            self.let_go(&guard);
        }
    }

    /// The VM has ended, and its files are gone.
    pub(super) fn forget_borrowing(&self, machine: &Machine) {
        let guard = self.lending.guards().remove(machine.name());
        if let Some(guard) = guard {
            guard.stop();
            self.let_go(&guard);
        }
    }

    /// Removes nodes and files of the swap disk that its device doesn't use: after a switch those of before, after a failure the new ones.
    #[allow(clippy::unused_self)] // the daemon's affair
    pub(super) fn tidy(&self, machine: &Machine) {
        let tidied = (|| -> Result<(), DaemonError> {
            graph::cancel(&|| machine.monitor())?;
            let mut qmp = machine.monitor();
            let top = graph::top(&mut qmp, machine.name())?;
            for generation in 0..graph::free_generation(&mut qmp)? {
                if generation != top.generation {
                    graph::remove_generation(&mut qmp, generation)?;
                }
            }
            drop(qmp);
            let mut left = Vec::new();
            let keep = |path: &PathBuf| !is_swap_file(path) || Some(path) == top.file.as_ref();
            let change = |files: &mut Vec<PathBuf>| {
                left = files.iter().filter(|path| !keep(path)).cloned().collect();
            };
            let noted = |source| DaemonError::State {
                path: machine
                    .vm()
                    .directory()
                    .map_or_else(PathBuf::new, |d| d.path().to_owned()),
                source,
            };
            machine.vm().change_temporary(change).map_err(noted)?;
            for file in &left {
                match std::fs::remove_file(file) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(noted(error));
                    }
                    _ => {}
                }
            }
            // Forgotten only when they are gone.
            machine
                .vm()
                .change_temporary(|files| files.retain(|file| !left.contains(file)))
                .map_err(noted)
        })();
        if let Err(error) = tidied {
            warn!(
                vm = machine.name(),
                error = chain(&error),
                "parts of its swap disk that nothing uses are left"
            );
        }
    }

    fn watch(self: &Arc<Self>, machine: &Arc<Machine>, guard: &Arc<Guard>) {
        self.lending
            .guards()
            .insert(machine.name().to_owned(), guard.clone());
        let (daemon, machine) = (Arc::downgrade(self), Arc::downgrade(machine));
        let guard = guard.clone();
        let spawned = std::thread::Builder::new()
            .name("borrowed".into())
            .spawn(move || keep_watch(&daemon, &machine, &guard));
        if let Err(error) = spawned {
            warn!(%error, "no thread to watch what is borrowed: it ends with its lease");
        }
    }

    /// A part can't be reached any more: QEMU goes on without it already. Takes it out, and sees that there is a copy again.
    pub(super) fn heal(
        &self,
        machine: &Machine,
        guard: &Guard,
        part: usize,
    ) -> Result<(), DaemonError> {
        let began = Instant::now();
        let directory = swap_directory(machine)?;
        let _alone = machine.swap_right();
        self.settle(machine, directory, guard)?;
        if guard.is_stopped() || guard.borrowing().parts[part].lost {
            return Ok(());
        }
        guard.cut(part);
        hear(machine, guard);
        let borrowing = guard.borrowing();
        let lost = &borrowing.parts[part];
        let lenders = lost.lenders();
        let why = self.hear_end_of(machine.name(), lost);
        if borrowing.is_alone(part) {
            if borrowing.copy_failed {
                // Errors, and not what was there before that write.
                graph::take_copy_out(&mut machine.monitor(), &borrowing)?;
            }
            error!(
                vm = machine.name(),
                lenders,
                durability = ?borrowing.durability,
                copy_failed = borrowing.copy_failed,
                "its swap disk is lost with its lender: there was no other copy; programs of the guest end"
            );
        } else {
            graph::take_out(&mut machine.monitor(), &borrowing, part)?;
        }
        let now = {
            let mut state = guard.state();
            state.borrowing.parts[part].lost = true;
            state.wires[part] = None;
            state.borrowing.clone()
        };
        if let Err(error) = write_note(directory, &now) {
            warn!(vm = machine.name(), %error, "its note can't be written");
        }
        if now.hangs_on_one() {
            wait_longer(guard);
        }
        self.release(lost.stripes().map(|stripe| stripe.lease));
        if now.has_copy() && now.copy_unwatched {
            error!(
                vm = machine.name(),
                "its copy wasn't compared since nobody would have heard of its failure: if a write to it failed then, old bytes are read; reboot its guest if the kernel's log tells errors of that disk"
            );
        }
        if !borrowing.is_alone(part) {
            warn!(
                vm = machine.name(),
                lenders,
                why,
                healed_ms = ms(began),
                "what it has borrowed is given up; its swap disk goes on, on the other copy"
            );
        }
        Ok(())
    }

    /// Asks for more time for what is borrowed, and hears what the lender wants.
    pub(super) fn renew(&self, machine: &Machine, guard: &Guard) -> Result<(), DaemonError> {
        let borrowing = guard.borrowing();
        let ttl = lease_ttl(borrowing.durability_now(), borrowing.bytes);
        let mut wanted = false;
        // None of them is over before that, as far as was heard.
        let mut holds: Option<Instant> = None;
        let mut heard_all = true;
        for (number, part) in borrowing.reached() {
            for stripe in part.stripes() {
                match self.renew_lease(stripe.lease, ttl, borrowing.copy_failed) {
                    Ok(lease) => {
                        wanted |= lease.recall_ms.is_some();
                        let until = Instant::now() + Duration::from_millis(lease.left_ms);
                        holds = Some(holds.map_or(until, |holds| holds.min(until)));
                    }
                    Err(error @ (RegistryError::NoLease { .. } | RegistryError::State { .. }))
                        if borrowing.has_copy() =>
                    {
                        warn!(vm = machine.name(), %error, "given up");
                        guard.cut(number);
                    }
                    // It holds for a while yet; its lender, too, knows until when.
                    Err(_) => heard_all = false,
                }
            }
        }
        if heard_all {
            guard.state().holds = holds;
        }
        if let Some(part) = self.silent_part(&borrowing) {
            let lenders = borrowing.parts[part].lenders();
            warn!(
                vm = machine.name(),
                lenders, "given up: a lender isn't heard of any more"
            );
            guard.cut(part);
        }
        if wanted && !guard.is_stopped() {
            info!(vm = machine.name(), "its lender needs the memory back");
            machine.comes_home(false);
            self.return_as(machine.name(), false)?;
        }
        Ok(())
    }

    /// Goes on with what the daemon before had borrowed for a VM, or had begun to.
    pub(super) fn resume_borrowing(self: &Arc<Self>, machine: &Arc<Machine>) {
        let Some(directory) = machine.vm().directory() else {
            return;
        };
        let Ok(mut borrowing) = VmDirectory::read_json::<Borrowing>(&directory.borrowed()) else {
            return;
        };
        let _alone = machine.swap_right();
        machine.use_generation(borrowing.generation);
        // Of a switch that was under way, the device tells how it ended.
        self.tidy(machine);
        let ended = graph::cancel(&|| machine.monitor()).map_err(GraphError::from);
        let top = ended.and_then(|()| graph::top(&mut machine.monitor(), machine.name()));
        if top.as_ref().is_ok_and(|top| top.node != borrowing.top()) {
            remove_note(directory);
            for part in &borrowing.parts {
                self.hear_end_of(machine.name(), part);
            }
            self.release(borrowing.leases());
            return;
        }
        // If it doesn't, that is found out before anything else is done.
        borrowing.phase = top.map_or(Phase::Switching, |_| Phase::Lent);
        // Nobody heard of failures meanwhile.
        borrowing.copy_unwatched = borrowing.copy.is_some();
        let find = |part: &Part| {
            let wire = Wire::find(machine.vm().process(), &part.reached_at()).ok()?;
            wire.filter(|_| !part.lost)
        };
        let wires = borrowing.parts.iter().map(find).collect();
        info!(vm = machine.name(), "what it has borrowed is watched again");
        let ttl = lease_ttl(borrowing.durability_now(), borrowing.bytes);
        let guard = Guard::new(machine.name(), borrowing, wires);
        // Who knows when they were renewed last.
        guard.state().holds = Some(Instant::now() + ttl / 2 + RESUMED);
        self.watch(machine, &guard);
    }
}

/// A number that no node of the swap disk has or had: what QEMU reports late of one that is gone is of no other.
fn new_generation(machine: &Machine) -> Result<u64, QmpError> {
    let free = graph::free_generation(&mut machine.monitor())?;
    Ok(machine.use_generation(free))
}

/// An export that a relay can connect to: that of a lender by iSCSI is on this host, in front of a session of its own.
fn reach(
    directory: &VmDirectory,
    lease: &Lease,
    endpoint: Endpoint,
) -> Result<Endpoint, DaemonError> {
    if endpoint.transport == Transport::Nbd {
        return Ok(endpoint);
    }
    bridge::begin(directory.path(), lease.id, &endpoint).map_err(|error| {
        lending(
            format!(
                "lender '{}' exports by iSCSI, and is not reached ({error})",
                lease.lender.host
            ),
            "look at the lender's log, and at what is between the hosts; or lend by NBD there (memfold lend --transport nbd)",
        )
    })
}

/// Copies of so many stripes each.
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

pub(super) fn write_note(directory: &VmDirectory, borrowing: &Borrowing) -> std::io::Result<()> {
    directory.write_json(&directory.borrowed(), borrowing)
}

fn remove_note(directory: &VmDirectory) {
    // There may be none; one that stays is found wrong by the next daemon.
    let _ = std::fs::remove_file(directory.borrowed());
}

/// Made by [`swap::place`].
fn is_swap_file(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let is_ours = |name: &str| name.starts_with("memfold-") && name.contains("-swap-");
    name.is_some_and(is_ours) && path.extension().is_some_and(|end| end == "raw")
}

/// The directory of a VM whose swap disk can be switched.
pub(super) fn swap_directory(machine: &Machine) -> Result<&VmDirectory, DaemonError> {
    let (Some(directory), Some(spec)) = (machine.vm().directory(), machine.vm().spec()) else {
        return Err(GraphError::NoSwapDisk(machine.name().to_owned()).into());
    };
    if spec.swap.is_none() {
        return Err(GraphError::NoSwapDisk(machine.name().to_owned()).into());
    }
    if spec.user.is_some() {
        return Err(lending(
            format!(
                "QEMU of VM '{}' has given its rights up (user = ...): it can't open a lender's socket or a new file",
                machine.name()
            ),
            "start the VM without --user",
        ));
    }
    Ok(directory)
}

/// Has a guest use its swap disk as soon as its agent answers.
pub(super) fn swap_on_when_booted(machine: &Arc<Machine>) {
    if machine.vm().spec().is_none_or(|spec| spec.swap.is_none()) {
        return;
    }
    when_booted(machine, "swap-on", |machine| {
        let vm = machine.name();
        let said = match machine.run(&swap::swap_on(), SWAP_ON_TIMEOUT) {
            Ok(done) if done.code == 0 => {
                info!(vm, "its guest uses its swap disk");
                return;
            }
            Ok(done) => String::from_utf8_lossy(&done.stderr).trim().to_owned(),
            Err(error) => chain(&error),
        };
        warn!(vm, said, "its guest does not use its swap disk");
    });
}

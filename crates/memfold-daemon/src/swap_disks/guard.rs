//! State of the RAM that one VM has borrowed for its swap disk: the leases, the connections, and
//! whether the leases still hold. The thread that watches the loan and users' requests share this
//! state.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use memfold_api::{Borrowed, LentPart, SwapPlace, VmSwap};
use memfold_lend::graph::{Borrowing, Part};
use memfold_lend::relay::start::Running;
use memfold_lend::relay::stripes::Stripes;
use memfold_lend::waits::Waits;
use memfold_lend::wire::Wire;
use memfold_vm::Process;
use parking_lot::Mutex;

use crate::leases::lease_ttl;

/// A loan of memory to one VM, which a thread watches.
#[derive(Debug)]
pub(crate) struct Guard {
    pub vm: String,
    stop: AtomicBool,
    pub state: Mutex<Watched>,
}

/// State of a watched loan.
#[derive(Debug)]
pub(crate) struct Watched {
    pub borrowing: Borrowing,
    /// QEMU's connections to the relays of the loan, indexed by part.
    pub wires: Vec<Option<Wire>>,
    /// Parts of which it is not known yet whether QEMU is still connected: an error kept this
    /// daemon from looking.
    pub unknown: BTreeSet<usize>,
    /// Number of the monitor connection on which QEMU's events were last received.
    pub heard_on: Option<u64>,
    /// Time until which all leases of the loan hold without renewal, according to the registry's
    /// last answers.
    pub holds: Option<Instant>,
    /// Reason to suspect that a lender will soon be lost, although its connection still works and
    /// must not be ended: no other complete copy of the data is known.
    pub doubt: Option<&'static str>,
    /// Time for which the guest has waited for requests to the swap disk.
    pub waits: Option<Waits>,
}

impl Guard {
    pub fn new(vm: &str, borrowing: Borrowing, wires: Vec<Option<Wire>>) -> Arc<Self> {
        let ttl = lease_ttl(borrowing.durability_now(), borrowing.bytes);
        Arc::new(Self {
            vm: vm.to_owned(),
            stop: AtomicBool::new(false),
            state: Mutex::new(Watched {
                borrowing,
                wires,
                unknown: BTreeSet::new(),
                heard_on: None,
                holds: Some(Instant::now() + ttl),
                doubt: None,
                waits: None,
            }),
        })
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub fn borrowing(&self) -> Borrowing {
        self.state.lock().borrowing.clone()
    }

    /// Returns the relays of those parts of the loan that QEMU still uses.
    pub fn relays(&self) -> Vec<Running> {
        let borrowing = self.borrowing();
        let parts = borrowing.reached();
        parts.filter_map(|(_, part)| part.relay.clone()).collect()
    }

    /// Cuts QEMU's connection to a part's relay. QEMU continues without the part at once. On a mere
    /// suspicion, this is allowed only if the part's bytes are elsewhere ([`Self::is_elsewhere`]).
    pub fn cut(&self, part: usize) {
        if let Some(Some(wire)) = self.state.lock().wires.get(part) {
            wire.cut();
        }
    }

    /// Looks for QEMU's connections to those parts of which they are not known.
    pub fn find_unknown(&self, qemu: &Process) -> io::Result<()> {
        let unknown = self.state.lock().unknown.clone();
        for part in unknown {
            let address = self.borrowing().parts[part].reached_at();
            let wire = Wire::find(qemu, &address)?;
            let mut state = self.state.lock();
            state.wires[part] = wire;
            state.unknown.remove(&part);
        }
        Ok(())
    }

    /// Returns the indexes of the loan's parts whose connection to QEMU has ended.
    pub fn ended(&self) -> Vec<usize> {
        let state = self.state.lock();
        let parts = state.borrowing.reached();
        let has_ended = |part: &usize| {
            let is_gone = || state.wires[*part].as_ref().is_none_or(Wire::is_cut);
            !state.unknown.contains(part) && is_gone()
        };
        parts.map(|(part, _)| part).filter(has_ended).collect()
    }

    /// Returns whether every byte of copy number `part` on lent RAM is elsewhere, too: in the copy
    /// on this host's disk, if that is known to be complete, or in another copy on lent RAM.
    pub fn is_elsewhere(&self, part: usize) -> bool {
        let (ended, borrowing) = (self.ended(), self.borrowing());
        let unknown = self.state.lock().unknown.clone();
        let is_there = |other: usize| !ended.contains(&other) && !unknown.contains(&other);
        let mut others = borrowing.reached().filter(|(other, _)| *other != part);
        borrowing.has_whole_copy() || others.any(|(other, _)| is_there(other))
    }

    /// Returns the reason to move the lent data to a local disk now; `None` if the data is safe.
    /// The data is in danger if the death of one lender, or the end of a lease, would lose it, or
    /// if that is suspected ([`Watched::doubt`]).
    pub fn is_in_danger(&self) -> Option<&'static str> {
        let state = self.state.lock();
        let borrowing = &state.borrowing;
        if borrowing.hangs_on_one() {
            return Some("one lender holds the only copy");
        }
        if state.doubt.is_some() {
            return state.doubt;
        }
        let ttl = lease_ttl(borrowing.durability_now(), borrowing.bytes);
        let is_over = |until: Instant| until.saturating_duration_since(Instant::now()) < ttl / 2;
        let is_lent = borrowing.reached().next().is_some();
        (is_lent && !borrowing.has_copy() && state.holds.is_some_and(is_over))
            .then_some("registry unreachable, and half of the leases' time is over")
    }

    /// Returns the place of the swap disk, and the lender of each part.
    pub fn swap(&self) -> VmSwap {
        let (now, borrowing) = (self.borrowed(), self.borrowing());
        let bytes = now.bytes;
        let copies = borrowing.reached().enumerate();
        let lent = copies.flat_map(|(copy, (_, part))| {
            let count = part.stripes().count() as u64;
            let of_each = Stripes { count, bytes }.of_each();
            part.stripes().map(move |stripe| LentPart {
                lender: stripe.lender.clone(),
                bytes: of_each,
                copy,
            })
        });
        VmSwap {
            bytes,
            place: now.place,
            durability: now.durability,
            lent: lent.collect(),
        }
    }

    pub fn borrowed(&self) -> Borrowed {
        let borrowing = self.borrowing();
        let parts = || borrowing.reached().map(|(_, part)| part);
        let lenders = parts().flat_map(Part::stripes).map(|s| s.lender.clone());
        let stripes = parts().map(|part| part.stripes().count()).next();
        let place = match (parts().count(), borrowing.durability) {
            (0, _) if borrowing.has_copy() => SwapPlace::OnCopy,
            (0, _) => SwapPlace::Lost,
            (n, _) if n < borrowing.parts.len() || borrowing.copy_failed => SwapPlace::Degraded,
            _ => SwapPlace::Lent,
        };
        Borrowed {
            vm: self.vm.clone(),
            place,
            bytes: borrowing.bytes,
            durability: Some(borrowing.durability),
            lenders: lenders.collect(),
            stripes: stripes.and_then(|n| u8::try_from(n).ok()),
            waits: self.state.lock().waits,
            changed: false,
            took_ms: 0,
        }
    }
}

//! Borrows RAM of another host for a VM that keeps swapping, and returns the RAM after the VM has
//! stopped swapping. Used if the daemon runs with `--borrow auto`.
//!
//! The measure is the traffic of the VM's swap disk, as QEMU counts it. Short bursts are ignored,
//! because each move copies the whole disk. The daemon borrows after ten seconds of at least
//! [`BUSY`], and returns the RAM after ten minutes below [`IDLE`], which is far lower. RAM that an
//! operator borrowed is not returned automatically. After an operator or a lender has ended a VM's
//! loan, the daemon does not borrow for that VM for ten minutes.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{BorrowRequest, SwapPlace};
use memfold_host::chain;
use memfold_lend::{Durability, graph};
use memfold_vm::Qmp;
use serde_json::json;
use tracing::{info, warn};

use crate::backoff::{Backoff, LONGEST_WAIT};
use crate::swap_disks::SwapDisks;
use crate::swap_disks::borrow::Asker;
use crate::swap_disks::note::{saved_request, swap_directory};
use crate::threads;

/// Time between two measurements.
const LOOK: Duration = Duration::from_secs(2);

/// Traffic of a swap device from which the VM counts as swapping, in bytes a second.
const BUSY: u64 = 1 << 20;

/// Number of consecutive busy measurements that begin a loan.
const BUSY_LOOKS: u32 = 5;

/// Traffic of a swap device below which the VM counts as not swapping, in bytes a second.
const IDLE: u64 = 64 << 10;

/// Idle time after which an automatic loan ends. Also the time without an automatic loan after an
/// operator or a lender has ended the VM's loan.
const REST: Duration = LONGEST_WAIT;

/// A move of a VM's swap disk to or from lent RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SwapMove {
    Borrow,
    GiveBack,
}

/// A VM's swap traffic over time, and its automatic loan.
#[derive(Debug, Default)]
struct Habit {
    last: Option<(u64, Instant)>,
    busy_looks: u32,
    idle_since: Option<Instant>,
    /// Whether the present loan is an automatic one, as far as this daemon knows.
    by_itself: bool,
    /// Moves of the swap disk to and from lent RAM. They run on a thread while other VMs are
    /// measured.
    tries: Backoff<SwapMove>,
}

impl Habit {
    /// Decides whether to borrow or to return. `moved`: bytes that the swap device has transferred
    /// so far; `place`: where the swap disk is.
    fn look(&mut self, moved: u64, place: SwapPlace, now: Instant) -> Option<SwapMove> {
        let (before, at) = self.last.replace((moved, now))?;
        let ms = u64::try_from(now.duration_since(at).as_millis()).unwrap_or(u64::MAX);
        // A smaller total belongs to a new device after a reboot, and counts as no traffic.
        let rate = moved.saturating_sub(before).saturating_mul(1000) / ms.max(1);
        self.busy_looks = if rate >= BUSY { self.busy_looks + 1 } else { 0 };
        if rate >= IDLE {
            self.idle_since = None;
        }
        let idle_since = *self.idle_since.get_or_insert(now);
        let is_lent = !matches!(place, SwapPlace::OnDisk | SwapPlace::OnCopy);
        if self.by_itself && place == SwapPlace::OnDisk {
            // An operator, or a lender that needs its memory, has ended the loan.
            self.by_itself = false;
            self.tries.rest(now + REST);
        }
        let is_over = self.by_itself && now.duration_since(idle_since) >= REST;
        match is_lent {
            _ if self.tries.rests(now) => None,
            true if is_over => Some(SwapMove::GiveBack),
            false if self.busy_looks >= BUSY_LOOKS => Some(SwapMove::Borrow),
            _ => None,
        }
    }

    /// Notes that an operator decides where the VM's swap disk is.
    fn leave_to_operator(&mut self, now: Instant) {
        self.by_itself = false;
        self.last = None;
        self.busy_looks = 0;
        self.tries.rest(now + REST);
    }

    /// Returns whether a move is in progress. If a move has ended, records its result.
    fn is_switching(&mut self, now: Instant) -> bool {
        if let Some(done) = self.tries.ended(now) {
            self.moved(done);
        }
        self.tries.is_under_way()
    }

    fn moved(&mut self, done: SwapMove) {
        self.by_itself = done == SwapMove::Borrow;
        if self.by_itself {
            self.idle_since = None;
        }
        // The traffic since the last measurement includes the move itself.
        self.last = None;
    }
}

/// Returns the bytes that a VM's swap device has read and written so far; `None` if QEMU does not
/// report them.
fn moved(qmp: &mut Qmp, node: &str) -> Option<u64> {
    let stats = qmp.execute("query-blockstats", json!({})).ok()?;
    let mut devices = stats.as_array()?.iter();
    let of_it = devices.find(|device| device["node-name"] == node)?;
    let bytes = |name: &str| of_it["stats"][name].as_u64();
    Some(bytes("rd_bytes")?.saturating_add(bytes("wr_bytes")?))
}

impl SwapDisks {
    /// Starts the thread of automatic loans.
    pub(crate) fn begin_borrowing_by_itself(self: &Arc<Self>) -> io::Result<()> {
        let mut habits = BTreeMap::new();
        threads::repeat("borrow", LOOK, self, move |disks| {
            disks.look_at_swapping(&mut habits);
        })
    }

    fn look_at_swapping(self: &Arc<Self>, habits: &mut BTreeMap<u32, Habit>) {
        let mut machines = self.registry.machines();
        machines.retain(|m| swap_directory(m).is_ok());
        habits.retain(|id, _| machines.iter().any(|machine| machine.id() == *id));
        for machine in machines {
            let vm = machine.name();
            // VMs with an operator's request get no automatic loan, also for a while after the
            // operator has withdrawn it.
            if saved_request(&machine).is_some() {
                let habit = habits.entry(machine.id()).or_default();
                habit.leave_to_operator(Instant::now());
                continue;
            }
            let known = habits.get_mut(&machine.id());
            if known.is_some_and(|habit| habit.is_switching(Instant::now())) {
                continue;
            }
            let found = {
                let mut qmp = machine.monitor();
                let top = graph::top(&mut qmp, vm);
                top.ok().and_then(|top| moved(&mut qmp, &top.node))
            };
            let Some(moved) = found else { continue };
            let guard = self.guard(vm);
            let noted = guard.as_ref().is_some_and(|g| g.borrowing().by_itself);
            let place = guard.map_or(SwapPlace::OnDisk, |guard| guard.borrowed().place);
            // This daemon ends the automatic loans of the earlier daemon, too.
            let habit = habits.entry(machine.id()).or_insert_with(|| Habit {
                by_itself: noted,
                ..Habit::default()
            });
            let work = match habit.look(moved, place, Instant::now()) {
                None => continue,
                Some(SwapMove::Borrow) => Self::borrow_by_itself,
                Some(SwapMove::GiveBack) => Self::give_back_by_itself,
            };
            let (disks, name) = (self.clone(), vm.to_owned());
            habit
                .tries
                .begin("borrow-one", vm, move || work(&disks, &name));
        }
    }

    fn give_back_by_itself(self: &Arc<Self>, vm: &str) -> Option<SwapMove> {
        match self.return_as(vm, false) {
            Ok(_) => {
                info!(
                    vm,
                    "VM no longer swaps; automatically borrowed memory returned"
                );
                Some(SwapMove::GiveBack)
            }
            Err(error) => {
                warn!(
                    vm,
                    error = chain(&error),
                    "cannot return the VM's automatically borrowed memory; retrying later"
                );
                None
            }
        }
    }

    fn borrow_by_itself(self: &Arc<Self>, vm: &str) -> Option<SwapMove> {
        let request = BorrowRequest {
            durability: Durability::Disk,
            ..BorrowRequest::default()
        };
        match self.borrow_as(vm, &request, Asker::Itself) {
            Ok(done) => {
                info!(vm, lenders = ?done.lenders, "VM keeps swapping; memory for its swap disk borrowed automatically");
                Some(SwapMove::Borrow)
            }
            Err(error) => {
                info!(
                    vm,
                    error = chain(&error),
                    "VM keeps swapping, but memfold cannot borrow memory for its swap disk; retrying later"
                );
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A simulated VM whose swap device transfers this many bytes between two measurements.
    struct Vm {
        habit: Habit,
        moved: u64,
        now: Instant,
    }

    impl Vm {
        fn new() -> Self {
            Self {
                habit: Habit::default(),
                moved: 0,
                now: Instant::now(),
            }
        }

        fn look(&mut self, bytes: u64, place: SwapPlace) -> Option<SwapMove> {
            self.now += LOOK;
            self.moved += bytes;
            self.habit.look(self.moved, place, self.now)
        }

        /// Measures until the decision is `wish`. Returns the number of measurements.
        fn until(&mut self, wish: Option<SwapMove>, bytes: u64, place: SwapPlace) -> u32 {
            for look in 1..2000 {
                match self.look(bytes, place) {
                    None => {}
                    other => {
                        assert_eq!(other, wish);
                        return look;
                    }
                }
            }
            panic!("never {wish:?}");
        }
    }

    #[test]
    fn a_vm_that_swaps_for_seconds_borrows_memory_and_a_vm_that_swaps_in_bursts_does_not() {
        let mut vm = Vm::new();
        for look in 0..300 {
            // The device is busy for eight of the ten seconds that a loan needs.
            let bytes = if look % 5 == 0 { 0 } else { 100 * MIB };
            assert_eq!(vm.look(bytes, SwapPlace::OnDisk), None);
        }
        vm.look(0, SwapPlace::OnDisk);
        assert_eq!(
            vm.until(Some(SwapMove::Borrow), 2 * MIB, SwapPlace::OnDisk),
            5
        );
        // After the loss of a lender, the VM borrows from another one.
        vm.habit.moved(SwapMove::Borrow);
        assert_eq!(vm.look(2 * MIB, SwapPlace::Lent), None);
        assert_eq!(
            vm.until(Some(SwapMove::Borrow), 2 * MIB, SwapPlace::OnCopy),
            1
        );
    }

    #[test]
    fn a_loan_made_automatically_counts_as_automatic_until_its_return_succeeds() {
        for (done, before, by_itself) in [
            (Some(SwapMove::Borrow), false, true),
            (Some(SwapMove::GiveBack), true, false),
            (None, true, true),
        ] {
            let mut habit = Habit {
                by_itself: before,
                ..Habit::default()
            };
            habit.tries.begin("switch", "a", move || done);
            let now = Instant::now();
            while habit.is_switching(now) {
                std::thread::yield_now();
            }
            assert_eq!(habit.by_itself, by_itself);
            assert_eq!(habit.tries.rests(now), done.is_none());
        }
    }

    #[test]
    fn after_ten_idle_minutes_an_automatic_loan_is_returned_and_a_manual_loan_is_kept() {
        let mut vm = Vm::new();
        vm.look(0, SwapPlace::OnDisk);
        vm.until(Some(SwapMove::Borrow), 2 * MIB, SwapPlace::OnDisk);
        vm.habit.moved(SwapMove::Borrow);
        for _ in 0..600 {
            // The traffic is neither busy nor idle.
            assert_eq!(vm.look(MIB, SwapPlace::Lent), None);
        }
        let looks = vm.until(Some(SwapMove::GiveBack), 0, SwapPlace::Lent);
        assert!((300..=302).contains(&looks), "{looks}");
        vm.habit.moved(SwapMove::GiveBack);
        for _ in 0..1000 {
            assert_eq!(vm.look(0, SwapPlace::OnDisk), None);
        }
        let mut operators = Vm::new();
        for _ in 0..1000 {
            assert_eq!(operators.look(0, SwapPlace::Lent), None);
        }
    }

    #[test]
    fn after_an_operators_return_automatic_borrowing_waits_for_ten_minutes() {
        let mut vm = Vm::new();
        vm.look(0, SwapPlace::OnDisk);
        // The operator's loan: the VM is looked at, and left alone.
        vm.habit.leave_to_operator(vm.now);
        let looks = vm.until(Some(SwapMove::Borrow), 2 * MIB, SwapPlace::OnDisk);
        assert!((300..=306).contains(&looks), "{looks}");
    }

    #[test]
    fn after_a_recall_automatic_borrowing_waits_and_each_failure_lengthens_the_wait() {
        let mut vm = Vm::new();
        vm.look(0, SwapPlace::OnDisk);
        vm.until(Some(SwapMove::Borrow), 2 * MIB, SwapPlace::OnDisk);
        vm.habit.moved(SwapMove::Borrow);
        vm.look(2 * MIB, SwapPlace::Lent);
        let looks = vm.until(Some(SwapMove::Borrow), 2 * MIB, SwapPlace::OnDisk);
        assert!((300..=302).contains(&looks), "{looks}");
        let mut waits = Vec::new();
        for _ in 0..7 {
            vm.habit.tries.failed(vm.now);
            waits.push(vm.until(Some(SwapMove::Borrow), 2 * MIB, SwapPlace::OnDisk));
        }
        assert_eq!(waits, [15, 30, 60, 120, 240, 300, 300]);
    }
}

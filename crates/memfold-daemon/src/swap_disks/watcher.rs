//! A thread that watches one VM whose swap disk is on other hosts' RAM. It notices when a lending
//! host or a relay process (between QEMU and that host) fails, renews the leases, and receives
//! QEMU's events.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use memfold_host::chain;
use memfold_lend::relay::start::Running;
use memfold_lend::waits;
use tracing::warn;

use crate::leases::RENEW;
use crate::machine::Machine;
use crate::swap_disks::SwapDisks;
use crate::swap_disks::failures::{Comparison, hear, take_failed_copy_out};
use crate::swap_disks::guard::Guard;
use crate::swap_disks::renew::{cut_late_copy, end_stop};
use crate::threads;

/// Time between two checks of the connections to relays.
const WATCH: Duration = Duration::from_millis(100);

/// Pause before a failed move away from a single lender is repeated.
const MOVE_AGAIN: Duration = Duration::from_secs(15);

/// Number of consecutive checks that must find a relay stopped before the loan reacts: a debugger
/// may stop a process for a moment.
const STOPPED_LOOKS: u32 = 5;

impl SwapDisks {
    pub(super) fn watch(self: &Arc<Self>, machine: &Arc<Machine>, guard: &Arc<Guard>) {
        self.guards
            .lock()
            .insert(machine.name().to_owned(), guard.clone());
        let (disks, machine) = (Arc::downgrade(self), Arc::downgrade(machine));
        let guard = guard.clone();
        let watch = move || keep_watch(&disks, &machine, &guard);
        if let Err(error) = threads::begin("borrowed", watch) {
            warn!(%error, "cannot start the thread that renews the lease of a VM's borrowed memory; run 'memfold return' or restart the daemon within a minute");
        }
    }

    /// Ends a loan whose VM has ended, if nothing else has ended the loan. The loan of a VM that
    /// ends during a move is listed only when the daemon has already forgotten the VM.
    fn end_left_over(&self, guard: &Arc<Guard>) {
        let mut guards = self.guards.lock();
        let listed = guards.get(&guard.vm);
        // The next VM of this name may have borrowed since.
        let is_left = listed.is_some_and(|listed| Arc::ptr_eq(listed, guard));
        let left = if is_left {
            guards.remove(&guard.vm)
        } else {
            None
        };
        drop(guards);
        self.end(left);
    }
}

fn keep_watch(disks: &Weak<SwapDisks>, machine: &Weak<Machine>, guard: &Arc<Guard>) {
    let mut renewed = Instant::now();
    let mut moved: Option<Instant> = None;
    let mut comparison = Comparison::default();
    let (mut is_stop_told, mut is_search_told) = (false, false);
    let mut is_copy_out = false;
    // The watch ends when no lent part is left.
    while !guard.is_stopped() && guard.borrowing().reached().next().is_some() {
        std::thread::sleep(WATCH);
        let Some(disks) = disks.upgrade() else {
            return;
        };
        let Some(machine) = machine.upgrade() else {
            disks.end_left_over(guard);
            return;
        };
        let vm = &guard.vm;
        if let Err(error) = guard.find_unknown(machine.vm().process()) {
            if !std::mem::replace(&mut is_search_told, true) {
                warn!(vm, %error, "cannot look for QEMU's connections to the relays of the swap disk, so a lost lender is not noticed; retrying until it succeeds");
            }
        }
        for part in guard.ended() {
            if let Err(error) = disks.heal(&machine, guard, part) {
                // The next check tries again. The monitor of a VM that ends fails, too.
                warn!(
                    vm,
                    error = chain(&error),
                    "cannot remove the lost lender's block node from QEMU; retrying every second"
                );
                std::thread::sleep(RENEW);
            }
        }
        if stands_still(guard) {
            end_stop(guard, &mut is_stop_told);
        } else {
            is_stop_told = false;
        }
        // The monitor may wait for the relay that has to be cut off.
        if renewed.elapsed() >= RENEW {
            cut_late_copy(guard);
        }
        hear(&machine, guard);
        comparison.step(&machine, guard);
        // The registry may be slow, so its calls come later.
        take_failed_copy_out(&machine, guard, &mut is_copy_out);
        if renewed.elapsed() >= RENEW {
            renewed = Instant::now();
            if let Err(error) = disks.reconcile_alone(&machine, guard) {
                warn!(
                    vm,
                    error = chain(&error),
                    "location of the swap disk (this host or a lender) still unknown: QEMU did not answer; asking again every second"
                );
            }
            // If the figures cannot be read now, they are read a second later.
            if let Ok(Some(counted)) = waits::look(&mut machine.monitor()) {
                guard.state.lock().waits = Some(counted);
            }
            if let Err(error) = disks.renew(&machine, guard) {
                warn!(
                    vm,
                    error = chain(&error),
                    "cannot return the swap disk to this host; retrying every second"
                );
            }
        }
        let is_due = moved.is_none_or(|moved| moved.elapsed() >= MOVE_AGAIN);
        if let Some(why) = guard.is_in_danger().filter(|_| is_due) {
            moved = Some(Instant::now());
            warn!(
                vm,
                why, "moving the swap disk to this host's disk; no action is needed"
            );
            machine.comes_home(guard.borrowing().hangs_on_one());
            if let Err(error) = disks.return_as(machine.name(), false) {
                warn!(
                    vm,
                    error = chain(&error),
                    "cannot move the swap disk to this host's disk; retrying in 15 s"
                );
            }
        }
    }
}

/// Returns whether a relay that QEMU may wait for is stopped, for example by SIGSTOP, for longer
/// than a moment. QEMU is not asked meanwhile, because its monitor may wait for that relay.
fn stands_still(guard: &Guard) -> bool {
    (0..STOPPED_LOOKS).all(|look| {
        if look > 0 {
            std::thread::sleep(WATCH);
        }
        guard.relays().iter().any(Running::is_stopped)
    })
}

#[cfg(test)]
mod tests {
    use memfold_lend::graph::Phase;
    use memfold_lend::{LeaseState, Registry as _};

    use super::*;
    use crate::leases::Leases;
    use crate::swap_disks::fixtures::lent;
    use crate::vm_registry::VmRegistry;

    #[test]
    fn the_loan_of_a_vm_that_ended_during_the_move_is_dropped_and_its_lease_released() {
        let directory = tempfile::tempdir().unwrap();
        let (registry, _, mut borrowing) = lent(directory.path(), 1 << 20);
        borrowing.phase = Phase::Switching;
        let leases = Leases::of_registry("b", registry.clone(), directory.path());
        let vms = VmRegistry::open(directory.path()).unwrap();
        let disks = Arc::new(SwapDisks::new(Arc::new(vms), Arc::new(leases)));
        let list = |guard: &Arc<Guard>| disks.guards.lock().insert("v".into(), guard.clone());
        let guard = Guard::new("v", borrowing.clone(), vec![None]);
        list(&guard);
        // The daemon has forgotten the VM.
        keep_watch(&Arc::downgrade(&disks), &Weak::new(), &guard);
        assert!(disks.borrowed().is_empty());
        let state = registry.picture().unwrap().leases[0].state;
        assert_eq!(state, LeaseState::Released);
        // A loan of the next VM of this name stays.
        list(&Guard::new("v", borrowing, vec![None]));
        disks.end_left_over(&guard);
        assert_eq!(disks.borrowed().len(), 1);
    }
}

//! Moves a VM's swap disk from the RAM of other hosts back to this host's disk.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Instant;

use memfold_api::{Borrowed, SwapPlace};
use memfold_lend::graph::{self, Borrowing, Copying, GraphError, NO_GAIN, Phase};
use memfold_vm::{QmpError, swap};
use tracing::{info, warn};

use crate::error::{DaemonError, refused, state_error};
use crate::leases::{Leases, RENEW, lease_ttl, returned};
use crate::locks::SwapRight;
use crate::machine::Machine;
use crate::move_progress::MoveProgress;
use crate::swap_disks::SwapDisks;
use crate::swap_disks::failures::hear;
use crate::swap_disks::guard::Guard;
use crate::swap_disks::note::{forget_request, note, swap_directory};
use crate::swap_disks::renew::cut_late_copy;

impl SwapDisks {
    /// Moves a VM's swap disk back to this host's disk, and deletes the operator's request.
    pub fn return_memory(&self, vm: &str) -> Result<Borrowed, DaemonError> {
        self.return_as(vm, true)
    }

    /// Moves a VM's swap disk back to this host's disk. The operator's request is deleted only with
    /// `for_good`.
    pub(super) fn return_as(&self, vm: &str, for_good: bool) -> Result<Borrowed, DaemonError> {
        let began = Instant::now();
        let machine = self.registry.machine(vm)?;
        let directory = swap_directory(&machine)?;
        let right = machine.swap_right();
        if for_good {
            // The request is deleted first. Even if a later step fails, the loan is not repeated
            // against the operator's decision.
            forget_request(directory);
        }
        let guard = self.reconciled_guard(&machine, &right)?;
        let top = graph::top(&mut machine.monitor(), vm)?;
        let mut changed = false;
        if let Some(guard) = guard {
            let before = guard.borrowed();
            if before.place == SwapPlace::Lost {
                return Err(refused(
                    format!("the swap disk of VM '{vm}' is lost with its lender (durability none)"),
                    format!("end the VM: memfold vm stop {vm}"),
                ));
            }
            self.give_back(&machine, &guard, &right)?;
            changed = before.place != SwapPlace::OnCopy;
        }
        Ok(returned(vm.to_owned(), top.bytes, changed, began))
    }

    fn give_back(
        &self,
        machine: &Machine,
        guard: &Guard,
        right: &SwapRight<'_>,
    ) -> Result<(), DaemonError> {
        hear(machine, guard);
        let borrowing = guard.borrowing();
        let is_last = borrowing.reached().next().is_none();
        if borrowing.must_drop_copy() {
            graph::take_copy_out(&mut machine.monitor(), &borrowing)?;
        }
        if borrowing.has_whole_copy() || is_last {
            // As far as is known, the copy on this host has every write, or nothing else is left.
            for (part, _) in borrowing.reached() {
                graph::take_out(&mut machine.monitor(), &borrowing, part)?;
                let now = {
                    let mut state = guard.state.lock();
                    state.borrowing.parts[part].lost = true;
                    state.borrowing.clone()
                };
                // The next daemon must not take this for the loss of a lender.
                note(machine, &now);
            }
        } else {
            self.move_to_disk(machine, guard, right)?;
        }
        // The lease is released only after QEMU no longer uses it.
        Self::clean_up(machine);
        self.drop_note(machine, right);
        info!(
            vm = machine.name(),
            "swap disk returned to this host's disk"
        );
        Ok(())
    }

    /// Copies the data from lent RAM to a new file on this host.
    fn move_to_disk(
        &self,
        machine: &Machine,
        guard: &Guard,
        _: &SwapRight<'_>,
    ) -> Result<(), DaemonError> {
        let borrowing = guard.borrowing();
        let place = state_error(swap_directory(machine)?.path());
        let file = swap::place(machine.name()).map_err(place)?;
        let add = |files: &mut Vec<PathBuf>| files.push(file.clone());
        machine.vm().change_temporary(add).map_err(place)?;
        let step = "swap disk copied to this host's disk";
        let progress = MoveProgress::begin(&self.moves, machine.name(), step);
        let moved = (|| {
            let generation = new_generation(machine)?;
            let mut qmp = machine.monitor();
            let to = graph::build_on_disk(
                &mut qmp,
                generation,
                (&file, machine.vm().user()),
                borrowing.bytes,
            )?;
            drop(qmp);
            // The caller may be the thread that renews the leases, so the leases are renewed here.
            let kept: Cell<Option<Instant>> = Cell::default();
            let is_stall_told = Cell::new(false);
            let keep = |copying: &Copying| {
                progress.show(step, copying);
                // The copy is not given up: this may be the only way to save the data.
                if copying.stalled >= NO_GAIN && !is_stall_told.replace(true) {
                    warn!(
                        vm = machine.name(),
                        "swap disk not moved to this host's disk yet: its guest writes faster than the data is copied; pause the VM until the move has ended"
                    );
                }
                if kept.get().is_none_or(|kept| kept.elapsed() >= RENEW) {
                    kept.set(Some(Instant::now()));
                    keep_leases(&self.leases, &borrowing);
                    // The thread that watches the loan may be the caller, too.
                    cut_late_copy(guard);
                }
                None
            };
            graph::switch(&|| machine.monitor(), &borrowing.top(), &to, &keep)
        })();
        match &moved {
            // The state is determined before any other operation.
            Err(GraphError::Unknown(_)) => guard.state.lock().borrowing.phase = Phase::Switching,
            Err(_) => Self::clean_up(machine),
            Ok(()) => {}
        }
        Ok(moved?)
    }
}

/// Renews the leases of a loan during its move to this host's disk. The lenders hold the only copy
/// that is known to be complete, also if the copy on this host is only not verified yet. The
/// registry records that, so that a lender that recalls its memory waits for the move.
fn keep_leases(leases: &Leases, borrowing: &Borrowing) {
    let parts = borrowing.reached().flat_map(|(_, part)| part.stripes());
    let ttl = lease_ttl(borrowing.durability_now(), borrowing.bytes);
    leases.keep(parts.map(|stripe| stripe.lease), ttl, true);
}

/// Returns a number that no block node of the swap disk has or had, so that late events about a
/// removed node do not match a new one.
pub(super) fn new_generation(machine: &Machine) -> Result<u64, QmpError> {
    let free = graph::free_generation(&mut machine.monitor())?;
    Ok(machine.use_generation(free))
}

#[cfg(test)]
mod tests {
    use memfold_lend::{Durability, Registry as _};

    use super::*;
    use crate::swap_disks::fixtures::lent;

    #[test]
    fn a_lender_that_recalls_memory_waits_for_the_move_of_a_disk_whose_copy_is_not_verified() {
        let directory = tempfile::tempdir().unwrap();
        let (registry, lease, mut borrowing) = lent(directory.path(), 2000 << 20);
        borrowing.copy_unwatched = true;
        let within = lease.time_to_give_back();
        registry.recall(lease.id, &lease.lender, within).unwrap();
        let leases = Leases::of_registry("b", registry.clone(), directory.path());
        keep_leases(&leases, &borrowing);
        let now = registry.picture().unwrap().leases.remove(0);
        // The lender does not end the lease at once if it is short of memory.
        assert_eq!(now.durability, Durability::None);
        // The borrower has 10 s, and a second for each 20 MiB of its disk.
        assert!(now.recall_ms.unwrap() > 100_000, "{now:?}");
    }
}

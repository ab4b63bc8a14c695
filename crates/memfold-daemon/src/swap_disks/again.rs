//! Moves a VM's swap disk to the RAM of another host again, after the VM lost the RAM that an
//! operator had borrowed for it (`memfold borrow`). The operator's request stays in force until the
//! operator takes it back (`memfold return`), or the VM ends.
//!
//! If the host that lends the RAM dies, is upgraded or needs its memory, the swap disk moves to
//! this host's disk, which is safe and slow. When a host has free memory again, the swap disk is
//! moved to that host: one minute after the loss of a lender, or ten minutes after a lender took
//! its memory back. The longer pause keeps this host from asking at once for memory that the lender
//! needs. The request is a file in the VM's directory ([`VmDirectory::wish`]), so the next daemon
//! knows it, too.
//!
//! If the daemon borrowed the RAM by itself (`serve --borrow auto`), this module does nothing: a VM
//! that keeps swapping borrows again anyway.
//!
//! [`VmDirectory::wish`]: memfold_vm::VmDirectory::wish

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{BorrowRequest, SwapPlace};
use memfold_host::chain;
use tracing::info;

use crate::backoff::{Backoff, LONGEST_WAIT};
use crate::machine::Machine;
use crate::swap_disks::SwapDisks;
use crate::swap_disks::borrow::Asker;
use crate::swap_disks::note::saved_request;
use crate::threads;

/// Time between two checks for swap disks to move again.
const LOOK: Duration = Duration::from_secs(2);

/// Time for which a swap disk stays on this host after its lender was lost.
const AFTER_LOSS: Duration = Duration::from_secs(60);

/// Time for which a swap disk stays on this host after the lender recalled its memory, or if the
/// lender's state is unknown.
const AFTER_RECALL: Duration = LONGEST_WAIT;

/// Returns the time to wait before borrowing again, by the place of a swap disk that should be
/// lent; `None`: do not borrow. `lost_a_copy`: the disk returned to this host because a copy was
/// lost.
const fn rest(place: SwapPlace, lost_a_copy: bool) -> Option<Duration> {
    match place {
        SwapPlace::OnCopy => Some(AFTER_LOSS),
        // When one of two lenders was lost, the replica was moved to the disk automatically.
        SwapPlace::OnDisk if lost_a_copy => Some(AFTER_LOSS),
        SwapPlace::OnDisk => Some(AFTER_RECALL),
        // The data of a lost disk cannot be recovered. A degraded disk is already being moved to
        // this host.
        SwapPlace::Lent | SwapPlace::Degraded | SwapPlace::Lost => None,
    }
}

/// Forgets VMs whose swap disks are lent again, so that a later loss waits like a first loss.
fn forget_done(waiting: &mut BTreeMap<u32, Backoff<()>>, now: Instant) {
    waiting.retain(|_, tries| tries.ended(now).is_none());
}

impl SwapDisks {
    /// Starts the thread that borrows again.
    pub(crate) fn begin_borrowing_again(self: &Arc<Self>) -> io::Result<()> {
        let mut waiting = BTreeMap::new();
        threads::repeat("wishes", LOOK, self, move |disks| {
            disks.borrow_again(&mut waiting);
        })
    }

    /// Returns the VMs whose swap disk should be lent and is not, with the operator's request and
    /// the time to wait.
    fn wishing(&self) -> Vec<(Arc<Machine>, BorrowRequest, Duration)> {
        let machines: Vec<Arc<Machine>> = self.registry.machines();
        let wishing = machines.into_iter().filter_map(|machine| {
            let guard = self.guard(machine.name());
            let place = guard.map_or(SwapPlace::OnDisk, |guard| guard.borrowed().place);
            let rest = rest(place, machine.has_lost_a_copy())?;
            let request = saved_request(&machine)?;
            Some((machine, request, rest))
        });
        wishing.collect()
    }

    /// Returns the names of VMs that borrow again as soon as a lender has free memory.
    pub(crate) fn borrow_again_later(&self) -> Vec<String> {
        let wishing = self.wishing();
        let names = wishing.iter().map(|(machine, ..)| machine.name());
        names.map(str::to_owned).collect()
    }

    fn borrow_again(self: &Arc<Self>, waiting: &mut BTreeMap<u32, Backoff<()>>) {
        let now = Instant::now();
        forget_done(waiting, now);
        let wishing = self.wishing();
        // A VM may already count as lent while its move is in progress.
        waiting.retain(|id, tries| {
            tries.is_under_way() || wishing.iter().any(|(machine, ..)| machine.id() == *id)
        });
        for (machine, request, rest) in wishing {
            let vm = machine.name().to_owned();
            let tries = waiting.entry(machine.id()).or_insert_with(|| {
                info!(
                    vm,
                    seconds = rest.as_secs(),
                    "VM will borrow memory for its swap disk again after a pause, if a lender then has free memory"
                );
                let mut tries = Backoff::default();
                tries.rest(now + rest);
                tries
            });
            if tries.is_under_way() || tries.rests(now) {
                continue;
            }
            let (disks, name) = (self.clone(), vm.clone());
            tries.begin("borrow-again", &vm, move || {
                disks.try_again(&name, &request)
            });
        }
    }

    fn try_again(self: &Arc<Self>, vm: &str, request: &BorrowRequest) -> Option<()> {
        match self.borrow_as(vm, request, Asker::SavedRequest) {
            Ok(done) => {
                info!(vm, lenders = ?done.lenders, "swap disk is on lent memory again");
                Some(())
            }
            Err(error) => {
                info!(
                    vm,
                    error = chain(&error),
                    "VM cannot borrow memory for its swap disk again yet; retrying later"
                );
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_loan_is_replaced_after_one_minute_and_a_recalled_loan_after_ten_minutes() {
        for (place, lost_a_copy, minutes) in [
            (SwapPlace::OnCopy, false, Some(1)),
            (SwapPlace::OnDisk, true, Some(1)),
            (SwapPlace::OnDisk, false, Some(10)),
            (SwapPlace::Lent, true, None),
            (SwapPlace::Degraded, true, None),
            (SwapPlace::Lost, true, None),
        ] {
            let wanted = minutes.map(|minutes: u64| Duration::from_secs(60 * minutes));
            assert_eq!(rest(place, lost_a_copy), wanted, "{place:?} {lost_a_copy}");
        }
    }

    #[test]
    fn only_a_successful_attempt_to_borrow_again_ends_the_series_of_attempts() {
        let now = Instant::now();
        let mut waiting = BTreeMap::new();
        for (id, outcome) in [(1, Some(())), (2, None)] {
            let mut tries = Backoff::default();
            tries.begin("try", "a", move || outcome);
            waiting.insert(id, tries);
        }
        while waiting.values().any(Backoff::is_under_way) {
            forget_done(&mut waiting, now);
            std::thread::yield_now();
        }
        assert_eq!(waiting.keys().collect::<Vec<_>>(), [&2]);
        assert!(waiting[&2].rests(now));
    }
}

//! The order of locks.
//!
//! Whoever holds a lock takes only such as stand below it here:
//!
//! ```text
//!   one answer for all who ask    Reports (joint, figures), Views (maps, sharing, doctor, explaining, estimating)
//!   rights, held for long         SaveRight, SwapRight, Snapshots (twins), SwapVolumes (turns), KsmSteering (merging), VmRegistry (starts),
//!                                 Segments (removing): in the order of [`Rank`]
//!   states of services            DebtWatch, KsmSteering (steered), Lending (lender), SwapDisks (guards), SwapVolumes (keepers)
//!   the registry                  Arrivals, then VmRegistry (vms)
//!   states of one thing           Guard, Keeper, Machine's fields, SnapshotLocks, Leases (heard, distrust), Folding (last), Samples
//! ```
//! Debug builds check the rights. Two of one rank are never held at once by a thread.

use std::cell::Cell;
use std::marker::PhantomData;

/// Rights that are held for long, in the order in which they are taken.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rank {
    /// To save a VM, or to change what it maps.
    Save,
    /// To change what a VM's swap disk uses.
    Swap,
    /// To restore a VM that nothing sets apart from others.
    Twins,
    /// To change something in a volume group.
    VolumeGroup,
    /// To begin, end or interrupt merging.
    Merging,
    /// To start VMs, or to keep them from being started.
    Starts,
    /// To look segments up, or to remove them.
    Segments,
}

thread_local! {
    /// A bit for each rank that this thread holds.
    static HELD: Cell<u8> = const { Cell::new(0) };
}

/// Notes that this thread holds a right, as long as this is kept: beside the lock itself.
#[derive(Debug)]
pub(crate) struct Ranked {
    rank: Rank,
    /// It is this thread's.
    _thread: PhantomData<*const ()>,
}

impl Ranked {
    /// Before the lock is taken.
    pub fn begin(rank: Rank) -> Self {
        let held = HELD.get();
        debug_assert!(
            held >> rank as u8 == 0,
            "lock {rank:?} is taken while locks {held:#b} are held: see the order of locks"
        );
        HELD.set(held | 1 << rank as u8);
        Self {
            rank,
            _thread: PhantomData,
        }
    }
}

impl Drop for Ranked {
    fn drop(&mut self) {
        HELD.set(HELD.get() & !(1 << self.rank as u8));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_taken_in_their_order_and_let_go_of_in_any() {
        let save = Ranked::begin(Rank::Save);
        let merging = Ranked::begin(Rank::Merging);
        drop(save);
        let starts = Ranked::begin(Rank::Starts);
        drop(merging);
        drop(starts);
        drop(Ranked::begin(Rank::Save));
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "order of locks"))]
    fn a_right_that_stands_above_one_that_is_held_is_refused() {
        let _starts = Ranked::begin(Rank::Starts);
        let _merging = Ranked::begin(Rank::Merging);
    }
}

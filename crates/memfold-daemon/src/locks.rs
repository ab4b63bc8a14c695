//! The order in which locks are taken.
//!
//! A thread that holds a lock takes only locks that stand below it here:
//!
//! ```text
//!   shared computations           Reports (joint, figures), Views (maps, sharing, doctor, explaining, estimating)
//!   rights, held for long         SaveRight, SwapRight, Snapshots (twins), SwapVolumes (turns), KsmSteering (merging), VmRegistry (starts),
//!                                 Segments (removing): in the order of [`Rank`]
//!   states of services            DebtWatch, KsmSteering (steered), Lending (lender), SwapDisks (guards), SwapVolumes (keepers)
//!   the registry                  Arrivals, then VmRegistry (vms)
//!   states of single objects      Guard, Keeper, Machine's fields, SnapshotLocks, Leases (heard, distrust), Folding (last), Samples
//! ```
//! Debug builds check the order of the rights. A thread never holds two rights of one rank.

use std::cell::Cell;
use std::marker::PhantomData;

/// Rights that are held for long, in the order in which they are taken.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rank {
    /// The right to save a VM, or to change its memory mappings.
    Save,
    /// The right to change the block nodes of a VM's swap disk.
    Swap,
    /// The right to restore a VM whose guest cannot renew its identity.
    Twins,
    /// The right to change an LVM volume group.
    VolumeGroup,
    /// The right to begin, end or interrupt KSM's merging.
    Merging,
    /// The right to start VMs, or to keep them from being started.
    Starts,
    /// The right to look up segments, or to remove them.
    Segments,
}

thread_local! {
    /// Set of the ranks that this thread holds, one bit for each.
    static HELD: Cell<u8> = const { Cell::new(0) };
}

/// Records that this thread holds a right, until the record is dropped. The lock itself is kept
/// separately.
#[derive(Debug)]
pub(crate) struct Ranked {
    rank: Rank,
    /// Makes the type `!Send`: the rank is recorded for this thread.
    _thread: PhantomData<*const ()>,
}

impl Ranked {
    /// Records that this thread takes a right of this rank. Call this before the lock is taken.
    /// Debug builds panic if the order is violated.
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
    fn locks_taken_in_rank_order_may_be_released_in_any_order() {
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
    fn taking_a_lock_against_the_rank_order_panics() {
        let _starts = Ranked::begin(Rank::Starts);
        let _merging = Ranked::begin(Rank::Merging);
    }
}

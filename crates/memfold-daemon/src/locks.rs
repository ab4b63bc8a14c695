//! Defines the order in which the daemon's threads take locks. If all threads keep to one order,
//! they cannot deadlock.
//!
//! The drawing lists the locks from top to bottom. A thread that holds a lock takes only locks
//! further down:
//!
//! ```text
//!   shared computations           Reports (joint, figures), Views (maps, sharing, doctor, explaining, estimating)
//!   changes of settings           Rightsizing (changes)
//!   rights, held for long         SaveRight, SwapRight, Snapshots (twins), SwapVolumes (turns), KsmSteering (merging), VmRegistry (starts),
//!                                 Segments (removing): in the order of [`Rank`]
//!   states of services            DebtWatch, KsmSteering (steered), Lending (lender), SwapDisks (guards), SwapVolumes (keepers)
//!   the registry                  Arrivals, then VmRegistry (vms)
//!   states of single objects      Guard, Keeper, Machine's fields, SnapshotLocks, Leases (heard, distrust), Folding (last), Samples,
//!                                 DefinitionFiles (changes)
//! ```
//! A *right* is a lock that a thread may hold for minutes. Debug builds check that threads take
//! rights in this order. A thread never holds two rights of one rank.

use std::cell::Cell;
use std::marker::PhantomData;

use parking_lot::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

/// Rights that are held for long, in the order in which they are taken.
#[derive(Clone, Copy)]
enum Rank {
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

/// Records that this thread holds a right, until the record is dropped. The pointer makes the type
/// `!Send`.
#[derive(Debug)]
struct Ranked(u8, PhantomData<*const ()>);

impl Ranked {
    /// Records that this thread takes a right of this rank. Call this before the lock is taken.
    /// Debug builds panic if the order is violated.
    fn begin(rank: u8) -> Self {
        let held = HELD.get();
        debug_assert!(
            held >> rank == 0,
            "a lock of rank {rank} is taken while locks {held:#b} are held: see the order of locks"
        );
        HELD.set(held | 1 << rank);
        Self(rank, PhantomData)
    }
}

impl Drop for Ranked {
    fn drop(&mut self) {
        HELD.set(HELD.get() & !(1 << self.0));
    }
}

/// A right, held until it is dropped. Rights of different ranks are different types, so that a
/// function can demand one.
#[derive(Debug)]
pub(crate) struct Right<const RANK: u8, G> {
    _guard: G,
    _rank: Ranked,
}

/// The exclusive right to save a VM or to change its memory mappings.
pub(crate) type SaveRight<'a> = Right<{ Rank::Save as u8 }, MutexGuard<'a, ()>>;
/// The exclusive right to change the block nodes of a VM's swap disk.
pub(crate) type SwapRight<'a> = Right<{ Rank::Swap as u8 }, MutexGuard<'a, ()>>;
/// The exclusive right to change a volume group.
pub(crate) type GroupRight<'a> = Right<{ Rank::VolumeGroup as u8 }, MutexGuard<'a, ()>>;
/// The exclusive right to restore a VM whose guest cannot renew its identity.
pub(crate) type TwinRight<'a> = Right<{ Rank::Twins as u8 }, MutexGuard<'a, ()>>;
/// The exclusive right to begin, end or interrupt KSM's merging.
pub(crate) type MergingRight<'a> = Right<{ Rank::Merging as u8 }, MutexGuard<'a, ()>>;
/// The right to start a VM. KSM steering does not begin as long as this exists.
pub(crate) type StartRight<'a> = Right<{ Rank::Starts as u8 }, RwLockReadGuard<'a, ()>>;
/// Proof that no VM is being started, and that none is started until this is dropped.
pub(crate) type NoStarts<'a> = Right<{ Rank::Starts as u8 }, RwLockWriteGuard<'a, ()>>;
/// The right to look up segments (shared), or to remove them (exclusive).
pub(crate) type SegmentsRight<G> = Right<{ Rank::Segments as u8 }, G>;

impl<const RANK: u8, G> Right<RANK, G> {
    /// Takes the right. `lock` locks the mutex of the right, and returns the mutex's guard.
    pub fn take(lock: impl FnOnce() -> G) -> Self {
        Self {
            _rank: Ranked::begin(RANK),
            _guard: lock(),
        }
    }

    /// Takes the right if it is free. `lock` tries to lock the mutex of the right, and returns
    /// `None` if the mutex is locked.
    pub fn try_take(lock: impl FnOnce() -> Option<G>) -> Option<Self> {
        Some(Self {
            _rank: Ranked::begin(RANK),
            _guard: lock()?,
        })
    }

    /// Takes the right as soon as it is free, but gives up when `give_up` says so. `lock` tries for
    /// a short time to lock the mutex of the right.
    pub fn take_unless(lock: impl Fn() -> Option<G>, give_up: impl Fn() -> bool) -> Option<Self> {
        loop {
            let right = Self::try_take(&lock);
            if right.is_some() || give_up() {
                return right;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn a_right_that_is_held_is_waited_for_until_the_waiter_gives_up() {
        let mutex = Mutex::new(());
        let is_saved = AtomicBool::new(false);
        let ask = || {
            SaveRight::take_unless(
                || mutex.try_lock_for(Duration::from_millis(1)),
                || is_saved.load(Ordering::Relaxed),
            )
        };
        std::thread::scope(|scope| {
            let held = mutex.lock();
            let waiter = scope.spawn(|| ask().is_some());
            std::thread::sleep(Duration::from_millis(50));
            assert!(!waiter.is_finished());
            drop(held);
            assert!(waiter.join().unwrap());
        });
        let _held = mutex.lock();
        is_saved.store(true, Ordering::Relaxed);
        assert!(ask().is_none());
    }

    #[test]
    fn locks_taken_in_rank_order_may_be_released_in_any_order() {
        let save = Ranked::begin(Rank::Save as u8);
        let merging = Ranked::begin(Rank::Merging as u8);
        drop(save);
        let starts = Ranked::begin(Rank::Starts as u8);
        drop(merging);
        drop(starts);
        drop(Ranked::begin(Rank::Save as u8));
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "order of locks"))]
    fn taking_a_lock_against_the_rank_order_panics() {
        let _starts = Ranked::begin(Rank::Starts as u8);
        let _merging = Ranked::begin(Rank::Merging as u8);
    }
}

//! Segments: built, attached to VMs and laid over their files, removed.
//!
//! Attaching is three steps, each of which can be repeated: QEMU maps the image (a device of the VM
//! from then on), the note of the VM's segments, and the agent lays it over the guest's files. What
//! the guest refuses leaves the device, which the next try uses.

use std::sync::Arc;

use memfold_segment::Shelf;
use memfold_units::ByteSize;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::folding::Folding;
use crate::locks::{Rank, Ranked};
use crate::on_shelf::OnShelf;
use crate::snapshot_directory::SnapshotDirectory;
use crate::snapshot_locks::SnapshotLocks;
use crate::vm_registry::VmRegistry;

mod attach;
mod build;
mod copy_out;
mod find;
mod in_guest;
pub(crate) mod laying;
mod list;
mod slots;
mod users;

/// The segments of this host.
#[derive(Debug)]
pub struct Segments {
    registry: Arc<VmRegistry>,
    folding: Arc<Folding>,
    shelf: Shelf,
    /// Which of them snapshots need.
    snapshots: Arc<SnapshotDirectory>,
    locks: Arc<SnapshotLocks>,
    /// Write-locked while segments are removed; read-locked from the moment one is looked up until
    /// it is mapped.
    removing: RwLock<()>,
}

impl Segments {
    pub(crate) fn new(
        registry: Arc<VmRegistry>,
        folding: Arc<Folding>,
        (shelf, snapshots): (Shelf, Arc<SnapshotDirectory>),
        locks: Arc<SnapshotLocks>,
    ) -> Self {
        Self {
            registry,
            folding,
            shelf,
            snapshots,
            locks,
            removing: RwLock::default(),
        }
    }

    /// Nothing is removed as long as this is kept.
    fn shared(&self) -> (RwLockReadGuard<'_, ()>, Ranked) {
        let rank = Ranked::begin(Rank::Segments);
        (self.removing.read(), rank)
    }

    /// Nothing is looked up as long as this is kept.
    fn exclusive(&self) -> (RwLockWriteGuard<'_, ()>, Ranked) {
        let rank = Ranked::begin(Rank::Segments);
        (self.removing.write(), rank)
    }

    /// How many there are, and what they take of the host's memory; `None`: their directory can't
    /// be read.
    pub(crate) fn in_short(&self) -> Option<OnShelf> {
        let mut all = OnShelf::default();
        for segment in self.shelf.all().ok()? {
            all.count += 1;
            all.broken += u64::from(self.shelf.problem(&segment).is_some());
            all.bytes += ByteSize(self.shelf.resident_bytes(&segment));
        }
        Some(all)
    }

    /// Lets the images of segments be removed like other files: for a laboratory's end.
    pub fn unprotect(&self) {
        self.shelf.unprotect();
    }

    /// How far a build has come; `None`: none is under way.
    #[must_use]
    pub fn progress(&self, name: &str) -> Option<memfold_host::progress::Step> {
        self.locks.now(&format!("segment {name}"))
    }
}

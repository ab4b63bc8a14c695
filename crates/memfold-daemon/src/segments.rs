//! Segments: read-only file system images that VMs map and execute in place. This module builds,
//! attaches, overlays and removes them.
//!
//! Attaching has three steps, each of which can be repeated: the VM's segments are recorded, QEMU
//! maps the image (as a device of the VM), and the agent overlays the guest's files with it. If the
//! guest refuses, the device stays and the next attempt uses it.

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

/// The segments of this host, and the operations on them.
#[derive(Debug)]
pub struct Segments {
    registry: Arc<VmRegistry>,
    folding: Arc<Folding>,
    shelf: Shelf,
    /// The snapshots, which may need segments.
    snapshots: Arc<SnapshotDirectory>,
    locks: Arc<SnapshotLocks>,
    /// Write-locked while segments are removed. Read-locked from the lookup of a segment until it
    /// is mapped.
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

    /// Keeps segments from being removed until the result is dropped.
    fn shared(&self) -> (RwLockReadGuard<'_, ()>, Ranked) {
        let rank = Ranked::begin(Rank::Segments);
        (self.removing.read(), rank)
    }

    /// Keeps segments from being looked up until the result is dropped.
    fn exclusive(&self) -> (RwLockWriteGuard<'_, ()>, Ranked) {
        let rank = Ranked::begin(Rank::Segments);
        (self.removing.write(), rank)
    }

    /// Number of segments and their resident bytes; `None`: their directory cannot be read.
    pub(crate) fn in_short(&self) -> Option<OnShelf> {
        let mut all = OnShelf::default();
        for segment in self.shelf.all().ok()? {
            all.count += 1;
            all.broken += u64::from(self.shelf.problem(&segment).is_some());
            all.bytes += ByteSize(self.shelf.resident_bytes(&segment));
        }
        Some(all)
    }

    /// Lets segment images be removed like other files. Used at the end of a laboratory run.
    pub fn unprotect(&self) {
        self.shelf.unprotect();
    }

    /// Progress of a segment's build; `None`: no build of this name is in progress.
    #[must_use]
    pub fn progress(&self, name: &str) -> Option<memfold_host::progress::Step> {
        self.locks.now(&format!("segment {name}"))
    }
}

//! Segments: read-only file system images that VMs map and execute in place. This module builds,
//! attaches, overlays and removes them.
//!
//! Attaching a segment has three steps, each of which can be repeated: the daemon records the
//! segment, QEMU maps the image as a device of the VM, and the guest's agent mounts the image over
//! the guest's files. If the guest refuses to mount it, the device stays, and the next attempt uses
//! the device.

use std::sync::Arc;

use memfold_segment::Shelf;
use memfold_snapshot::Shelf as SnapshotShelf;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::folding::Folding;
use crate::locks::SegmentsRight;
use crate::snapshot_locks::SnapshotLocks;
use crate::vm_registry::VmRegistry;

mod attach;
mod build;
mod copy_out;
pub(crate) mod in_guest;
mod list;
mod slots;
mod users;

/// The segments of this host, and the operations on them.
#[derive(Debug)]
pub struct Segments {
    pub(crate) registry: Arc<VmRegistry>,
    pub(crate) folding: Arc<Folding>,
    pub(crate) shelf: Shelf,
    /// The snapshots of this host; a snapshot may need segments.
    pub(crate) snapshots: Arc<SnapshotShelf>,
    pub(crate) locks: Arc<SnapshotLocks>,
    /// Write-locked while segments are removed. Read-locked from the lookup of a segment until QEMU
    /// maps it.
    pub(crate) removing: RwLock<()>,
}

impl Segments {
    /// Prevents the removal of segments until the result is dropped.
    fn shared(&self) -> SegmentsRight<RwLockReadGuard<'_, ()>> {
        SegmentsRight::take(|| self.removing.read())
    }

    /// Prevents the lookup of segments until the result is dropped.
    fn exclusive(&self) -> SegmentsRight<RwLockWriteGuard<'_, ()>> {
        SegmentsRight::take(|| self.removing.write())
    }

    /// Removes the write protection of segment images, so that they can be deleted like other
    /// files. Used at the end of a laboratory run.
    pub fn unprotect(&self) {
        self.shelf.unprotect();
    }

    /// Returns the progress of a segment's build; `None` if no build of this name is in progress.
    #[must_use]
    pub fn progress(&self, name: &str) -> Option<memfold_host::progress::Step> {
        self.locks.now(&format!("segment {name}"))
    }
}

//! Segments: read-only file system images that VMs map and execute in place. This module builds,
//! attaches, overlays and removes them.
//!
//! Attaching a segment has three steps, each of which can be repeated: the daemon records the
//! segment, QEMU maps the image as a device of the VM, and the guest's agent mounts the image over
//! the guest's files. If the guest refuses to mount it, the device stays, and the next attempt uses
//! the device. A VM's segments are recorded in the order of their device slots in QEMU.

use std::sync::Arc;

use memfold_segment::Shelf;
use memfold_snapshot::Shelf as SnapshotShelf;
use memfold_vm::segments::unplug_backend;
use memfold_vm::{SegmentSpec, VmDirectory};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::definition_files::DefinitionFiles;
use crate::error::{DaemonError, impossible, segment_files};
use crate::folding::Folding;
use crate::locks::SegmentsRight;
use crate::machine::Machine;
use crate::snapshot_locks::SnapshotLocks;
use crate::vm_registry::VmRegistry;

mod attach;
mod build;
mod copy_out;
pub(crate) mod in_guest;
mod list;
mod users;

/// Service that builds, attaches, lists and removes the segments of this host.
#[derive(Debug)]
pub struct Segments {
    pub(crate) registry: Arc<VmRegistry>,
    pub(crate) folding: Arc<Folding>,
    pub(crate) shelf: Shelf,
    /// The snapshots of this host; a snapshot may need segments.
    pub(crate) snapshots: Arc<SnapshotShelf>,
    /// The definitions of VMs; a defined VM may need segments at its next start.
    pub(crate) definitions: Arc<DefinitionFiles>,
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
    /// files. A test lab calls this function when it ends.
    pub fn unprotect(&self) {
        self.shelf.unprotect();
    }

    /// Returns the progress of a segment's build; `None` if no segment of this name is being built.
    #[must_use]
    pub fn progress(&self, name: &str) -> Option<memfold_host::progress::Step> {
        self.locks.now(&format!("segment {name}"))
    }
}

/// Returns the recorded segments that QEMU has as devices. A segment that an earlier daemon
/// recorded and did not plug in is removed from the record.
fn noted(machine: &Machine, directory: &VmDirectory) -> Result<Vec<SegmentSpec>, DaemonError> {
    let mut now = machine.vm().segments();
    let mut qmp = machine.monitor();
    let before = now.len();
    while let Some(slot) = now.len().checked_sub(1) {
        if memfold_vm::segments::address(&mut qmp, slot)?.is_some() {
            break;
        }
        unplug_backend(&mut qmp, slot);
        now.pop();
    }
    drop(qmp);
    if now.len() != before {
        note(directory, &now)?;
    }
    Ok(now)
}

fn note(directory: &VmDirectory, now: &[SegmentSpec]) -> Result<(), DaemonError> {
    let path = directory.segments();
    let written = directory.write_json(&path, &now);
    Ok(written.map_err(segment_files(&path))?)
}

fn directory(machine: &Machine) -> Result<&VmDirectory, DaemonError> {
    machine.vm().directory().ok_or_else(|| {
        impossible(format!(
            "VM '{}' was not started by memfold, so it has no slots for segments; start it with 'memfold vm run'",
            machine.name()
        ))
    })
}

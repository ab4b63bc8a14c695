//! The record of a VM's segments, in the order of their device slots in QEMU.

use memfold_vm::segments::unplug_backend;
use memfold_vm::{SegmentSpec, VmDirectory};

use crate::error::{DaemonError, impossible, segment_files};
use crate::machine::Machine;

/// Returns the recorded segments that QEMU has as devices. A segment that an earlier daemon
/// recorded and did not plug in is removed from the record.
pub(super) fn noted(
    machine: &Machine,
    directory: &VmDirectory,
) -> Result<Vec<SegmentSpec>, DaemonError> {
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

pub(super) fn note(directory: &VmDirectory, now: &[SegmentSpec]) -> Result<(), DaemonError> {
    let path = directory.segments();
    let written = directory.write_json(&path, &now);
    Ok(written.map_err(segment_files(&path))?)
}

pub(super) fn directory(machine: &Machine) -> Result<&VmDirectory, DaemonError> {
    machine.vm().directory().ok_or_else(|| {
        impossible(format!(
            "VM '{}' was not started by memfold, so it has no slots for segments; start it with 'memfold vm run'",
            machine.name()
        ))
    })
}

//! Reads and writes the files that tell the next daemon what a VM's swap disk has borrowed. The
//! note (`borrowed.json`) names the leases, and is written before the first lease is used. A second
//! file contains the operator's request to borrow.

use std::path::Path;

use memfold_api::BorrowRequest;
use memfold_lend::graph::{Borrowing, GraphError};
use memfold_vm::VmDirectory;
use tracing::warn;

use crate::error::DaemonError;
use crate::machine::Machine;

pub(crate) fn write_note(directory: &VmDirectory, borrowing: &Borrowing) -> std::io::Result<()> {
    directory.write_json(&directory.borrowed(), borrowing)
}

/// Writes the note of a loan whose place QEMU's device shows as well, so a failure is only logged.
pub(crate) fn note(machine: &Machine, borrowing: &Borrowing) {
    let directory = machine.vm().directory();
    if let Some(Err(error)) = directory.map(|directory| write_note(directory, borrowing)) {
        warn!(vm = machine.name(), %error, "cannot record that the VM borrows memory; free space in the state directory before the daemon restarts");
    }
}

pub(crate) fn remove_note(machine: &Machine) {
    // This fails if there is no note. If the note stays, the next daemon recognizes it as outdated.
    let note = machine.vm().directory().map(VmDirectory::borrowed);
    drop(note.map(std::fs::remove_file));
}

/// Returns whether `path` is the name of a swap file made by [`memfold_vm::swap::place`].
pub(crate) fn is_swap_file(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let is_ours = |name: &str| name.starts_with("memfold-") && name.contains("-swap-");
    name.is_some_and(is_ours) && path.extension().is_some_and(|end| end == "raw")
}

/// Returns the directory of a VM whose swap disk can be moved.
///
/// # Errors
///
/// [`GraphError::NoSwapDisk`] if the VM has no swap disk or no directory.
pub(crate) fn swap_directory(machine: &Machine) -> Result<&VmDirectory, DaemonError> {
    let spec = machine.vm().spec().filter(|spec| spec.swap.is_some());
    let directory = machine.vm().directory().filter(|_| spec.is_some());
    directory.ok_or_else(|| GraphError::NoSwapDisk(machine.name().to_owned()).into())
}

/// Returns the operator's request to borrow for a VM; `None` if there is none.
pub(crate) fn saved_request(machine: &Machine) -> Option<BorrowRequest> {
    let directory = machine.vm().directory()?;
    VmDirectory::read_json(&directory.wish()).ok()
}

/// Saves the operator's request. If that fails, the request is not repeated after the loss of a
/// lender.
pub(crate) fn save_request(directory: &VmDirectory, vm: &str, request: &BorrowRequest) {
    if let Err(error) = directory.write_json(&directory.wish(), request) {
        warn!(vm, %error, "cannot record the operator's borrow request; free space in the state directory and repeat 'memfold borrow'");
    }
}

/// Deletes the operator's saved request.
pub(crate) fn forget_request(directory: &VmDirectory) {
    // This fails if there is no request.
    let _ = std::fs::remove_file(directory.wish());
}

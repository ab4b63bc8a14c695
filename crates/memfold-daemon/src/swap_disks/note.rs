//! The note of a loan in the VM's directory, the file `borrowed.json`. It names the leases, and is
//! written before the first lease is used.

use std::path::Path;

use memfold_lend::graph::{Borrowing, GraphError};
use memfold_vm::VmDirectory;

use crate::error::{DaemonError, lending};
use crate::machine::Machine;

pub(crate) fn write_note(directory: &VmDirectory, borrowing: &Borrowing) -> std::io::Result<()> {
    directory.write_json(&directory.borrowed(), borrowing)
}

pub(crate) fn remove_note(directory: &VmDirectory) {
    // This fails if there is no note. If the note stays, the next daemon recognizes it as outdated.
    let _ = std::fs::remove_file(directory.borrowed());
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
/// [`GraphError::NoSwapDisk`] if the VM has no swap disk or no directory, [`DaemonError::Lending`]
/// if QEMU runs as another user.
pub(crate) fn swap_directory(machine: &Machine) -> Result<&VmDirectory, DaemonError> {
    let (Some(directory), Some(spec)) = (machine.vm().directory(), machine.vm().spec()) else {
        return Err(GraphError::NoSwapDisk(machine.name().to_owned()).into());
    };
    if spec.swap.is_none() {
        return Err(GraphError::NoSwapDisk(machine.name().to_owned()).into());
    }
    if spec.user.is_some() {
        return Err(lending(
            format!(
                "QEMU of VM '{}' has dropped its rights (user = ...) and cannot open a lender's socket or a new file",
                machine.name()
            ),
            "start the VM without --user",
        ));
    }
    Ok(directory)
}

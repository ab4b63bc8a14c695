//! The operator's request to borrow for a VM, kept in a file in the VM's directory for the next
//! daemon.

use memfold_api::BorrowRequest;
use memfold_vm::VmDirectory;
use tracing::warn;

use crate::machine::Machine;

/// Returns the operator's request to borrow for a VM; `None` if there is none.
pub(super) fn saved_request(machine: &Machine) -> Option<BorrowRequest> {
    let directory = machine.vm().directory()?;
    VmDirectory::read_json(&directory.wish()).ok()
}

/// Saves the operator's request. If that fails, the request is not repeated after the loss of a
/// lender.
pub(super) fn save_request(directory: &VmDirectory, vm: &str, request: &BorrowRequest) {
    if let Err(error) = directory.write_json(&directory.wish(), request) {
        warn!(vm, %error, "cannot record the operator's borrow request; free space in the state directory and repeat 'memfold borrow'");
    }
}

/// Deletes the operator's saved request.
pub(super) fn forget_request(directory: &VmDirectory) {
    // This fails if there is no request.
    let _ = std::fs::remove_file(directory.wish());
}

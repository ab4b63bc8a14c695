//! The operator's borrow request of a VM: a file in the VM's directory, which the next daemon also
//! reads.

use memfold_api::BorrowRequest;
use memfold_vm::VmDirectory;
use tracing::warn;

use crate::machine::Machine;

/// The operator's borrow request for a VM; `None` if there is none.
pub(super) fn saved_request(machine: &Machine) -> Option<BorrowRequest> {
    let directory = machine.vm().directory()?;
    VmDirectory::read_json(&directory.wish()).ok()
}

/// Saves the request. If it cannot be saved, it is not repeated after a loss.
pub(super) fn save_request(directory: &VmDirectory, vm: &str, request: &BorrowRequest) {
    if let Err(error) = directory.write_json(&directory.wish(), request) {
        warn!(vm, %error, "cannot record the borrow request; free space and repeat 'memfold borrow'");
    }
}

/// Deletes the request.
pub(super) fn forget_request(directory: &VmDirectory) {
    // There may be no request.
    let _ = std::fs::remove_file(directory.wish());
}

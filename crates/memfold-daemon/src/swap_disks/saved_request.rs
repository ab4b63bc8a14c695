//! What an operator has asked for, for a VM: a file of the VM's, which the next daemon knows, too.

use memfold_api::BorrowRequest;
use memfold_vm::VmDirectory;
use tracing::warn;

use crate::machine::Machine;

/// What an operator has asked for, for a VM.
pub(super) fn saved_request(machine: &Machine) -> Option<BorrowRequest> {
    let directory = machine.vm().directory()?;
    VmDirectory::read_json(&directory.wish()).ok()
}

/// Notes it. A wish that can't be noted is one that ends with the loan.
pub(super) fn save_request(directory: &VmDirectory, vm: &str, request: &BorrowRequest) {
    if let Err(error) = directory.write_json(&directory.wish(), request) {
        warn!(vm, %error, "cannot record the borrow request; free space and repeat 'memfold borrow'");
    }
}

/// Forgets it.
pub(super) fn forget_request(directory: &VmDirectory) {
    // There may be none.
    let _ = std::fs::remove_file(directory.wish());
}

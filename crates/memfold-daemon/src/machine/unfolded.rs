//! Replacement for the connection to the fold library, for a VM whose QEMU runs without the
//! library.

use std::io;
use std::os::fd::BorrowedFd;

use memfold_fold::{Guest, GuestError, Refold};
use memfold_wire::library::{Order, Reply};
use rustix::process::Pid;

pub(super) const NO_LIBRARY: &str = "QEMU runs without memfold's library; start the VM with 'memfold vm run', or with LD_PRELOAD=libmemfold_qemu.so and MEMFOLD_QEMU_SOCKET=PATH in its environment";

/// A VM without the fold library. The fold engine lists such a VM and gives it no orders.
pub(super) struct Unfolded(pub Pid);

impl Guest for Unfolded {
    fn pid(&self) -> Pid {
        self.0
    }

    fn order(&mut self, _: &Order, _: Option<BorrowedFd<'_>>) -> Result<Reply, GuestError> {
        Err(GuestError::Library(io::Error::other(NO_LIBRARY)))
    }

    fn refold(&mut self) -> Refold {
        Refold::Stopped
    }

    fn can_stop(&self) -> bool {
        false
    }
}

//! Interface of the engine to a VM.

use std::io;
use std::os::fd::BorrowedFd;

use memfold_wire::library::{Order, Reply};
use rustix::process::Pid;

/// Number of a VM in the daemon; never reused while the daemon lives.
pub type VmId = u32;

/// Reason why a VM did not carry out an order. The engine stops folding a VM whose library is gone.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The library's socket failed or timed out, or its reply was malformed.
    #[error("memfold's library in this VM's QEMU does not answer")]
    Library(#[source] io::Error),
}

/// Way in which folded ranges of a VM may be folded again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refold {
    /// While the VM runs, frozen by write protection: no block node uses direct I/O.
    Live,
    /// While the VM is stopped for a moment, because it uses direct I/O.
    Stopped,
    /// Unknown at the moment: QEMU's monitor is busy.
    Unknown,
}

/// A VM. Real VMs are QEMU processes; tests use memory of their own process.
pub trait Guest: Send {
    /// Returns the process whose memory holds guest RAM.
    fn pid(&self) -> Pid;

    /// Sends an order to the library and waits for its reply.
    fn order(
        &mut self,
        order: &Order,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Reply, GuestError>;

    /// Returns how folded ranges may be folded again. Called once a batch.
    fn refold(&mut self) -> Refold;

    /// Returns whether orders may stop the VM for a moment
    /// ([`memfold_wire::library::Freeze::Stopped`]).
    fn can_stop(&self) -> bool;
}

//! Interface through which the engine controls a VM.

use std::io;
use std::os::fd::BorrowedFd;

use memfold_wire::library::{Order, Reply};
use rustix::process::Pid;

/// Number of a VM in the daemon; never reused while the daemon lives.
pub type VmId = u32;

/// Reason why a VM's library did not execute an order. The engine then stops folding the VM.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The connection to the library failed or timed out, or the library's reply was malformed.
    #[error("memfold's library in this VM's QEMU does not answer")]
    Library(#[source] io::Error),
}

/// Way in which already folded ranges of a VM may be folded again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refold {
    /// The VM runs, and the ranges are frozen by write protection: no block node uses direct I/O.
    Live,
    /// The VM is stopped for a moment, because a block node uses direct I/O.
    Stopped,
    /// The way is unknown at the moment, because QEMU's monitor is busy.
    Unknown,
}

/// A VM to fold. Real VMs are QEMU processes; the VMs of tests are memory of the test's process.
pub trait Guest: Send {
    /// Returns the process whose memory contains the guest's RAM.
    fn pid(&self) -> Pid;

    /// Sends an order to the VM's library and waits for the reply.
    fn order(
        &mut self,
        order: &Order,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Reply, GuestError>;

    /// Returns how folded ranges may be folded again. The engine calls this function once for each
    /// batch.
    fn refold(&mut self) -> Refold;

    /// Returns whether orders may stop the VM for a moment
    /// ([`memfold_wire::library::Freeze::Stopped`]).
    fn can_stop(&self) -> bool;
}

//! The interface through which the fold engine sends orders, such as to fold pages, to a VM. Tests
//! replace QEMU by another implementation.

use std::io;
use std::os::fd::BorrowedFd;

use memfold_wire::library::{Order, Reply};
use rustix::process::Pid;

/// Number by which the daemon's parts name a VM; never reused while the daemon lives.
pub type VmId = u32;

/// Reason why memfold's library in a VM's QEMU did not execute an order. After such an error, the
/// engine stops folding the VM.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The connection to memfold's library in QEMU failed or timed out, or the library's reply was
    /// malformed.
    #[error("memfold's library in this VM's QEMU does not answer")]
    Library(#[source] io::Error),
}

/// Way in which pages that are folded already may be frozen, so that they can be folded again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refold {
    /// Write protection while the VM runs. This is safe, because no block node uses direct I/O.
    Live,
    /// A stop of the VM for a moment, because a block node uses direct I/O or the host cannot
    /// write-protect the pages.
    Stopped,
    /// Unknown at the moment, because QEMU's monitor is busy. Nothing is folded again.
    Unknown,
}

/// A VM that the engine folds. Real VMs are QEMU processes; the VMs of tests are memory of the
/// test's process.
pub trait Guest: Send {
    /// Returns the process whose memory contains the guest's RAM.
    fn pid(&self) -> Pid;

    /// Returns whether memfold's library in the VM's QEMU has answered this daemon. Otherwise, QEMU
    /// has no library, or the library may still execute an order of an earlier daemon.
    fn has_library(&self) -> bool {
        true
    }

    /// Sends an order to memfold's library in the VM's QEMU and waits for the reply. The file
    /// `descriptor` is sent with the order.
    fn order(
        &mut self,
        order: &Order,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Reply, GuestError>;

    /// Returns how pages that are folded already may be frozen now, so that they can be folded
    /// again. The engine calls this function once for each batch.
    fn refold(&mut self) -> Refold;

    /// Returns whether the library can stop the VM for a moment during an order
    /// ([`memfold_wire::library::Freeze::Stopped`]).
    fn can_stop(&self) -> bool;
}

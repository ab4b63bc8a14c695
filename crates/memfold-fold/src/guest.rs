//! What the engine needs of a VM.

use std::io;
use std::os::fd::BorrowedFd;

use memfold_wire::library::{Order, Reply};
use rustix::process::Pid;

/// The daemon's number for a VM; never used twice while a daemon lives.
pub type VmId = u32;

/// Why a VM did not do what was asked. The engine drops the VM from folding when its library is
/// gone.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The library's socket failed or timed out, or its answer made no sense.
    #[error("memfold's library in this VM's QEMU does not answer")]
    Library(#[source] io::Error),
}

/// How a VM's folded ranges may be folded again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refold {
    /// While the VM runs, frozen by write protection: no block node uses direct I/O.
    Live,
    /// While the VM is stopped for a moment.
    Stopped,
    /// Not now: QEMU's monitor is busy and can't be asked.
    Unknown,
}

/// A VM as the engine sees it. Real ones are QEMU processes; in tests the engine folds its own
/// process's memory.
pub trait Guest: Send {
    /// The process whose memory holds guest RAM.
    fn pid(&self) -> Pid;

    /// Sends an order to the library and waits for its reply.
    fn order(
        &mut self,
        order: &Order,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Reply, GuestError>;

    /// How folded ranges may be folded again. Asked once a batch.
    fn refold(&mut self) -> Refold;

    /// Whether orders may stop the VM for a moment ([`memfold_wire::library::Freeze::Stopped`]).
    fn can_stop(&self) -> bool;
}

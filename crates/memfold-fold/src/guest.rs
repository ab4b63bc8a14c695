//! What the engine needs of a VM.

use std::io;
use std::os::fd::BorrowedFd;

use memfold_wire::library::{Order, Reply};
use rustix::process::Pid;

/// The daemon's number for a VM; never used twice while a daemon lives.
pub type VmId = u32;

/// Why a VM did not do what was asked. The engine drops the VM from folding when its library is gone.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The library's socket failed or timed out, or its answer made no sense.
    #[error("memfold's library in this VM's QEMU does not answer")]
    Library(#[source] io::Error),
}

/// A VM as the engine sees it. Real ones are QEMU processes; in tests the engine folds its own process's memory.
pub trait Guest: Send {
    /// The process whose memory holds guest RAM.
    fn pid(&self) -> Pid;

    /// Sends an order to the library and waits for its reply.
    fn order(
        &mut self,
        order: &Order,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Reply, GuestError>;

    /// Whether folded ranges may be frozen by write protection while the VM runs: no block node uses direct I/O. Asked once a batch.
    fn refold_live(&mut self) -> bool;

    /// Whether orders may stop the VM for a moment ([`memfold_wire::library::Freeze::Stopped`]).
    fn can_stop(&self) -> bool;
}

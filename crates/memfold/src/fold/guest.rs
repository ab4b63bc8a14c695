//! What the engine needs of a VM.

use std::io;
use std::os::fd::BorrowedFd;

use memfold_wire::library::{Order, Reply};
use rustix::process::Pid;

/// Why a VM did not do what was asked. The engine drops the VM from folding when its library is gone.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The library's socket failed or timed out, or its answer made no sense.
    #[error("memfold's library in this VM's QEMU does not answer")]
    Library(#[source] io::Error),
    /// QEMU did not stop or go on.
    #[error("QEMU did not {action} the VM")]
    Pause {
        /// `stop` or `cont`.
        action: &'static str,
        /// What it said.
        #[source]
        source: io::Error,
    },
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

    /// Stops vCPUs and drains I/O. `Ok(false)` if the VM was not running (then [`Guest::resume`] is not to be called).
    fn pause(&mut self) -> Result<bool, GuestError>;

    /// Lets the VM go on.
    fn resume(&mut self) -> Result<(), GuestError>;
}

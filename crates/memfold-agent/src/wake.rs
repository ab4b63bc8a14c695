//! Wakes the agent's main loop from another thread of the agent, with an eventfd.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

/// An eventfd that one thread makes readable to wake another: it is readable from [`Wake::up`]
/// until [`Wake::rest`].
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    /// Creates an eventfd that is not readable.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(
            0,
            EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC,
        )?))
    }

    /// Makes the eventfd readable.
    pub fn up(&self) {
        // This fails only if the counter would exceed 2^64, and then the descriptor is readable
        // already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes the eventfd unreadable until the next [`Wake::up`].
    pub fn rest(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

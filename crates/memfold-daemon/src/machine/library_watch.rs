//! The engine's connection to the fold library in a VM's QEMU: times for its supervision.

use std::time::{Duration, Instant};

/// Time between two reads of a VM's conditions and memory layout.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);

/// The age of the connection, and the pause before the next attempt.
#[derive(Debug)]
pub(crate) struct LibraryWatch {
    pub connected: Instant,
    /// Time after `connected` during which no new connection is attempted.
    pub pause: Duration,
}

impl LibraryWatch {
    /// A connection that has just begun.
    pub fn new() -> Self {
        Self {
            connected: Instant::now(),
            pause: INTERVAL,
        }
    }
}

//! Times for supervising the engine's connection to the fold library in a VM's QEMU.

use std::time::{Duration, Instant};

/// Time between two reads of a VM's conditions for folding and its memory layout.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);

/// Age of the connection to the fold library, and the pause before the next attempt to connect.
#[derive(Debug)]
pub(crate) struct LibraryWatch {
    pub connected: Instant,
    /// Time after `connected` during which no new connection is attempted.
    pub pause: Duration,
}

impl LibraryWatch {
    /// Begins to count the age of a connection that was just made.
    pub fn new() -> Self {
        Self {
            connected: Instant::now(),
            pause: INTERVAL,
        }
    }
}

//! The engine's connection to the library in a VM's QEMU, watched.

use std::time::{Duration, Instant};

/// Time between two looks at a VM's conditions and layout.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);

/// The engine's connection to the library.
#[derive(Debug)]
pub(crate) struct LibraryWatch {
    pub connected: Instant,
    /// How long it has to be left alone from then on.
    pub pause: Duration,
}

impl LibraryWatch {
    /// Of a connection that has just begun.
    pub fn new() -> Self {
        Self {
            connected: Instant::now(),
            pause: INTERVAL,
        }
    }
}

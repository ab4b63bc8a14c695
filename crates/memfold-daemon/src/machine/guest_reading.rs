//! The newest memory figures that a guest has reported.

use std::time::Instant;

use memfold_ledger::GuestMemory;

/// The newest memory figures of a guest.
#[derive(Debug, Default)]
pub(super) struct GuestReading {
    pub(super) newest: Option<(Instant, GuestMemory)>,
    /// Number of readings in succession that were refused because they are impossible.
    pub(super) refused: u32,
    /// Whether the log says that readings were refused.
    pub(super) is_logged: bool,
}

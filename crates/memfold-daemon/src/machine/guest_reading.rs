//! The newest memory figures that a guest has reported.

use std::time::Instant;

use memfold_ledger::GuestMemory;

/// The newest memory figures of a guest.
#[derive(Debug, Default)]
pub(crate) struct GuestReading {
    pub(super) newest: Option<(Instant, GuestMemory)>,
    /// Number of readings in succession that were refused because they are impossible.
    pub(super) refused: u32,
    /// Whether the log says that readings were refused.
    pub(super) is_logged: bool,
}

impl GuestReading {
    /// Keeps figures that arrived at this moment and are possible.
    pub(crate) fn note(&mut self, at: Instant, memory: GuestMemory) {
        self.newest = Some((at, memory));
        self.refused = 0;
    }

    /// Returns the newest figures with their present age, and when they arrived.
    pub(crate) fn newest(&self) -> Option<(Instant, GuestMemory)> {
        let (at, memory) = self.newest.as_ref()?;
        let age_ms = u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX);
        let memory = GuestMemory {
            age_ms,
            ..memory.clone()
        };
        Some((*at, memory))
    }
}

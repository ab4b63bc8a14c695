//! Limits how many bytes and how many pages a second a guest's agent may report to the daemon. An
//! agent that exceeds a limit waits. The daemon and other guests are not slowed down.

use std::time::{Duration, Instant};

use memfold_wire::agent::FromAgent;

/// Returns the cost of processing a message, in pages. A message of a few bytes can name many pages
/// or make the daemon rebuild whole tables, so the length of a message does not tell its cost.
pub(super) fn weight(message: &FromAgent) -> usize {
    /// Highest cost of one message, in pages. A higher cost would only delay the messages of the
    /// guest's next boot.
    const MOST: u64 = 1 << 22;
    const WHOLE_TABLE: u64 = 1 << 16;
    let sum = |pages: &mut dyn Iterator<Item = u32>| pages.map(u64::from).sum::<u64>();
    let pages = match message {
        FromAgent::Hello { .. } | FromAgent::InventoryBegin | FromAgent::InventoryEnd { .. } => {
            WHOLE_TABLE
        }
        FromAgent::Files(files) => 4 * files.len() as u64,
        FromAgent::Hints(runs) => sum(&mut runs.iter().map(|r| r.pages)),
        FromAgent::Gone(runs) => sum(&mut runs.iter().map(|r| r.pages)),
        FromAgent::Dirty(ranges) | FromAgent::Clean(ranges) => {
            sum(&mut ranges.iter().map(|r| r.pages))
        }
        FromAgent::Counters(_)
        | FromAgent::Output { .. }
        | FromAgent::Exited { .. }
        | FromAgent::InputRoom { .. }
        | FromAgent::Memory(_)
        | FromAgent::Trimmed(_)
        | FromAgent::Allowed { .. }
        | FromAgent::NotAllowed { .. } => 16,
    };
    usize::try_from(pages.clamp(16, MOST)).unwrap_or(usize::MAX)
}

/// A token bucket of bytes or pages: it fills with time, and holds at most one second's worth.
pub(super) struct Budget {
    per_s: f64,
    left: f64,
    at: Instant,
}

impl Budget {
    pub(super) fn new(per_s: u32) -> Self {
        let per_s = f64::from(per_s.max(1));
        Self {
            per_s,
            left: per_s,
            at: Instant::now(),
        }
    }

    /// Takes `bytes` out of the bucket. If the bucket held fewer, returns how long to wait.
    pub(super) fn spend(&mut self, bytes: usize) -> Option<Duration> {
        let now = Instant::now();
        let refill = now.duration_since(self.at).as_secs_f64() * self.per_s;
        self.left = (self.left + refill).min(self.per_s) - bytes as f64;
        self.at = now;
        (self.left < 0.0).then(|| Duration::from_secs_f64(-self.left / self.per_s))
    }
}

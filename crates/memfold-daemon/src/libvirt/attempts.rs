//! Repeats an attempt that failed. The pause after a failure grows from 2 s to 2 min.

use std::time::{Duration, Instant};

/// Time between two searches for new libvirt domains, and pause after the first failure.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// Longest time between two attempts to adopt, enable or disable a domain.
const LONGEST_PAUSE: Duration = Duration::from_secs(120);

/// Attempts at one task: time of the next (if any), and the pause after it.
#[derive(Debug)]
pub(super) struct Attempts {
    pub next: Option<Instant>,
    pause: Duration,
}

impl Attempts {
    /// Begins with an attempt at `first`; `None`: without one.
    pub const fn new(first: Option<Instant>) -> Self {
        Self {
            next: first,
            pause: LOOK_INTERVAL,
        }
    }

    pub fn is_due(&self, now: Instant) -> bool {
        self.next.is_some_and(|next| next <= now)
    }

    /// Sets the time of the attempt after one that failed at `now`. Returns whether the failure is
    /// to be logged: this is the third in a row.
    pub fn failed(&mut self, now: Instant) -> bool {
        let is_third = self.pause == LOOK_INTERVAL * 4;
        self.next = Some(now + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        is_third
    }
}

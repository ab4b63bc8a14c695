//! Decides when the agent repeats work, for example an inventory of the guest's page cache. While
//! the runs bring nothing new, the interval doubles each time. After a useful run, the interval is
//! the shortest again.

use std::time::{Duration, Instant};

/// Schedule of repeated work. The interval between two runs doubles, up to a limit, until a run was
/// useful.
#[derive(Debug)]
pub struct Backoff {
    bounds: (Duration, Duration),
    interval: Duration,
    not_before: Instant,
    /// Time at which the work is due next; `None` if nobody requested the work.
    pub due: Option<Instant>,
}

impl Backoff {
    /// Creates a schedule. `bounds` are the shortest and the longest interval between two runs of
    /// the work.
    pub fn new(bounds: (Duration, Duration)) -> Self {
        Self {
            bounds,
            interval: bounds.0,
            not_before: Instant::now(),
            due: None,
        }
    }

    /// Requests the work, no earlier than `delay` from now and not before the current interval has
    /// passed.
    pub fn want(&mut self, delay: Duration) {
        self.due = Some((Instant::now() + delay).max(self.not_before));
    }

    /// Sets the interval to the shortest one, because the last run of the work was useful.
    pub fn was_useful(&mut self) {
        self.interval = self.bounds.0;
        self.not_before = self.not_before.min(Instant::now() + self.interval);
    }

    /// Returns whether requested work is due. If so, this ends the request and starts the next
    /// interval.
    pub fn take(&mut self) -> bool {
        let Some(due) = self.due else {
            return false;
        };
        let now = Instant::now();
        if due > now {
            return false;
        }
        self.due = None;
        // After a long time without requests, the interval is the shortest again.
        if now.duration_since(self.not_before) > self.bounds.1 {
            self.interval = self.bounds.0;
        }
        self.not_before = now + self.interval;
        self.interval = (self.interval * 2).min(self.bounds.1);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_does_not_repeat_work_before_its_interval_has_passed() {
        let mut backoff = Backoff::new((Duration::from_secs(2), Duration::from_secs(3)));
        assert!(!backoff.take());
        backoff.want(Duration::ZERO);
        assert!(backoff.take());
        backoff.want(Duration::ZERO);
        assert!(!backoff.take());
        std::thread::sleep(Duration::from_millis(2050));
        assert!(backoff.take());
        assert_eq!(backoff.interval, Duration::from_secs(3));
    }
}

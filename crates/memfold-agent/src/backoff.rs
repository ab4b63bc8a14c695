//! When to do again what helps only now and then.

use std::time::{Duration, Instant};

/// Work to be done again and again, the more rarely the less use it is.
#[derive(Debug)]
pub struct Backoff {
    bounds: (Duration, Duration),
    interval: Duration,
    not_before: Instant,
    /// When it is to be done.
    pub due: Option<Instant>,
}

impl Backoff {
    /// Never done yet; `bounds` are the shortest and the longest interval.
    pub fn new(bounds: (Duration, Duration)) -> Self {
        Self {
            bounds,
            interval: bounds.0,
            not_before: Instant::now(),
            due: None,
        }
    }

    /// Is wanted: no earlier than `delay` from now.
    pub fn want(&mut self, delay: Duration) {
        self.due = Some((Instant::now() + delay).max(self.not_before));
    }

    /// It was of use: from now on as often as at the start.
    pub fn was_useful(&mut self) {
        self.interval = self.bounds.0;
        self.not_before = self.not_before.min(Instant::now() + self.interval);
    }

    /// True once, when it is due; from then the interval counts.
    pub fn take(&mut self) -> bool {
        let now = Instant::now();
        if self.due.is_none_or(|due| due > now) {
            return false;
        }
        self.due = None;
        // Long unused: as at the start.
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
    fn the_second_time_waits_for_the_interval() {
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

//! Budgets: CPU time and pages per second, as token buckets; mappings, as the shortest run still
//! worth one.

use std::time::{Duration, Instant};

/// A token bucket: `rate` tokens flow in every second, up to `burst`; spending may overdraw, and
/// then one waits.
#[derive(Clone, Debug)]
pub struct TokenBucket {
    rate: f64,
    burst: f64,
    tokens: f64,
    last: Instant,
}

impl TokenBucket {
    /// A full bucket.
    #[must_use]
    pub fn new(rate: f64, burst: f64, now: Instant) -> Self {
        Self {
            rate,
            burst,
            tokens: burst,
            last: now,
        }
    }

    fn refill(&mut self, now: Instant) {
        let seconds = now.saturating_duration_since(self.last).as_secs_f64();
        self.tokens = (self.tokens + seconds * self.rate).min(self.burst);
        self.last = now;
    }

    /// Takes `amount` tokens, whether they are there or not.
    pub fn spend(&mut self, amount: f64, now: Instant) {
        self.refill(now);
        self.tokens -= amount;
    }

    /// How long until there is something to spend; `None` if there is now.
    pub fn wait(&mut self, now: Instant) -> Option<Duration> {
        self.refill(now);
        if self.tokens > 0.0 {
            return None;
        }
        if self.rate <= 0.0 {
            return Some(Duration::from_secs(3600));
        }
        Some(Duration::from_secs_f64(
            ((1.0 - self.tokens) / self.rate).clamp(0.001, 3600.0),
        ))
    }

    /// Whole tokens that are there now.
    pub fn available(&mut self, now: Instant) -> u64 {
        self.refill(now);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // clamped to be positive
        let whole = self.tokens.max(0.0) as u64;
        whole
    }
}

/// The shortest run, in pages, that is worth a mapping to a VM that has `used` of `limit` mappings.
///
/// A fold cuts a mapping in up to three. While there is room, every run is welcome; the nearer the
/// limit, the longer a run must be; above 90 % none is, so that QEMU itself never meets `ENOMEM`.
#[must_use]
pub fn shortest_run(used: usize, limit: usize) -> Option<u32> {
    match used * 100 / limit.max(1) {
        0..50 => Some(1),
        50..65 => Some(4),
        65..80 => Some(16),
        80..90 => Some(64),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spending_more_cpu_time_than_the_budget_waits() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(100.0, 50.0, start);
        assert_eq!(bucket.wait(start), None);
        bucket.spend(150.0, start);
        let wait = bucket.wait(start).unwrap();
        assert!(
            (Duration::from_secs(1)..Duration::from_millis(1100)).contains(&wait),
            "{wait:?}"
        );
        assert_eq!(bucket.wait(start + wait), None);
    }

    #[test]
    fn an_idle_bucket_holds_no_more_than_its_burst() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(100.0, 50.0, start);
        assert_eq!(bucket.available(start + Duration::from_secs(60)), 50);
    }

    #[test]
    fn runs_must_be_longer_near_the_mapping_limit() {
        let lengths: Vec<_> = [0, 500, 700, 850, 950]
            .map(|used| shortest_run(used, 1000))
            .into();
        assert_eq!(lengths, [Some(1), Some(4), Some(16), Some(64), None]);
    }
}

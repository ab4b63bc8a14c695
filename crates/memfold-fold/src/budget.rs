//! Limits the CPU time and the pages per second that folding takes (token buckets), and sets the
//! shortest run of pages that is worth a memory mapping.

use std::time::{Duration, Instant};

/// Token bucket: gains `rate` tokens a second, up to `burst`. Spending may overdraw the bucket;
/// then the next spender waits.
#[derive(Clone, Debug)]
pub struct TokenBucket {
    rate: f64,
    burst: f64,
    tokens: f64,
    last: Instant,
}

impl TokenBucket {
    /// Creates a full bucket, which gains `rate` tokens a second and holds at most `burst` tokens.
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

    /// Takes `amount` tokens from the bucket, even if it has fewer.
    pub fn spend(&mut self, amount: f64, now: Instant) {
        self.refill(now);
        self.tokens -= amount;
    }

    /// Returns the time until the bucket has tokens again, at most one hour; `None` if it has some
    /// now.
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

    /// Returns the number of whole tokens in the bucket.
    pub fn available(&mut self, now: Instant) -> u64 {
        self.refill(now);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // never negative
        let whole = self.tokens.max(0.0) as u64;
        whole
    }
}

/// Returns the minimum length in pages of a run that may be folded in a VM that has `used` of at
/// most `limit` mappings; `None` if no run may be folded.
///
/// A fold splits a mapping into up to three. Below half of the limit, every run is worth a mapping;
/// nearer to the limit, a run must be longer. Above 90 % no run is, so that QEMU's own calls do not
/// fail with `ENOMEM`.
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
    fn if_more_is_spent_than_the_token_bucket_holds_the_next_spending_has_to_wait() {
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
    fn an_idle_token_bucket_fills_only_to_its_burst() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(100.0, 50.0, start);
        assert_eq!(bucket.available(start + Duration::from_secs(60)), 50);
    }

    #[test]
    fn the_shortest_run_that_is_folded_grows_as_a_process_nears_max_map_count() {
        let lengths: Vec<_> = [0, 500, 700, 850, 950]
            .map(|used| shortest_run(used, 1000))
            .into();
        assert_eq!(lengths, [Some(1), Some(4), Some(16), Some(64), None]);
    }
}

//! Limits the CPU time of an estimate of possible savings: the reading thread sleeps whenever it
//! has used more than its share of a core.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memfold_sys::cpu::thread_cpu_ns;

use super::error::EstimateError;

/// Part of the budget for reading and hashing. The rest is for later work that does not sleep:
/// scanning page tables, grouping the sample.
const FOR_READING: f64 = 0.9;

/// Shortest sleep. A shorter one is skipped, because waking up costs about 10 us.
const LEAST_SLEEP: Duration = Duration::from_millis(3);

/// Longest sleep before the stop flag is checked.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

/// CPU budget of the thread that calls [`Pace::new`]. Time is counted from that call.
#[derive(Debug)]
pub struct Pace<'a> {
    /// CPU time that the thread may use, as a share of one core (1.0: a whole core).
    pub share: f64,
    /// Longest duration of the work, counted from [`Pace::new`]; `None`: no limit.
    pub limit: Option<Duration>,
    began: Instant,
    cpu_before: Duration,
    stop: &'a AtomicBool,
}

impl<'a> Pace<'a> {
    /// Creates a budget of `share` of one core (1.0: a whole core) for work that takes at most
    /// `limit`. Setting `stop` to true interrupts the work.
    #[must_use]
    pub fn new(share: f64, limit: Option<Duration>, stop: &'a AtomicBool) -> Self {
        Self {
            share,
            limit,
            began: Instant::now(),
            cpu_before: thread_cpu(),
            stop,
        }
    }

    /// Returns the CPU time that the calling thread has used since [`Pace::new`].
    #[must_use]
    pub fn cpu(&self) -> Duration {
        thread_cpu().saturating_sub(self.cpu_before)
    }

    /// Returns the time since [`Pace::new`].
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Returns the CPU time that the thread may still use before the duration `at`, counted from
    /// [`Pace::new`], is over.
    #[must_use]
    pub fn left(&self, at: Duration) -> Duration {
        at.mul_f64(self.share * FOR_READING)
            .saturating_sub(self.cpu())
    }

    /// Sleeps until the used CPU time is within the budget again. The sleep ends earlier when the
    /// duration `end`, counted from [`Pace::new`], is over. Returns false if this duration is over.
    pub fn keep(&self, end: Option<Duration>) -> Result<bool, EstimateError> {
        let due = self.cpu().div_f64(self.share * FOR_READING);
        if due.saturating_sub(self.elapsed()) < LEAST_SLEEP {
            self.wait_until(Duration::ZERO)?;
        } else {
            self.wait_until(end.map_or(due, |end| due.min(end)))?;
        }
        Ok(end.is_none_or(|end| self.elapsed() < end))
    }

    /// Sleeps until the duration `at`, counted from [`Pace::new`], is over. Fails if the work is
    /// interrupted.
    pub fn wait_until(&self, at: Duration) -> Result<(), EstimateError> {
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(EstimateError::Interrupted);
            }
            let rest = at.saturating_sub(self.elapsed());
            if rest.is_zero() {
                return Ok(());
            }
            std::thread::sleep(rest.min(LONGEST_SLEEP));
        }
    }
}

fn thread_cpu() -> Duration {
    Duration::from_nanos(thread_cpu_ns())
}

/// Callback that reports the progress of an estimate: name of the step, number of pages done, total
/// number of pages.
pub type Told<'a> = &'a mut dyn FnMut(&'static str, u64, u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_long_an_estimate_computes_it_stays_within_its_cpu_share() {
        let stop = AtomicBool::new(false);
        let pace = Pace::new(0.2, None, &stop);
        let mut sum = 0_u64;
        // The loop counts CPU time, because a busy machine may not run this thread for a while.
        while pace.cpu() < Duration::from_millis(160) {
            for n in 0..200_000_u64 {
                sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(n));
            }
            assert!(pace.keep(None).unwrap());
        }
        let share = pace.cpu().as_secs_f64() / pace.elapsed().as_secs_f64();
        assert!(share <= 0.2, "{share}");
    }

    #[test]
    fn if_an_estimate_sleeps_to_keep_its_cpu_share_the_sleep_ends_at_the_time_limit() {
        let stop = AtomicBool::new(false);
        let pace = Pace::new(1e-9, None, &stop);
        let end = Duration::from_millis(30);
        assert!(!pace.keep(Some(end)).unwrap());
        assert!(pace.elapsed() < memfold_testkit::bound(Duration::from_secs(10)));
    }

    #[test]
    fn an_estimate_that_is_interrupted_during_a_sleep_ends_with_an_error() {
        let stop = AtomicBool::new(true);
        let pace = Pace::new(1.0, None, &stop);
        let kept = pace.keep(None);
        assert!(matches!(kept, Err(EstimateError::Interrupted)));
        let late = pace.wait_until(Duration::from_secs(3600));
        assert!(matches!(late, Err(EstimateError::Interrupted)));
    }
}

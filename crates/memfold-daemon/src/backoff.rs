//! Runs a task, for example moving a VM's swap disk, on a thread of its own. After a failure the
//! next attempt has to wait. The pause grows from 30 s to 10 min.

use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use tracing::warn;

/// Pause after the first failure. The pause doubles with each further failure.
const FIRST_WAIT: Duration = Duration::from_secs(30);

/// Longest pause after a failure.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// Runs attempts of one task on a separate thread, one attempt at a time.
#[derive(Debug)]
pub(crate) struct Backoff<T> {
    under_way: Option<JoinHandle<Option<T>>>,
    failures: u32,
    /// End of the pause after a failure; no attempt begins earlier.
    rests_until: Option<Instant>,
}

impl<T> Default for Backoff<T> {
    fn default() -> Self {
        Self {
            under_way: None,
            failures: 0,
            rests_until: None,
        }
    }
}

impl<T: Send + 'static> Backoff<T> {
    /// Begins an attempt to move the swap disk of `vm`. The attempt has failed if `work` returns
    /// `None` or panics, or if its thread cannot be started.
    pub fn begin(
        &mut self,
        name: &str,
        vm: &str,
        work: impl FnOnce() -> Option<T> + Send + 'static,
    ) {
        match Builder::new().name(name.into()).spawn(work) {
            Ok(thread) => self.under_way = Some(thread),
            Err(error) => {
                warn!(vm, %error, "cannot start the thread that moves the VM's swap disk to a lender or back; retrying later");
                self.failed(Instant::now());
            }
        }
    }

    /// Returns the result of an attempt that has ended since the last call; `None` if no attempt
    /// has ended or the attempt failed. A failure begins a pause.
    pub fn ended(&mut self, now: Instant) -> Option<T> {
        let thread = self.under_way.take_if(|thread| thread.is_finished())?;
        let outcome = thread.join().ok().flatten();
        match outcome {
            Some(_) => self.failures = 0,
            None => self.failed(now),
        }
        outcome
    }

    pub const fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    pub fn failed(&mut self, now: Instant) {
        let wait = FIRST_WAIT.saturating_mul(1 << self.failures.min(8));
        self.failures += 1;
        self.rest(now + wait.min(LONGEST_WAIT));
    }

    /// Sets the end of the pause: no attempt begins before `until`.
    pub const fn rest(&mut self, until: Instant) {
        self.rests_until = Some(until);
    }

    pub fn rests(&self, now: Instant) -> bool {
        self.rests_until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn after_a_background_attempt_has_finished_its_outcome_is_returned_exactly_once() {
        for outcome in [Some(5), None] {
            let mut tries = Backoff::default();
            let (end, ended) = channel::<()>();
            let work = move || {
                // This attempt lasts until the test sends to `ended`.
                let _ = ended.recv();
                outcome
            };
            tries.begin("try", "a", work);
            let now = Instant::now();
            assert_eq!(tries.ended(now), None);
            assert!(tries.is_under_way());
            drop(end);
            let mut told = None;
            while tries.is_under_way() {
                told = tries.ended(now);
                std::thread::yield_now();
            }
            assert_eq!(told, outcome);
            assert_eq!(tries.ended(now), None);
            assert_eq!(tries.rests(now), outcome.is_none());
        }
    }

    #[test]
    fn each_failed_background_attempt_lengthens_the_wait_before_the_next_attempt() {
        let mut tries = Backoff::<()>::default();
        let now = Instant::now();
        for wait in [30, 60, 120, 240, 480, 600, 600] {
            tries.failed(now);
            assert!(tries.rests(now + Duration::from_secs(wait - 1)));
            assert!(!tries.rests(now + Duration::from_secs(wait)));
        }
    }
}

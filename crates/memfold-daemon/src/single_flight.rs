//! Lets several callers share one computation that takes long, such as a memory report. A caller
//! that comes during a computation waits for the next one, so no result is older than its request.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Shares an expensive result among callers. One computation runs at a time, and its result goes to
/// all callers that asked before the computation began. So no caller gets a result older than its
/// request.
#[derive(Debug)]
pub(crate) struct SingleFlight<T> {
    /// Number of computations that have begun.
    begun: AtomicU64,
    /// The last result and its number, counted from 1.
    last: Mutex<Option<(u64, T)>>,
}

impl<T> Default for SingleFlight<T> {
    fn default() -> Self {
        Self {
            begun: AtomicU64::new(0),
            last: Mutex::new(None),
        }
    }
}

impl<T: Clone> SingleFlight<T> {
    /// Returns the result of a call of `make` that began after this call. Concurrent callers share
    /// one such result. If a call of `make` fails, the next waiting caller calls its own `make`.
    pub fn get<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.begun_after(self.last_begun(), make)
    }

    /// Returns the number of the computation that began last; 0 before the first.
    fn last_begun(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }

    /// Returns the result of a computation with a number above `before`; runs `make` if there is
    /// none.
    fn begun_after<E>(&self, before: u64, make: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let mut last = self.last.lock();
        if let Some((number, value)) = last.as_ref() {
            if *number > before {
                return Ok(value.clone());
            }
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let value = make()?;
        *last = Some((number, value.clone()));
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    #[test]
    fn concurrent_requests_share_one_computation_that_started_after_the_requests() {
        let joined = &SingleFlight::default();
        let made = AtomicU64::new(0);
        let make = || Ok::<u64, Infallible>(made.fetch_add(1, Ordering::SeqCst) + 1);
        // Each value of `asked` gets a thread. The values are fixed, so the count does not depend
        // on which thread comes first.
        let answers = |asked: Vec<u64>| -> Vec<u64> {
            std::thread::scope(|scope| {
                let threads: Vec<_> = asked
                    .into_iter()
                    .map(|before| scope.spawn(move || joined.begun_after(before, make).unwrap()))
                    .collect();
                threads.into_iter().map(|t| t.join().unwrap()).collect()
            })
        };
        // All callers ask before the first computation begins.
        let asked = (0..40).map(|_| joined.last_begun()).collect();
        assert_eq!(answers(asked), [1; 40]);
        // These callers ask while the second computation runs, so that computation began before
        // their request.
        let mut asked = Vec::new();
        let second = joined.get(|| {
            asked = (0..40).map(|_| joined.last_begun()).collect();
            make()
        });
        assert_eq!(second.unwrap(), 2);
        assert_eq!(answers(asked), [3; 40]);
        assert_eq!(joined.get(make).unwrap(), 4, "never an old one");
        assert_eq!(joined.get(make).unwrap(), 5);
    }

    #[test]
    fn after_a_shared_computation_failed_the_next_request_computes_again() {
        let joined = SingleFlight::default();
        assert_eq!(joined.get(|| Err("no")), Err("no"));
        assert_eq!(joined.get(|| Ok::<_, &str>(5)), Ok(5));
    }
}

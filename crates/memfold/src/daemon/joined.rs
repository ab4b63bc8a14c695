//! One answer for all who ask at once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Something of this moment that costs too much to make it for each who asks: made once at a time, for all together who had asked before it was
/// begun. So nobody gets what is older than the question.
#[derive(Debug)]
pub(super) struct Joined<T> {
    /// How often it was begun.
    begun: AtomicU64,
    /// The last one, and its number from 1 on.
    last: Mutex<Option<(u64, T)>>,
}

impl<T> Default for Joined<T> {
    fn default() -> Self {
        Self {
            begun: AtomicU64::new(0),
            last: Mutex::new(None),
        }
    }
}

impl<T: Clone> Joined<T> {
    /// What was begun after this call, by `make` if nobody else has. After a failure, the next who waits tries again.
    pub fn get<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let before = self.begun.load(Ordering::SeqCst);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
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
    use std::sync::Barrier;
    use std::time::Duration;

    #[test]
    fn who_asks_gets_what_was_begun_since_and_many_at_once_get_the_same() {
        let joined = Joined::default();
        let made = AtomicU64::new(0);
        let make = || -> Result<u64, Infallible> {
            std::thread::sleep(Duration::from_millis(300));
            Ok(made.fetch_add(1, Ordering::SeqCst) + 1)
        };
        let together = Barrier::new(40);
        std::thread::scope(|scope| {
            for _ in 0..40 {
                scope.spawn(|| {
                    together.wait();
                    joined.get(make).unwrap()
                });
            }
        });
        // One for the first, one for all who came meanwhile; on a busy machine some come later.
        let at_once = made.load(Ordering::SeqCst);
        assert!((1..=8).contains(&at_once), "{at_once}");
        assert_eq!(joined.get(make).unwrap(), at_once + 1, "never an old one");
        assert_eq!(joined.get(make).unwrap(), at_once + 2);
    }

    #[test]
    fn after_a_failure_it_is_tried_again() {
        let joined = Joined::default();
        assert_eq!(joined.get(|| Err("no")), Err("no"));
        assert_eq!(joined.get(|| Ok::<_, &str>(5)), Ok(5));
    }
}

//! How many may do something at once.

use std::sync::{Condvar, Mutex, PoisonError};

/// Turns that are taken and given back.
#[derive(Debug)]
pub(super) struct Turns {
    taken: Mutex<usize>,
    returned: Condvar,
    limit: usize,
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    /// So many at once.
    pub const fn new(limit: usize) -> Self {
        Self {
            taken: Mutex::new(0),
            returned: Condvar::new(),
            limit,
        }
    }

    /// Waits for one.
    pub fn take(&self) -> Turn<'_> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let mut taken = self
            .returned
            .wait_while(taken, |taken| *taken >= self.limit)
            .unwrap_or_else(PoisonError::into_inner);
        *taken += 1;
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let taken = &self.0.taken;
        *taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn no_more_than_the_limit_at_once_and_all_in_the_end() {
        let turns = Turns::new(2);
        let (now, most, all) = (
            AtomicUsize::new(0),
            AtomicUsize::new(0),
            AtomicUsize::new(0),
        );
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let _turn = turns.take();
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(std::time::Duration::from_millis(5));
                    now.fetch_sub(1, Ordering::SeqCst);
                    all.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
        assert_eq!(most.into_inner(), 2);
        assert_eq!(all.into_inner(), 8);
    }
}

//! A counting semaphore with a time limit.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// A semaphore: at most `limit` permits exist at once.
#[derive(Debug)]
pub(crate) struct Semaphore {
    taken: Mutex<usize>,
    returned: Condvar,
    limit: usize,
}

/// A permit of a [`Semaphore`]. Dropping the permit returns it.
#[derive(Debug)]
pub(crate) struct Permit<'a>(&'a Semaphore);

impl Semaphore {
    /// Creates a semaphore of `limit` permits.
    pub const fn new(limit: usize) -> Self {
        Self {
            taken: Mutex::new(0),
            returned: Condvar::new(),
            limit,
        }
    }

    /// Waits for a permit; returns `None` if no permit is free within `timeout`.
    pub fn take(&self, timeout: Duration) -> Option<Permit<'_>> {
        let mut taken = self.taken.lock();
        self.returned
            .wait_while_for(&mut taken, |taken| *taken >= self.limit, timeout);
        if *taken >= self.limit {
            return None;
        }
        *taken += 1;
        Some(Permit(self))
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let taken = &self.0.taken;
        *taken.lock() -= 1;
        self.0.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_semaphore_admits_at_most_its_limit_at_once_and_serves_every_waiter() {
        let turns = Semaphore::new(2);
        let two = Barrier::new(2);
        let (now, most, all) = (
            AtomicUsize::new(0),
            AtomicUsize::new(0),
            AtomicUsize::new(0),
        );
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let turn = turns.take(Duration::from_secs(60));
                    assert!(turn.is_some());
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    // Two threads hold a permit at once: each waits here for the other.
                    two.wait();
                    // A third thread would get a permit here.
                    std::thread::sleep(Duration::from_millis(5));
                    now.fetch_sub(1, Ordering::SeqCst);
                    all.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
        assert_eq!(most.into_inner(), 2);
        assert_eq!(all.into_inner(), 8);
        let held = [(); 2].map(|()| turns.take(Duration::ZERO));
        assert!(held.iter().all(Option::is_some));
        assert!(turns.take(Duration::from_millis(5)).is_none());
    }
}

//! Gives a new identity (SSH host keys, machine id, MAC addresses) to each guest that was restored
//! from a snapshot. So two clones of one snapshot differ from each other.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use memfold_snapshot::Renewal;
use memfold_snapshot::identity::Plan;
use parking_lot::{Condvar, Mutex};
use tracing::{info, warn};

use crate::machine::{Machine, is_disconnected};

/// Time limit for a guest to renew its identity, which includes the generation of keys.
const RENEW_TIMEOUT: Duration = Duration::from_secs(300);

/// Longest wait for a permit; after that, the guest renews its identity without one.
const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// Permits for guests that renew their identity at the same time: half of the host's CPUs.
static RENEWING: LazyLock<Semaphore> = LazyLock::new(|| {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    Semaphore::new(cpus.div_ceil(2))
});

impl Machine {
    /// Makes a restored guest renew its identity as soon as its agent answers. This runs on a
    /// thread.
    pub(super) fn renew(self: &Arc<Self>) {
        let plan = self.vm.directory().map_or(Ok(None), Plan::read);
        let plan = match plan {
            Ok(Some(plan)) => plan,
            Ok(None) => return,
            Err(error) => {
                self.set_renewal(Renewal::failed(&error.to_string()));
                return;
            }
        };
        self.set_renewal(Renewal::pending());
        if plan.keeps_clock() {
            self.keep_clock();
        } else {
            self.set_clock_soon();
        }
        let begun = self.on_agent("renew", Duration::MAX, move |machine| {
            // Dozens of guests that renew at once would slow down the next clone's start. A guest
            // that renews slowly does not make the others wait for long.
            let _turn = RENEWING.take(TURN_TIMEOUT);
            // A renewal that was interrupted is repeated, which does no harm.
            machine.carry_out(&plan)
        });
        if let Err(error) = begun {
            self.set_renewal(Renewal::failed(&error.to_string()));
        }
    }

    /// Runs the renewal once. Returns `false` if the agent's connection was lost, so that the
    /// caller repeats the renewal.
    fn carry_out(&self, plan: &Plan) -> bool {
        let renewal = match self.run(plan.order(), RENEW_TIMEOUT) {
            Ok(done) => Renewal::read(&String::from_utf8_lossy(&done.stdout)),
            Err(error) if is_disconnected(&error) => return false,
            Err(error) => Err(error.to_string()),
        };
        match renewal {
            Ok(renewal) => {
                info!(vm = self.name(), done = ?renewal.done, left = ?renewal.left, "guest's identity renewed (random numbers, MAC addresses, ...)");
                if let Some(Err(error)) = self.vm.directory().map(Plan::remove) {
                    warn!(vm = self.name(), %error, "cannot remove renewal.json from the VM's directory; remove this file before the daemon restarts, or the guest's identity is renewed again");
                }
                self.set_renewal(renewal);
            }
            // The plan file stays, so the next daemon tries again.
            Err(why) => {
                warn!(
                    vm = self.name(),
                    why,
                    "cannot renew the guest's identity (random numbers, MAC addresses, ...); fix the cause and restart the daemon to retry"
                );
                self.set_renewal(Renewal::failed(&why));
            }
        }
        true
    }

    fn set_renewal(&self, renewal: Renewal) {
        *self.marks.renewal.lock() = Some(renewal);
    }
}

/// A semaphore: at most `limit` permits exist at once.
#[derive(Debug)]
struct Semaphore {
    taken: Mutex<usize>,
    returned: Condvar,
    limit: usize,
}

/// A permit of a [`Semaphore`]. Dropping the permit returns it.
#[derive(Debug)]
struct Permit<'a>(&'a Semaphore);

impl Semaphore {
    /// Creates a semaphore of `limit` permits.
    const fn new(limit: usize) -> Self {
        Self {
            taken: Mutex::new(0),
            returned: Condvar::new(),
            limit,
        }
    }

    /// Waits for a permit; returns `None` if no permit is free within `timeout`.
    fn take(&self, timeout: Duration) -> Option<Permit<'_>> {
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

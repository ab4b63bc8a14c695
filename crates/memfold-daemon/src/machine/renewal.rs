//! Gives restored guests new identities: host keys, machine id and others, so that clones of a
//! snapshot differ.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use memfold_snapshot::Renewal;
use memfold_snapshot::identity::Plan;
use tracing::{info, warn};

use crate::machine::{Machine, is_disconnected};
use crate::semaphore::Semaphore;

/// Time limit for a guest to renew its identity, which includes the generation of keys.
const RENEW_TIMEOUT: Duration = Duration::from_secs(120);

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
        let renewal = match self.run(&plan.script(), RENEW_TIMEOUT) {
            Ok(done) => Renewal::read(&String::from_utf8_lossy(&done.stdout)),
            Err(error) if is_disconnected(&error) => return false,
            Err(error) => Err(error.to_string()),
        };
        match renewal {
            Ok(renewal) => {
                info!(vm = self.name(), done = ?renewal.done, left = ?renewal.left, "guest's identity renewed (random numbers, MAC addresses, ...)");
                if let Some(Err(error)) = self.vm.directory().map(Plan::remove) {
                    warn!(vm = self.name(), %error, "cannot remove renewal.json; remove it before the daemon restarts");
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

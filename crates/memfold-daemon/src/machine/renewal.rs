//! Restored VMs are set apart from others of their snapshot.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use memfold_snapshot::Renewal;
use memfold_snapshot::identity::Plan;
use memfold_vm::AgentError;
use tracing::{info, warn};

use crate::machine::Machine;
use crate::semaphore::Semaphore;

/// How long a guest may take to be set apart from others: keys are made.
const RENEW_TIMEOUT: Duration = Duration::from_secs(120);

/// How long one waits for its turn before it goes without.
const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// Permits of those that are being set apart: half of the host's CPUs.
static RENEWING: OnceLock<Semaphore> = OnceLock::new();

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl Machine {
    /// Sees to it that a restored VM is set apart from others, as soon as its agent answers.
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
        let weak = Arc::downgrade(self);
        let work = move || {
            // Not kept alive by a guest that never answers.
            while let Some((machine, agent)) = weak.upgrade().and_then(|m| {
                let agent = m.agent()?;
                Some((m, agent))
            }) {
                if agent.wait_session(Duration::from_secs(1)).is_err() {
                    continue;
                }
                // Dozens of guests at work would keep the next clone from starting. But none may
                // keep others waiting for long.
                let _turn = RENEWING
                    .get_or_init(|| Semaphore::new(cpus().div_ceil(2)))
                    .take(TURN_TIMEOUT);
                // What is begun and cut off is done again: that does no harm.
                if machine.carry_out(&plan) {
                    return;
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("renew".into()).spawn(work) {
            self.set_renewal(Renewal::failed(&error.to_string()));
        }
    }

    /// Returns whether that is all this daemon can do.
    fn carry_out(&self, plan: &Plan) -> bool {
        let renewal = match self.run(&plan.script(), RENEW_TIMEOUT) {
            Ok(done) => Renewal::read(&String::from_utf8_lossy(&done.stdout)),
            Err(AgentError::NoSession(_) | AgentError::Lost | AgentError::Write(_)) => {
                return false;
            }
            Err(error) => Err(error.to_string()),
        };
        match renewal {
            Ok(renewal) => {
                info!(vm = self.name, done = ?renewal.done, left = ?renewal.left, "guest's identity renewed");
                if let Some(Err(error)) = self.vm.directory().map(Plan::remove) {
                    warn!(vm = self.name, %error, "cannot remove renewal.json; remove it before the daemon restarts");
                }
                self.set_renewal(renewal);
            }
            // The plan stays for the next daemon.
            Err(why) => {
                warn!(
                    vm = self.name,
                    why,
                    "guest's identity not renewed; fix the cause and restart the daemon to retry"
                );
                self.set_renewal(Renewal::failed(&why));
            }
        }
        true
    }

    fn set_renewal(&self, renewal: Renewal) {
        *self.renewal.lock() = Some(renewal);
    }
}

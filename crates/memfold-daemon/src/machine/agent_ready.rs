//! Starts the work that a guest needs after its boot, such as enabling its swap disk, as soon as
//! memfold's agent in the guest answers.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::warn;

use crate::machine::Machine;
use crate::threads;

/// Time limit for the agent's first answer after a boot.
const TIMEOUT: Duration = Duration::from_secs(600);

impl Machine {
    /// Runs `work` on a thread called `name` when the guest's agent answers. `work` does not run if
    /// the VM ends first, or if the agent does not answer within ten minutes.
    pub(crate) fn on_agent_ready(self: &Arc<Self>, name: &str, work: fn(&Self)) {
        let begun = self.on_agent(name, TIMEOUT, move |machine| {
            work(machine);
            true
        });
        if let Err(error) = begun {
            warn!(vm = self.name(), %error, "cannot start the thread that sets up a booted guest ({name}); restart the daemon");
        }
    }

    /// Calls `work` on a thread called `name` each time that the guest's agent answers, until
    /// `work` returns `true`, the VM ends or `limit` is over.
    pub(crate) fn on_agent(
        self: &Arc<Self>,
        name: &str,
        limit: Duration,
        mut work: impl FnMut(&Arc<Self>) -> bool + Send + 'static,
    ) -> io::Result<()> {
        let (weak, began) = (Arc::downgrade(self), Instant::now());
        threads::begin(name, move || {
            while began.elapsed() < limit {
                // The thread does not keep the data of a VM whose agent never answers.
                let found = weak.upgrade().and_then(|m| Some((m.agent()?, m)));
                let Some((agent, machine)) = found else {
                    return;
                };
                let is_there = agent.wait_session(Duration::from_secs(1)).is_ok();
                // A link that lives longer than its VM would connect to a new VM of that name.
                drop(agent);
                if is_there && work(&machine) {
                    return;
                }
            }
        })
    }
}

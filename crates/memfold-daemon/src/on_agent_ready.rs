//! Starts work in a guest as soon as the guest's agent answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::warn;

use crate::machine::Machine;

/// Time limit for the agent's first answer after a boot.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Runs `work` on a thread called `name` when the guest's agent answers. `work` does not run if the
/// VM ends first, or if the agent does not answer within ten minutes.
pub(crate) fn on_agent_ready(
    machine: &Arc<Machine>,
    name: &str,
    work: impl FnOnce(&Machine) + Send + 'static,
) {
    let (weak, vm) = (Arc::downgrade(machine), machine.name().to_owned());
    let wait = move || {
        let end = Instant::now() + TIMEOUT;
        while Instant::now() < end {
            // The thread does not keep the data of a VM whose agent never answers.
            let Some(machine) = weak.upgrade() else {
                return;
            };
            if machine.wait_agent(Duration::from_secs(1)).is_ok() {
                work(&machine);
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name(name.into());
    if let Err(error) = thread.spawn(wait) {
        warn!(vm, %error, "cannot start the thread that sets up a booted guest ({name}); restart the daemon");
    }
}

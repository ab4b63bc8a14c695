//! What is done with a guest as soon as its agent answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::warn;

use crate::machine::Machine;

/// How long a guest that boots has until its agent answers.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Does `work`, on a thread called `name`, when the guest's agent answers; not at all for one that
/// ends before, or doesn't answer in ten minutes.
pub(crate) fn on_agent_ready(
    machine: &Arc<Machine>,
    name: &str,
    work: impl FnOnce(&Machine) + Send + 'static,
) {
    let (weak, vm) = (Arc::downgrade(machine), machine.name().to_owned());
    let wait = move || {
        let end = Instant::now() + TIMEOUT;
        while Instant::now() < end {
            // Not kept alive by a guest that never answers.
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
        warn!(vm, %error, "no thread for the tasks of a booted guest ({name}); restart the daemon");
    }
}

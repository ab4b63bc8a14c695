//! Preparation of a guest for a save: dirty pages are written back, and caches that can be read
//! again are dropped.

use std::time::Duration;

use memfold_vm::AgentError;

use crate::error::DaemonError;
use crate::machine::Machine;

/// Time limit for a guest to write back dirty pages, and the default limit for dropping its caches.
pub(super) const DROP_TIMEOUT: Duration = Duration::from_secs(120);

/// Script that drops the guest's caches after dirty pages are written back. The agent's trace
/// events are off meanwhile (`set_event`, `Documentation/trace/events.rst`), because reporting each
/// dropped page would take about half of the time.
const DROP: &str = r"saved=/run/memfold-events
on() { [ ! -s $saved ] || { cat $saved > set_event && rm $saved; }; }
if cd /sys/kernel/tracing/instances/memfold 2> /dev/null; then
    on
    trap on EXIT
    cat set_event > $saved && : > set_event
fi
echo 3 > /proc/sys/vm/drop_caches";

/// Script that turns the agent's trace events on again after an interrupted drop.
const TRACE: &str = "saved=/run/memfold-events
    [ ! -s $saved ] || { cat $saved > /sys/kernel/tracing/instances/memfold/set_event && rm $saved; }";

/// Time limit of [`TRACE`].
const TRACE_TIMEOUT: Duration = Duration::from_secs(60);

/// Has the guest write dirty pages to its disks, so that the disks hold the content of its page
/// cache.
pub(super) fn write_back(machine: &Machine) -> Result<(), DaemonError> {
    let wrote = machine.run("sync", DROP_TIMEOUT)?;
    if wrote.code != 0 {
        let words = String::from_utf8_lossy(&wrote.stderr).trim().to_owned();
        return Err(DaemonError::BadRequest(format!(
            "the guest did not write back dirty pages ({words}); use --keep all"
        )));
    }
    Ok(())
}

/// Has the guest drop its caches. Returns a reason if the guest takes longer than `limit`: it is
/// then saved with the remaining caches.
pub(super) fn drop_caches(
    machine: &Machine,
    limit: Duration,
) -> Result<Option<String>, DaemonError> {
    let dropped = match machine.run(DROP, limit) {
        Err(AgentError::Timeout { seconds }) => {
            return Ok(Some(format!("the command took longer than {seconds} s")));
        }
        other => other?,
    };
    if dropped.code != 0 {
        let words = String::from_utf8_lossy(&dropped.stderr).trim().to_owned();
        return Err(DaemonError::BadRequest(format!(
            "the guest did not drop its caches ({words}); use --keep all"
        )));
    }
    Ok(None)
}

/// Turns the agent's trace events on again after an interrupted drop.
pub(super) fn trace_again(machine: &Machine) -> Result<(), AgentError> {
    machine.run(TRACE, TRACE_TIMEOUT).map(drop)
}

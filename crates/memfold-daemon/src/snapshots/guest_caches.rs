//! What a guest does before it is saved: it writes back what is dirty, and drops what it can have
//! again.

use std::time::Duration;

use memfold_vm::AgentError;

use crate::error::DaemonError;
use crate::machine::Machine;

/// How long a guest may take to write back what is dirty, and, if nothing else is said, to drop its
/// caches.
pub(super) const DROP_TIMEOUT: Duration = Duration::from_secs(120);

/// What a guest runs first, once what is dirty is written back: its caches go. The agent's events
/// are off meanwhile (`set_event`, `Documentation/trace/events.rst`): telling each page that goes
/// would take most of half the time.
const DROP: &str = r"saved=/run/memfold-events
on() { [ ! -s $saved ] || { cat $saved > set_event && rm $saved; }; }
if cd /sys/kernel/tracing/instances/memfold 2> /dev/null; then
    on
    trap on EXIT
    cat set_event > $saved && : > set_event
fi
echo 3 > /proc/sys/vm/drop_caches";

/// After a drop that was cut off.
const TRACE: &str = "saved=/run/memfold-events
    [ ! -s $saved ] || { cat $saved > /sys/kernel/tracing/instances/memfold/set_event && rm $saved; }";

/// How long it may take to have its events on again.
const TRACE_TIMEOUT: Duration = Duration::from_secs(60);

/// Has the guest write what is dirty to its disks, which are to hold what it has cached.
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

/// Has the guest drop what it can have again. If it takes longer, it is saved with what it has
/// left; says so.
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

/// Has the agent's events on again after a drop that was cut off.
pub(super) fn trace_again(machine: &Machine) -> Result<(), AgentError> {
    machine.run(TRACE, TRACE_TIMEOUT).map(drop)
}

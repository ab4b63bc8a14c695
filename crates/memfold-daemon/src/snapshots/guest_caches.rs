//! Preparation of a guest for a save: dirty pages are written back, and caches that can be read
//! again are dropped.

use std::time::Duration;

use memfold_snapshot::guest_extents::{END, with_paths};
use memfold_vm::AgentError;

use crate::error::DaemonError;
use crate::machine::{Machine, text};

/// Time limit for a guest to write back dirty pages.
const WRITE_TIMEOUT: Duration = Duration::from_secs(120);

/// Time for the agent's answer after that.
const ANSWER: Duration = Duration::from_secs(2);

/// Exit code of [`drop_script`], and of the agent's `--drop-caches`, if the time was too short.
const LATE: i32 = 3;

/// Begins a script that drops the guest's caches after dirty pages are written back. The agent's
/// trace events are off meanwhile (`set_event`, `Documentation/trace/events.rst`), because
/// reporting each dropped page would take about half of the time.
const QUIETLY: &str = r"saved=/run/memfold-events
on() { [ ! -s $saved ] || { cat $saved > set_event && rm $saved; }; }
if cd /sys/kernel/tracing/instances/memfold 2> /dev/null; then
    on
    trap on EXIT
    cat set_event > $saved && : > set_event
fi
";

/// Script that drops the guest's caches: first files, in this order, for at most `limit`; if all
/// were dropped, then the rest, which nothing ends. An older agent drops all as the rest.
fn drop_script(files: &[Vec<u8>], limit: Duration) -> String {
    let seconds = limit.as_secs_f64();
    let begin =
        format!("{QUIETLY}/proc/$PPID/exe --drop-caches {seconds:.1} 2> /dev/null <<'END'\n");
    let end = format!("{END}[ $? != {LATE} ] || exit {LATE}\necho 3 > /proc/sys/vm/drop_caches");
    with_paths(&begin, files.iter().map(Vec::as_slice), &end).0
}

/// Script that turns the agent's trace events on again after an interrupted drop.
const TRACE: &str = "saved=/run/memfold-events
    [ ! -s $saved ] || { cat $saved > /sys/kernel/tracing/instances/memfold/set_event && rm $saved; }";

/// Time limit of [`TRACE`].
const TRACE_TIMEOUT: Duration = Duration::from_secs(60);

/// Has the guest write dirty pages to its disks, so that the disks hold the content of its page
/// cache.
pub(super) fn write_back(machine: &Machine) -> Result<(), DaemonError> {
    let wrote = machine.run("sync", WRITE_TIMEOUT)?;
    if wrote.code != 0 {
        let words = text(&wrote.stderr);
        return Err(DaemonError::BadRequest(format!(
            "the guest did not write back dirty pages ({words}); use --keep all"
        )));
    }
    Ok(())
}

/// Has the guest drop its caches, `files` first. Returns a reason if the guest takes longer than
/// `limit`: it is then saved with the remaining caches.
pub(super) fn drop_caches(
    machine: &Machine,
    files: &[Vec<u8>],
    limit: Duration,
) -> Result<Option<String>, DaemonError> {
    let dropped = match machine.run(&drop_script(files, limit), limit + ANSWER) {
        Err(AgentError::Timeout { seconds }) => {
            return Ok(Some(format!("the command took longer than {seconds} s")));
        }
        other => other?,
    };
    if dropped.code == LATE {
        let seconds = limit.as_secs_f64();
        return Ok(Some(format!(
            "dropping them takes longer than {seconds:.0} s"
        )));
    }
    if dropped.code != 0 {
        let words = text(&dropped.stderr);
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

//! Sends commands about segments to the guest's agent: mount a segment over the guest's files,
//! unmount it, list mounted segments.

use std::time::{Duration, Instant};

use memfold_api::SegmentState;
use memfold_host::chain;
use memfold_vm::{AgentError, CommandResult};

use crate::error::{DaemonError, impossible};
use crate::machine::{Machine, text};

/// Time limit for a guest to compare its files with those of a segment, and to mount the segment.
const LAY_TIMEOUT: Duration = Duration::from_secs(300);

/// Time limit for mounting a segment when the guest compares the content of all files.
const CONTENT_TIMEOUT: Duration = Duration::from_secs(3600);

/// Time limit for a guest to find a device that was plugged in.
const PLUG_TIMEOUT: Duration = Duration::from_secs(20);

/// Time limit for a guest to list its mounted segments.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);

/// Exit code of an agent that does not know the command (wrong usage).
const USAGE: i32 = 2;

/// Has the guest mount a segment over its files, as soon as the guest finds the device. With
/// `content`, the guest compares all bytes of the files first.
pub(crate) fn lay(
    machine: &Machine,
    name: &str,
    content: bool,
) -> Result<serde_json::Value, DaemonError> {
    let (option, timeout) = if content {
        (" --content", CONTENT_TIMEOUT)
    } else {
        ("", LAY_TIMEOUT)
    };
    let script = format!("exec \"$MEMFOLD_AGENT\" --segment-lay {name}{option}");
    machine.check_runs("no segment was mounted")?;
    let end = Instant::now() + PLUG_TIMEOUT;
    let done = loop {
        let done = machine.run(&script, timeout);
        let is_early = match &done {
            // The guest has not found the device yet.
            Ok(result) => result.code != 0 && text(&result.stderr).contains("no device"),
            Err(error) => matches!(error, AgentError::Lost | AgentError::NoSession(_)),
        };
        if !is_early || Instant::now() > end {
            break done;
        }
        std::thread::sleep(Duration::from_millis(500));
    };
    let answer = done
        .map_err(DaemonError::from)
        .and_then(|done| answer(machine, &done));
    let state = match &answer {
        Ok(_) => SegmentState::Laid,
        Err(error) => SegmentState::Failed(chain(error)),
    };
    machine.set_segment_state(name, state);
    answer
}

/// Has the guest unmount a segment, whatever its generation. Returns the agent's report.
pub(crate) fn take_off(machine: &Machine, base: &str) -> Result<serde_json::Value, DaemonError> {
    let script = format!("exec \"$MEMFOLD_AGENT\" --segment-take-off {base}");
    machine.check_runs("no segment was unmounted")?;
    let answer = answer(machine, &machine.run(&script, LAY_TIMEOUT)?)?;
    for segment in machine.vm().segments() {
        if segment.base_name() == base {
            machine.set_segment_state(&segment.name, SegmentState::TakenOff);
        }
    }
    Ok(answer)
}

/// Returns the segments that the guest has mounted, as its agent reports them.
pub(crate) fn list(machine: &Machine) -> Result<serde_json::Value, DaemonError> {
    let done = machine.run("exec \"$MEMFOLD_AGENT\" --segment-list", LIST_TIMEOUT)?;
    answer(machine, &done)
}

fn answer(machine: &Machine, done: &CommandResult) -> Result<serde_json::Value, DaemonError> {
    let refused = |why: &str| impossible(format!("the guest of VM '{}': {why}", machine.name()));
    match done.code {
        0 => serde_json::from_slice(&done.stdout)
            .map_err(|_| refused("the agent's answer is not JSON; update the agent")),
        USAGE => Err(refused(
            "the agent does not support segments; update the agent",
        )),
        _ => Err(refused(&text(&done.stderr))),
    }
}

//! Sends commands about segments to the guest's agent: mount a segment over the guest's files,
//! unmount it, list mounted segments. Mounts segments in guests that boot, and finds out which
//! segments are mounted when the daemon starts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::SegmentState;
use memfold_host::chain;
use memfold_vm::{AgentError, CommandResult, SegmentSpec};
use memfold_wire::order::GuestOrder;
use tracing::warn;

use crate::error::{DaemonError, impossible};
use crate::machine::{Machine, text};
use crate::segments::copy_out;

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
    let timeout = if content {
        CONTENT_TIMEOUT
    } else {
        LAY_TIMEOUT
    };
    let order = GuestOrder::MountSegment {
        name: name.to_owned(),
        content,
    };
    machine.check_runs("no segment was mounted")?;
    let end = Instant::now() + PLUG_TIMEOUT;
    let done = loop {
        let done = machine.run(order.clone(), timeout);
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
    let order = GuestOrder::UnmountSegment {
        base: base.to_owned(),
    };
    machine.check_runs("no segment was unmounted")?;
    let answer = answer(machine, &machine.run(order, LAY_TIMEOUT)?)?;
    for segment in machine.vm().segments() {
        if segment.base_name() == base {
            machine.set_segment_state(&segment.name, SegmentState::TakenOff);
        }
    }
    Ok(answer)
}

/// Returns the segments that the guest has mounted, as its agent reports them.
pub(crate) fn list(machine: &Machine) -> Result<serde_json::Value, DaemonError> {
    let done = machine.run(GuestOrder::ListSegments, LIST_TIMEOUT)?;
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

/// Asks a guest that was booted under an earlier daemon for its mounted segments, and removes a
/// disk for copying files that the earlier daemon has left.
pub(crate) fn recall_segments(machine: &Arc<Machine>) {
    if machine.vm().spec().is_none_or(|spec| spec.slots() == 0) {
        return;
    }
    machine.on_agent_ready("segments", |machine| {
        if let Err(error) = recall(machine) {
            warn!(
                vm = machine.name(),
                error = &error as &dyn std::error::Error,
                "cannot ask the guest which segments it uses; no action is needed"
            );
        }
    });
}

fn recall(machine: &Machine) -> Result<(), DaemonError> {
    // While this right is held, no segment is mounted or unmounted.
    let _alone = machine.save_right();
    copy_out::unplug(machine);
    if machine.vm().segments().iter().all(|segment| segment.root) {
        return Ok(());
    }
    let there = list(machine)?;
    for segment in machine.vm().segments().iter().filter(|s| !s.root) {
        let lies = |entry: &serde_json::Value| {
            let (name, generation) = (entry["name"].as_str()?, entry["generation"].as_u64()?);
            let layers = entry["layers"].as_array()?;
            let is_mounted = entry["mounted"].is_string() && !layers.is_empty();
            Some(is_mounted && segment.name == format!("{name}@{generation}"))
        };
        let mut entries = there.as_array().into_iter().flatten();
        let is_laid = entries.any(|entry| lies(entry) == Some(true));
        // A known state is newer, because this daemon has changed the mount since.
        if is_laid && machine.segment_state(&segment.name).is_none() {
            machine.set_segment_state(&segment.name, SegmentState::Laid);
        }
    }
    Ok(())
}

/// Has a running guest mount all segments of the VM. A failure is logged and shown in the list of
/// VMs.
pub(crate) fn lay_all(machine: &Machine) {
    let _alone = machine.save_right();
    let segments = machine.vm().segments();
    for (number, segment) in segments.iter().enumerate() {
        let is_newer = |other: &SegmentSpec| other.base_name() == segment.base_name();
        // Of two generations, only the one that was attached last is used.
        if segment.root || segments[number + 1..].iter().any(is_newer) {
            continue;
        }
        if let Err(error) = lay(machine, &segment.name, false) {
            warn!(
                vm = machine.name(),
                segment = segment.name,
                error = &error as &dyn std::error::Error,
                "cannot mount the segment in the guest; run 'memfold segment attach'"
            );
        }
    }
}

//! Mounts segments in guests that boot, and finds out which segments are mounted when the daemon
//! starts.

use std::sync::Arc;

use memfold_api::SegmentState;
use memfold_vm::SegmentSpec;
use tracing::warn;

use crate::error::DaemonError;
use crate::machine::Machine;
use crate::segments::copy_out;
use crate::segments::in_guest::{self, lay};

/// Has a guest that boots mount the VM's segments over its files, unless the guest did so itself.
pub(crate) fn lay_when_booted(machine: &Arc<Machine>) {
    if machine.vm().segments().iter().any(|segment| !segment.root) {
        machine.on_agent_ready("segments", lay_all);
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
    let there = in_guest::list(machine)?;
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

//! Segments that guests lay over their files when they boot, and those that lie there when the
//! daemon comes.

use std::sync::Arc;

use memfold_api::SegmentState;
use memfold_vm::SegmentSpec;
use tracing::warn;

use crate::error::DaemonError;
use crate::machine::Machine;
use crate::on_agent_ready::on_agent_ready;
use crate::segments::copy_out;
use crate::segments::in_guest::{self, lay};

/// Has a guest that boots lay its segments over its files, unless it has done that by itself.
pub(crate) fn lay_when_booted(machine: &Arc<Machine>) {
    if machine.vm().segments().iter().any(|segment| !segment.root) {
        on_agent_ready(machine, "segments", lay_all);
    }
}

/// Asks a guest that this daemon hasn't booted what lies over its files, and takes out a disk that
/// it was to copy files to: the daemon that plugged it is dead.
pub(crate) fn recall_segments(machine: &Arc<Machine>) {
    if machine.vm().spec().is_none_or(|spec| spec.slots() == 0) {
        return;
    }
    on_agent_ready(machine, "segments", |machine| {
        if let Err(error) = recall(machine) {
            warn!(
                vm = machine.name(),
                error = &error as &dyn std::error::Error,
                "cannot ask the guest which segments it uses; nothing is needed"
            );
        }
    });
}

fn recall(machine: &Machine) -> Result<(), DaemonError> {
    // Nothing is laid or taken off meanwhile.
    let _alone = machine.save_right();
    copy_out::unplug(machine);
    if machine.vm().segments().iter().all(|segment| segment.root) {
        return Ok(());
    }
    let there = in_guest::list(machine)?;
    for segment in machine.vm().segments().iter().filter(|s| !s.root) {
        let lies = |entry: &serde_json::Value| {
            let name = format!(
                "{}@{}",
                entry["name"].as_str()?,
                entry["generation"].as_u64()?
            );
            let layers = entry["layers"].as_array()?;
            let is_mounted = entry["mounted"].is_string();
            (name == segment.name && is_mounted && !layers.is_empty()).then_some(())
        };
        let is_laid = there
            .as_array()
            .into_iter()
            .flatten()
            .any(|e| lies(e).is_some());
        // A guest that has just laid it was asked by this daemon.
        if is_laid && machine.segment_state(&segment.name).is_none() {
            machine.set_segment_state(&segment.name, SegmentState::Laid);
        }
    }
    Ok(())
}

/// Has a guest that runs lay its segments over its files. What fails is said where VMs are listed,
/// and in the log.
pub(crate) fn lay_all(machine: &Machine) {
    let _alone = machine.save_right();
    let segments = machine.vm().segments();
    for (number, segment) in segments.iter().enumerate() {
        let is_newer = |other: &SegmentSpec| other.base_name() == segment.base_name();
        // Of two generations, the one that was attached last.
        if segment.root || segments[number + 1..].iter().any(is_newer) {
            continue;
        }
        if let Err(error) = lay(machine, &segment.name, false) {
            warn!(
                vm = machine.name(),
                segment = segment.name,
                error = &error as &dyn std::error::Error,
                "cannot overlay the segment in the guest; run 'memfold segment attach'"
            );
        }
    }
}

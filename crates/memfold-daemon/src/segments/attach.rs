//! Attaches segments to running VMs, and detaches them.

use std::fs::File;
use std::os::fd::AsFd as _;

use memfold_api::{AttachSegmentRequest, AttachedSegment, SegmentState, VmSegment};
use memfold_segment::Reference;
use memfold_vm::segments::{MAX_SLOTS, plug};
use memfold_vm::{QmpError, SegmentSpec, VmSpec};
use tracing::{info, warn};

use crate::error::{DaemonError, impossible, segment_files};
use crate::machine::Machine;
use crate::segments::in_guest::{lay, take_off};
use crate::segments::{Segments, directory, note, noted};

impl Segments {
    /// Attaches a segment to a running VM: the guest mounts the segment over its own files. If
    /// another generation (build) of the segment is mounted, the guest unmounts it first.
    pub fn attach(
        &self,
        vm: &str,
        request: &AttachSegmentRequest,
    ) -> Result<AttachedSegment, DaemonError> {
        let machine = self.registry.machine(vm)?;
        let directory = directory(&machine)?;
        let slots = machine.vm().spec().map_or(0, VmSpec::slots);
        // Only one attachment at a time: two would take the same slot, and a snapshot would save an
        // incomplete state. This right is taken before the lock of segments, which is held only
        // until QEMU maps the image, because guests may be slow.
        let _alone = machine.save_right_soon()?;
        // This lock keeps the result of the writer's check valid until the writer is recorded.
        let mut kept = if request.writer {
            (None, Some(self.exclusive()))
        } else {
            (Some(self.shared()), None)
        };
        let mut now = noted(&machine, directory)?;
        let (manifest, image) = self.find_one(&request.segment, vm, machine.domain())?;
        let name = manifest.reference();
        if request.writer {
            self.check_alone(&manifest.name, vm)?;
        }
        if !now.iter().any(|segment| segment.name == name) {
            let slot = u32::try_from(now.len()).unwrap_or(MAX_SLOTS);
            if slot >= slots {
                return Err(impossible(format!(
                    "VM '{vm}' has no free slot for a segment ({slots} in all); start it with --segment-slots {} (or segment_slots = {0} in its description)",
                    slot + 1
                )));
            }
            let mut segment = SegmentSpec::new(&name);
            segment.bytes = manifest.image_bytes;
            segment.image = Some(image.clone());
            segment.digest = Some(manifest.digest.clone());
            memfold_vm::segments::check_one(&segment)
                .map_err(|error| impossible(error.to_string()))?;
            let file = File::open(&image);
            // The segment is recorded before QEMU adds the device: a device without a record would
            // occupy its slot forever. A record without a device is removed later.
            now.push(segment.clone());
            note(directory, &now)?;
            // From now on the VM counts as a user of the segment, so the lock is not needed while
            // QEMU works.
            kept = (None, None);
            let (error, has_device) = match file {
                Ok(file) => match plug(&mut machine.monitor(), slot, &segment, file.as_fd()) {
                    Ok(()) => (None, true),
                    // If QEMU answers late, it may add the device nevertheless.
                    Err(error) => {
                        let is_refused = matches!(error, QmpError::Refused { .. });
                        (Some(DaemonError::from(error)), !is_refused)
                    }
                },
                Err(error) => (Some(segment_files(&image)(error).into()), false),
            };
            if !has_device {
                now.pop();
                note(directory, &now)?;
            }
            if let Some(error) = error {
                return Err(error);
            }
            info!(vm, segment = name, "segment attached");
        }
        if request.writer {
            self.shelf.set_writer(&manifest.name, Some(vm))?;
            info!(
                vm,
                segment = manifest.name,
                "segment attached with --writer: its next generation (image) can be built only from this VM"
            );
        }
        drop(kept);
        let lay = || lay_instead(&machine, &now, &manifest.name, &name, request.content);
        let report = (!request.no_lay).then(lay).transpose()?;
        Ok(AttachedSegment {
            segment: VmSegment {
                state: machine
                    .segment_state(&name)
                    .unwrap_or(SegmentState::Attached),
                segment: name,
            },
            report,
        })
    }

    /// Has a guest unmount a segment. Changes that the guest wrote to the segment's files are kept.
    /// The device stays until the VM ends.
    pub fn detach(&self, vm: &str, name: &str) -> Result<AttachedSegment, DaemonError> {
        let machine = self.registry.machine(vm)?;
        let reference = Reference::parse(name)?;
        let _alone = machine.save_right_soon()?;
        let now = machine.vm().segments();
        let of = |s: &&SegmentSpec| match reference.generation {
            Some(_) => s.name == reference.to_string(),
            None => s.base_name() == reference.name,
        };
        // The mounted generation is the one that was attached last.
        let Some(at) = now.iter().rposition(|s| of(&s)) else {
            return Err(impossible(format!("VM '{vm}' has no segment '{name}'")));
        };
        let segment = &now[at];
        let is_newer = |s: &&SegmentSpec| s.base_name() == segment.base_name();
        if let Some(newer) = now[at + 1..].iter().rev().find(is_newer) {
            return Err(impossible(format!(
                "VM '{vm}' has '{}' over its files, no longer '{}'; to take it off: memfold segment detach {vm} {}",
                newer.name,
                segment.name,
                segment.base_name()
            )));
        }
        if segment.root {
            return Err(impossible(format!(
                "'{}' is the root file system of VM '{vm}' and is detached when the VM ends",
                segment.name
            )));
        }
        let report = take_off(&machine, segment.base_name())?;
        if self.shelf.writer(segment.base_name()).as_deref() == Some(vm) {
            self.shelf.set_writer(segment.base_name(), None)?;
        }
        Ok(AttachedSegment {
            segment: VmSegment {
                segment: segment.name.clone(),
                state: SegmentState::TakenOff,
            },
            report: Some(report),
        })
    }
}

/// Unmounts another generation of a segment in the guest and mounts this one. If that fails, the
/// other generation is mounted again.
fn lay_instead(
    machine: &Machine,
    now: &[SegmentSpec],
    base: &str,
    name: &str,
    content: bool,
) -> Result<serde_json::Value, DaemonError> {
    let may_lie = |segment: &&SegmentSpec| {
        segment.base_name() == base
            && segment.name != name
            && machine.segment_state(&segment.name) != Some(SegmentState::TakenOff)
    };
    let other = now.iter().rev().find(may_lie);
    if other.is_some() {
        take_off(machine, base)?;
    }
    let laid = lay(machine, name, content);
    if let (Err(error), Some(other)) = (&laid, other) {
        let again = lay(machine, &other.name, false);
        warn!(
            vm = machine.name(),
            segment = name,
            error = error as &dyn std::error::Error,
            other = other.name,
            is_laid_again = again.is_ok(),
            "cannot mount the newer segment in the guest; fix the cause and attach the segment again"
        );
    }
    laid
}

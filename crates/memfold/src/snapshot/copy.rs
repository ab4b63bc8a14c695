//! Disks that a VM writes in place: copied into the snapshot as they were at its instant, while the VM writes on.
//!
//! ```text
//!                            device
//!                              |            before: a filter (copy-before-write); what the VM writes over is put aside first
//!                            before ---> old (in the draft; gone with it)
//!                              |  ^
//!   VM's own file <--------- disk |
//!                               access -- backup job --> new (in the draft: the snapshot's disk)
//! ```
//! The VM's disk is its own file all the time: whatever fails, here or in the daemon, costs the snapshot and no write of the VM. A filter
//! that can't put something aside breaks the snapshot (`on-cbw-error`), not the VM.

use std::ops::DerefMut;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;

use super::freeze::{device, disk_name};
use super::shelf::Draft;
use super::{Progress, SnapshotError, job};
use crate::vm::{Qmp, QmpError, VmSpec, overlay};

/// Longest time that a guest's write waits for what it writes over to be put aside; then the snapshot fails.
const ASIDE_TIMEOUT_S: u32 = 30;

/// Longest time that a disk may take to be copied.
const COPY_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// How long a job may take to end that is not wanted any more.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(60);

/// A disk that is to be copied.
#[derive(Debug)]
pub(super) struct Copied {
    /// Its number in the description.
    pub(super) disk: usize,
    device: String,
    bytes: u64,
    old: PathBuf,
}

/// Names of the nodes and the job of a disk's copy. They are the same in every save: one is made at a time, and the next one removes what
/// one that was cut off has left.
struct Names {
    disk: String,
    before: String,
    access: String,
    old: String,
    new: String,
    job: String,
}

impl Names {
    fn of(disk: usize) -> Self {
        Self {
            disk: format!("disk{disk}"),
            before: format!("save-before{disk}"),
            access: format!("save-access{disk}"),
            old: format!("save-old{disk}"),
            new: format!("save-new{disk}"),
            job: format!("save-disk{disk}"),
        }
    }
}

/// Disks that the VM writes in place.
fn in_place(spec: &VmSpec) -> impl Iterator<Item = usize> + '_ {
    let disks = spec.disks.iter().enumerate();
    disks
        .filter(|(_, disk)| !disk.read_only && !disk.snapshot)
        .map(|(number, _)| number)
}

/// Makes room in the draft for every disk that the VM writes in place. The VM knows nothing of it yet.
pub(super) fn prepare(
    qmp: &mut Qmp,
    spec: &VmSpec,
    draft: &Draft,
) -> Result<Vec<Copied>, SnapshotError> {
    let devices = qmp.query("query-block")?;
    let mut copies = Vec::new();
    for disk in in_place(spec) {
        let names = Names::of(disk);
        let device = device(&devices, disk)
            .filter(|device| device["inserted"]["node-name"] == *names.disk)
            .ok_or_else(|| SnapshotError::Qemu(format!("QEMU doesn't tell of disk {disk}")))?;
        let copy = Copied {
            disk,
            device: device["qdev"].as_str().unwrap_or_default().to_owned(),
            bytes: device["inserted"]["image"]["virtual-size"]
                .as_u64()
                .unwrap_or(0),
            old: draft.path().join(format!("old{disk}.qcow2")),
        };
        let new = draft.path().join(disk_name(disk));
        for (node, file) in [(&names.old, &copy.old), (&names.new, &new)] {
            let failed = |source| SnapshotError::Files {
                path: file.clone(),
                source,
            };
            overlay::create_empty(file, copy.bytes).map_err(failed)?;
            qmp.execute(
                "blockdev-add",
                json!({
                    "driver": "qcow2", "node-name": node, "discard": "unmap",
                    "file": { "driver": "file", "filename": file, "discard": "unmap" },
                }),
            )?;
        }
        copies.push(copy);
    }
    Ok(copies)
}

/// From now on what the VM writes over is put aside. The VM stands still.
pub(super) fn begin(qmp: &mut Qmp, copies: &[Copied]) -> Result<(), SnapshotError> {
    for copy in copies {
        let names = Names::of(copy.disk);
        qmp.execute(
            "blockdev-add",
            json!({
                "driver": "copy-before-write", "node-name": names.before, "file": names.disk, "target": names.old,
                "on-cbw-error": "break-snapshot", "cbw-timeout": ASIDE_TIMEOUT_S,
            }),
        )?;
        set_drive(qmp, &copy.device, &names.before)?;
    }
    Ok(())
}

/// Copies the disks as they were, while the VM runs, and lets go of them.
pub(super) fn finish<M: DerefMut<Target = Qmp>>(
    monitor: &impl Fn() -> M,
    copies: &[Copied],
    spec: &VmSpec,
    progress: &Progress,
) -> Result<(), SnapshotError> {
    let bytes = copies.iter().map(|copy| copy.bytes).sum();
    progress.begin("disks copied", bytes);
    for copy in copies {
        let names = Names::of(copy.disk);
        monitor().execute(
            "blockdev-add",
            json!({ "driver": "snapshot-access", "node-name": names.access, "file": names.before }),
        )?;
        monitor().execute(
            "blockdev-backup",
            json!({
                "job-id": names.job, "device": names.access, "target": names.new, "sync": "full", "auto-dismiss": false,
            }),
        )?;
        job::finish(monitor, &names.job, COPY_TIMEOUT, Some(progress)).map_err(|why| {
            SnapshotError::Impossible(format!(
                "disk {} can't be copied ({why}); is there room for it among the snapshots?",
                copy.disk
            ))
        })?;
    }
    remove(monitor, spec)?;
    for copy in copies {
        std::fs::remove_file(&copy.old).map_err(|source| SnapshotError::Files {
            path: copy.old.clone(),
            source,
        })?;
    }
    Ok(())
}

/// Lets go of the VM's disks, whatever was begun with them, by this daemon or by one that was killed.
pub(super) fn remove<M: DerefMut<Target = Qmp>>(
    monitor: &impl Fn() -> M,
    spec: &VmSpec,
) -> Result<(), SnapshotError> {
    for disk in in_place(spec) {
        let names = Names::of(disk);
        cancel(monitor, &names.job).map_err(SnapshotError::Qemu)?;
        let mut qmp = monitor();
        delete(&mut qmp, &names.access)?;
        let devices = qmp.query("query-block")?;
        if let Some(device) = device(&devices, disk) {
            if device["inserted"]["node-name"] == *names.before {
                let path = device["qdev"].as_str().unwrap_or_default();
                set_drive(&mut qmp, path, &names.disk)?;
            }
        }
        for node in [&names.before, &names.old, &names.new] {
            delete(&mut qmp, node)?;
        }
    }
    Ok(())
}

fn cancel<M: DerefMut<Target = Qmp>>(monitor: &impl Fn() -> M, id: &str) -> Result<(), String> {
    let Some(job) = job::find(monitor, id)? else {
        return Ok(());
    };
    if job["status"] != "concluded" {
        // Refused if it has ended meanwhile.
        let _ = monitor().execute("job-cancel", json!({ "id": id }));
    }
    // That it was cancelled is no failure.
    let _ = job::finish(monitor, id, CANCEL_TIMEOUT, None);
    Ok(())
}

/// Has QEMU let go of a node, if there is one of this name.
fn delete(qmp: &mut Qmp, node: &str) -> Result<(), SnapshotError> {
    match qmp.execute("blockdev-del", json!({ "node-name": node })) {
        Ok(_) => Ok(()),
        Err(QmpError::Refused { description, .. }) if description.contains("find") => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn set_drive(qmp: &mut Qmp, device: &str, node: &str) -> Result<(), SnapshotError> {
    let set = json!({ "path": device, "property": "drive", "value": node });
    Ok(qmp.execute("qom-set", set).map(drop)?)
}

//! Copies disks that a VM writes in place (without an overlay) into the snapshot, as they were at
//! the snapshot's instant, while the VM continues to write.
//!
//! ```text
//!                            device
//!                              |            before: a filter (copy-before-write); what the VM writes over is put aside first
//!                            before ---> old (in the draft; gone with it)
//!                              |  ^
//!   VM's own file <--------- disk |
//!                               access -- backup job --> new (in the draft: the snapshot's disk)
//! ```
//! The VM's disk remains its own file throughout. A failure here or in the daemon loses the
//! snapshot but no write of the VM. If the filter cannot save old data, the snapshot breaks
//! (`on-cbw-error`), not the VM.

use std::fs::File;
use std::ops::DerefMut;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use memfold_host::helper;
use memfold_host::progress::Progress;
use memfold_units::ByteSize;
use memfold_vm::{Qmp, VmSpec, overlay};
use rustix::fs::OFlags;
use serde_json::json;

use super::block_job;
use super::disk_chain::{delete_node, device};
use super::draft::Draft;
use super::error::{SnapshotError, failed};
use super::manifest::disk_name;

/// Longest time that a guest's write waits until the old data is saved; then the snapshot fails.
const ASIDE_TIMEOUT_S: u32 = 30;

/// Longest time that `qemu-img` may take to check a copy.
const CHECK_LIMIT: Duration = Duration::from_secs(3600);

/// Longest time that a disk may take to be copied.
const COPY_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// Free space that copies leave on the snapshots' file system, in bytes; on a small file system, a
/// twentieth of it.
const MOST_RESERVE: u64 = 1 << 30;

/// Longest time that a cancelled job may take to end.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(60);

/// A disk to be copied.
#[derive(Debug)]
pub(super) struct Copied {
    /// Number of the disk in the description.
    pub(super) disk: usize,
    device: String,
    bytes: u64,
    old: PathBuf,
}

/// Names of the nodes and the job of a disk's copy. They are the same in every save: only one save
/// runs at a time, and the next removes the remains of an interrupted one.
struct Names {
    disk: String,
    before: String,
    access: String,
    old: String,
    new: String,
    job: String,
}

impl Names {
    fn of(spec: &VmSpec, disk: usize) -> Self {
        Self {
            disk: spec.disk_node(disk),
            before: format!("save-before{disk}"),
            access: format!("save-access{disk}"),
            old: format!("save-old{disk}"),
            new: format!("save-new{disk}"),
            job: format!("save-disk{disk}"),
        }
    }
}

/// Returns the disks that the VM writes in place; for a VM that memfold did not start, also those
/// that it only reads.
fn in_place(spec: &VmSpec) -> impl Iterator<Item = usize> + '_ {
    let disks = spec.disks.iter().enumerate();
    disks
        .filter(|(_, disk)| !disk.snapshot && (!disk.read_only || spec.foreign.is_some()))
        .map(|(number, _)| number)
}

/// Creates files in the draft for every disk that the VM writes in place. The VM is not affected
/// yet.
pub(super) fn prepare(
    qmp: &mut Qmp,
    spec: &VmSpec,
    draft: &Draft,
) -> Result<Vec<Copied>, SnapshotError> {
    let devices = qmp.query("query-block")?;
    let held = |disk| {
        let device = device(&devices, spec, disk)?;
        // What it is built on is copied with it.
        let image = &device["inserted"]["image"];
        let chain = std::iter::successors(Some(image), |image| image.get("backing-image"));
        Some(
            chain
                .filter_map(|image| image["actual-size"].as_u64())
                .sum::<u64>(),
        )
    };
    let bytes = in_place(spec).filter_map(held).sum();
    if in_place(spec).next().is_some() {
        enough_room(draft.path(), bytes).map_err(|why| {
            SnapshotError::Impossible(format!(
                "cannot copy the disks that the VM writes in place ({why}); free space in the directory of snapshots"
            ))
        })?;
    }
    let mut copies = Vec::new();
    for disk in in_place(spec) {
        let names = Names::of(spec, disk);
        let device = device(&devices, spec, disk)
            .filter(|device| device["inserted"]["node-name"] == *names.disk)
            .ok_or_else(|| SnapshotError::Qemu(format!("QEMU does not report disk {disk}")))?;
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
            let failed = failed(file);
            overlay::create_empty(file, copy.bytes).map_err(failed)?;
            // Nothing waits for these on a disk: QEMU would stand still for it, and guests' writes.
            // The snapshot's files are synced at its end.
            let cache = json!({ "direct": false, "no-flush": true });
            // By descriptor: a QEMU that has given its rights up can't reach the draft.
            let open = File::options().read(true).write(true).open(file);
            let place = qmp.lend(open.map_err(failed)?.as_fd())?;
            let added = qmp.execute_on_disks(
                "blockdev-add",
                json!({
                    "driver": "qcow2", "node-name": node, "discard": "unmap", "cache": cache,
                    // The filter doesn't tell where a disk over another file is empty.
                    "detect-zeroes": "unmap",
                    "file": { "driver": "file", "filename": place.path(), "discard": "unmap", "cache": cache },
                }),
            );
            // It has a copy of its own for as long as the node is there.
            qmp.take_back(&place)?;
            added?;
        }
        // What the host has not written yet, QEMU would wait for in the pause.
        // Its name may be another's word: nobody waits for what is no file.
        let nonblock = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
        let path = &spec.disks[disk].path;
        if let Ok(file) = File::options().read(true).custom_flags(nonblock).open(path) {
            let _ = file.sync_data();
        }
        copies.push(copy);
    }
    Ok(copies)
}

fn written<'a>(spec: &'a VmSpec, copies: &'a [Copied]) -> impl Iterator<Item = &'a Copied> {
    copies
        .iter()
        .filter(|copy| !spec.disks[copy.disk].read_only)
}

/// Inserts the filters, which save old data before the VM overwrites it. The VM must be stopped.
pub(super) fn begin(qmp: &mut Qmp, spec: &VmSpec, copies: &[Copied]) -> Result<(), SnapshotError> {
    for copy in written(spec, copies) {
        let names = Names::of(spec, copy.disk);
        qmp.execute_on_disks(
            "blockdev-add",
            json!({
                "driver": "copy-before-write", "node-name": names.before, "file": names.disk, "target": names.old,
                "on-cbw-error": "break-snapshot", "cbw-timeout": ASIDE_TIMEOUT_S, "discard": "unmap",
            }),
        )?;
        set_drive(qmp, &copy.device, &names.before)?;
    }
    Ok(())
}

/// Copies the disks as of the snapshot's instant while the VM runs, and removes the filters.
/// Returns how long that took.
pub(super) fn finish<M: DerefMut<Target = Qmp>>(
    monitor: &impl Fn() -> M,
    copies: &[Copied],
    spec: &VmSpec,
    draft: &Draft,
    progress: &Progress,
) -> Result<Duration, SnapshotError> {
    let began = Instant::now();
    let bytes = copies.iter().map(|copy| copy.bytes).sum();
    progress.begin("disks copied", bytes);
    for copy in copies {
        let names = Names::of(spec, copy.disk);
        // What nobody writes is copied as it is.
        let mut job = json!({
            "job-id": names.job, "device": names.disk, "target": names.new, "sync": "full", "auto-dismiss": false,
        });
        if !spec.disks[copy.disk].read_only {
            monitor().execute_on_disks(
                "blockdev-add",
                json!({ "driver": "snapshot-access", "node-name": names.access, "file": names.before, "discard": "unmap" }),
            )?;
            job["device"] = names.access.into();
            // What is copied needs not be put aside any more.
            job["discard-source"] = true.into();
        }
        monitor().execute_on_disks("blockdev-backup", job)?;
    }
    // All of them go on side by side: what is put aside for a disk grows until it is copied.
    for copy in copies {
        let names = Names::of(spec, copy.disk);
        let enough = || enough_room(draft.path(), 0);
        block_job::finish(monitor, &names.job, COPY_TIMEOUT, Some(progress), enough)
            .map_err(|why| SnapshotError::Impossible(words(copy.disk, &why)))?;
    }
    remove(monitor, spec)?;
    for copy in copies {
        check(copy.disk, &draft.path().join(disk_name(copy.disk)))?;
        std::fs::remove_file(&copy.old).map_err(failed(&copy.old))?;
    }
    Ok(began.elapsed())
}

/// Returns the error message of a disk that was not copied.
fn words(disk: usize, why: &str) -> String {
    let cause = if why.contains("Permission denied") {
        // What QEMU says of a filter that has given up.
        "copy-before-write of the VM's disk failed or took longer than 30 s; check free space and speed of the disk of snapshots"
    } else if why.contains("No space left") {
        "no space left in the directory of snapshots"
    } else {
        "the VM continues without the copy job"
    };
    format!("cannot copy disk {disk} ({why}): {cause}")
}

/// Checks that the file system of `place` has space for `bytes` bytes and a reserve. A disk of the
/// VM may be on the same file system, and QEMU stops a VM whose disk is full.
fn enough_room(place: &Path, bytes: u64) -> Result<(), String> {
    let room = rustix::fs::statvfs(place).map_err(|error| error.to_string())?;
    let reserve = MOST_RESERVE.min(room.f_blocks * room.f_frsize / 20);
    let free = room.f_bavail * room.f_frsize;
    if free < bytes + reserve {
        return Err(format!(
            "No space left: {} free, {} needed, {} must stay free",
            ByteSize(free),
            ByteSize(bytes),
            ByteSize(reserve)
        ));
    }
    Ok(())
}

/// Checks that a copy is complete, because QEMU does not report errors of closing it.
fn check(disk: usize, copy: &Path) -> Result<(), SnapshotError> {
    let mut command = Command::new("qemu-img");
    command.args(["check", "-q", "-f", "qcow2"]).arg(copy);
    let output = helper::output(command.stdin(Stdio::null()), CHECK_LIMIT).map_err(failed(copy))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(SnapshotError::Impossible(words(disk, said.trim())))
}

/// Removes filters and jobs from the VM's disks, whether this daemon or a killed one added them.
pub(super) fn remove<M: DerefMut<Target = Qmp>>(
    monitor: &impl Fn() -> M,
    spec: &VmSpec,
) -> Result<(), SnapshotError> {
    // One that can't be let go of is no reason to keep the others.
    let all = in_place(spec).map(|disk| remove_one(monitor, spec, disk));
    all.fold(Ok(()), Result::and)
}

fn remove_one<M: DerefMut<Target = Qmp>>(
    monitor: &impl Fn() -> M,
    spec: &VmSpec,
    disk: usize,
) -> Result<(), SnapshotError> {
    let names = Names::of(spec, disk);
    cancel(monitor, &names.job).map_err(SnapshotError::Qemu)?;
    let mut qmp = monitor();
    delete_node(&mut qmp, &names.access)?;
    let devices = qmp.query("query-block")?;
    if let Some(device) = device(&devices, spec, disk) {
        if device["inserted"]["node-name"] == *names.before {
            let path = device["qdev"].as_str().unwrap_or_default();
            set_drive(&mut qmp, path, &names.disk)?;
        }
    }
    for node in [&names.before, &names.old, &names.new] {
        delete_node(&mut qmp, node)?;
    }
    Ok(())
}

fn cancel<M: DerefMut<Target = Qmp>>(monitor: &impl Fn() -> M, id: &str) -> Result<(), String> {
    let Some(job) = block_job::find(monitor, id)? else {
        return Ok(());
    };
    if job["status"] != "concluded" {
        // Refused if it has ended meanwhile.
        let _ = monitor().execute("job-cancel", json!({ "id": id }));
    }
    // That it was cancelled is no failure.
    let _ = block_job::finish(monitor, id, CANCEL_TIMEOUT, None, || Ok(()));
    Ok(())
}

fn set_drive(qmp: &mut Qmp, device: &str, node: &str) -> Result<(), SnapshotError> {
    let set = json!({ "path": device, "property": "drive", "value": node });
    Ok(qmp.execute("qom-set", set).map(drop)?)
}

//! Copies disks that a VM writes in place (without an overlay) into the draft, the directory of the
//! snapshot that is being saved. The copies have the contents of the snapshot's instant, although
//! the VM continues to write.
//!
//! ```text
//!                            device
//!                              |            before: a filter (copy-before-write), which saves old data before the VM overwrites them
//!                            before ---> old (in the draft; removed after the copy)
//!                              |  ^
//!   VM's own file <--------- disk |
//!                               access -- backup job --> new (in the draft: the snapshot's disk)
//! ```
//! The drawing shows QEMU's block nodes while a disk is copied. The filter `before` saves old data
//! into `old` before the VM overwrites them in `disk`. The node `access` shows the disk as of the
//! snapshot's instant, and the backup job copies this content to `new`.
//!
//! The VM always writes to its own file. If the copy or the daemon fails, the snapshot is lost, but
//! no write of the VM. If the filter cannot save old data, the snapshot fails (`on-cbw-error`), and
//! the VM goes on.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use memfold_host::progress::Progress;
use memfold_vm::{Qmp, VmSpec, overlay};
use rustix::fs::OFlags;
use serde_json::json;

use super::block_job::{self, Monitor};
use super::disk_chain::{delete_node, device, images};
use super::draft::Draft;
use super::error::{SnapshotError, failed};
use super::manifest::disk_name;
use super::own_overlay;
use super::rebase::damage;
use super::room::enough_room;

/// Longest time in seconds that a guest's write waits until the old data are saved. After that
/// time, the snapshot fails.
const ASIDE_TIMEOUT_S: u32 = 30;

/// Time limit for the copy of one disk.
const COPY_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// Time limit for a cancelled job to end.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(60);

/// A disk that will be copied.
#[derive(Debug)]
pub(super) struct Copied {
    /// Number of the disk in the description.
    pub(super) disk: usize,
    device: String,
    bytes: u64,
    old: PathBuf,
}

/// Returns the name of a node or of the job for the copy of a disk: of the filter (`before`), of
/// the node for reading (`access`), of the files (`old`, `new`), or of the job (`disk`). The names
/// are the same for every save, because only one save runs at a time, and the next save removes
/// remains of an interrupted one.
fn name(part: &str, disk: usize) -> String {
    format!("save-{part}{disk}")
}

/// Returns the disks that the VM writes in place. For a VM that memfold did not start, returns the
/// disks that the VM only reads, too.
fn in_place(spec: &VmSpec) -> impl Iterator<Item = usize> + '_ {
    let disks = spec.disks.iter().enumerate();
    disks
        .filter(|(_, disk)| !disk.snapshot && (!disk.read_only || spec.foreign.is_some()))
        .map(|(number, _)| number)
}

/// Creates the files of the copies in the draft, and QEMU's nodes for them. The VM's disks do not
/// change yet.
pub(super) fn prepare(
    qmp: &mut Qmp,
    spec: &VmSpec,
    draft: &Draft,
) -> Result<Vec<Copied>, SnapshotError> {
    let devices = qmp.query("query-block")?;
    let held = |disk| {
        let device = device(&devices, spec, disk)?;
        // The copy also contains the data of the disk's backing files.
        let sizes = images(device).filter_map(|image| image["actual-size"].as_u64());
        Some(sizes.sum::<u64>())
    };
    let bytes = in_place(spec).filter_map(held).sum();
    if in_place(spec).next().is_some() {
        enough_room(&draft.path, bytes).map_err(|why| {
            SnapshotError::Impossible(format!(
                "cannot copy the disks that the VM writes in place ({why}); free space in the directory of snapshots"
            ))
        })?;
    }
    let mut copies = Vec::new();
    for disk in in_place(spec) {
        let device = device(&devices, spec, disk)
            .filter(|device| device["inserted"]["node-name"] == *spec.disk_node(disk))
            .ok_or_else(|| SnapshotError::Qemu(format!("QEMU does not report disk {disk}")))?;
        let bytes = device["inserted"]["image"]["virtual-size"].as_u64();
        let copy = Copied {
            disk,
            device: device["qdev"].as_str().unwrap_or_default().to_owned(),
            bytes: bytes.unwrap_or(0),
            old: draft.path.join(format!("old{disk}.qcow2")),
        };
        let new = draft.path.join(disk_name(disk));
        for (part, file) in [("old", &copy.old), ("new", &new)] {
            let failed = failed(file);
            overlay::create_empty(file, copy.bytes).map_err(failed)?;
            // The copies use the page cache without flushes: otherwise QEMU would wait for the
            // disk, and so would guests' writes. All files of a snapshot are synced at its end.
            let cache = json!({ "direct": false, "no-flush": true });
            // QEMU gets a descriptor, because a QEMU that has dropped its privileges cannot open
            // the draft.
            let open = File::options().read(true).write(true).open(file);
            let place = qmp.lend(open.map_err(failed)?.as_fd())?;
            let added = qmp.execute_on_disks(
                "blockdev-add",
                json!({
                    "driver": "qcow2", "node-name": name(part, disk), "discard": "unmap", "cache": cache,
                    // The filter does not report which parts of a disk over a backing file are
                    // empty.
                    "detect-zeroes": "unmap",
                    "file": { "driver": "file", "filename": place.path(), "discard": "unmap", "cache": cache },
                }),
            );
            // QEMU keeps a descriptor of its own as long as the node exists.
            qmp.take_back(&place)?;
            added?;
        }
        // Data that the host has not written to the disk yet are written now, because QEMU would
        // wait for them during the pause. The path may lead to another kind of file, which must not
        // block the opening.
        let nonblock = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
        let path = &spec.disks[disk].path;
        if let Ok(file) = File::options().read(true).custom_flags(nonblock).open(path) {
            let _ = file.sync_data();
        }
        copies.push(copy);
    }
    Ok(copies)
}

/// Inserts the filters, which save old data before the VM overwrites them. The VM must be stopped.
pub(super) fn begin(qmp: &mut Qmp, spec: &VmSpec, copies: &[Copied]) -> Result<(), SnapshotError> {
    let is_written = |copy: &&Copied| !spec.disks[copy.disk].read_only;
    for Copied { disk, device, .. } in copies.iter().filter(is_written) {
        let (before, old) = (name("before", *disk), name("old", *disk));
        qmp.execute_on_disks(
            "blockdev-add",
            json!({
                "driver": "copy-before-write", "node-name": before, "file": spec.disk_node(*disk), "target": old,
                "on-cbw-error": "break-snapshot", "cbw-timeout": ASIDE_TIMEOUT_S, "discard": "unmap",
            }),
        )?;
        set_drive(qmp, device, &before)?;
    }
    Ok(())
}

/// Copies the disks as of the snapshot's instant while the VM runs, and removes the filters.
/// Returns how long the copying took.
pub(super) fn finish(
    monitor: &impl Monitor,
    copies: &[Copied],
    spec: &VmSpec,
    draft: &Draft,
    progress: &Progress,
) -> Result<Duration, SnapshotError> {
    let began = Instant::now();
    progress.begin("disks copied", copies.iter().map(|copy| copy.bytes).sum());
    for &Copied { disk, .. } in copies {
        // A disk that nobody writes is copied directly.
        let mut job = json!({
            "job-id": name("disk", disk), "device": spec.disk_node(disk), "target": name("new", disk), "sync": "full", "auto-dismiss": false,
        });
        if !spec.disks[disk].read_only {
            let access = name("access", disk);
            monitor.qmp().execute_on_disks(
                "blockdev-add",
                json!({ "driver": "snapshot-access", "node-name": access, "file": name("before", disk), "discard": "unmap" }),
            )?;
            job["device"] = access.into();
            // Saved old data that were copied are no longer needed.
            job["discard-source"] = true.into();
        }
        monitor.qmp().execute_on_disks("blockdev-backup", job)?;
    }
    // All copy jobs run in parallel, because the saved old data of a disk grow until the disk is
    // copied.
    for &Copied { disk, .. } in copies {
        let (job, enough) = (name("disk", disk), || enough_room(&draft.path, 0));
        block_job::finish(monitor, &job, COPY_TIMEOUT, progress, enough)
            .map_err(|why| SnapshotError::Impossible(words(disk, &why)))?;
    }
    remove(monitor, spec)?;
    for copy in copies {
        let new = draft.path.join(disk_name(copy.disk));
        if !spec.keeps_rights() {
            own_overlay::take_from_writers(&new).map_err(failed(&new))?;
        }
        // QEMU does not report errors from closing the file.
        if let Some(why) = damage(&new)? {
            return Err(SnapshotError::Impossible(words(copy.disk, &why)));
        }
        std::fs::remove_file(&copy.old).map_err(failed(&copy.old))?;
    }
    Ok(began.elapsed())
}

/// Returns the error message of a disk that was not copied.
fn words(disk: usize, why: &str) -> String {
    let cause = if why.contains("Permission denied") {
        // QEMU reports this error if a filter could not save old data.
        "copy-before-write of the VM's disk failed or took longer than 30 s; check free space and speed of the disk of snapshots"
    } else if why.contains("No space left") {
        "no space left in the directory of snapshots"
    } else {
        "the VM continues without the copy job"
    };
    format!("cannot copy disk {disk} ({why}): {cause}")
}

/// Removes filters and copy jobs from the VM's disks, whether this daemon or a killed one added
/// them.
pub(super) fn remove(monitor: &impl Monitor, spec: &VmSpec) -> Result<(), SnapshotError> {
    // The other disks' filters are removed, too, if one cannot be removed.
    let all = in_place(spec).map(|disk| remove_one(monitor, spec, disk));
    all.fold(Ok(()), Result::and)
}

fn remove_one(monitor: &impl Monitor, spec: &VmSpec, disk: usize) -> Result<(), SnapshotError> {
    cancel(monitor, &name("disk", disk)).map_err(SnapshotError::Qemu)?;
    let mut qmp = monitor.qmp();
    delete_node(&mut qmp, &name("access", disk))?;
    let devices = qmp.query("query-block")?;
    let device = device(&devices, spec, disk);
    let filtered = device.filter(|of| of["inserted"]["node-name"] == name("before", disk));
    if let Some(device) = filtered {
        let path = device["qdev"].as_str().unwrap_or_default();
        set_drive(&mut qmp, path, &spec.disk_node(disk))?;
    }
    for part in ["before", "old", "new"] {
        delete_node(&mut qmp, &name(part, disk))?;
    }
    Ok(())
}

fn cancel(monitor: &impl Monitor, id: &str) -> Result<(), String> {
    let Some(job) = block_job::find(monitor, id)? else {
        return Ok(());
    };
    if job["status"] != "concluded" {
        // QEMU refuses the command if the job has ended meanwhile.
        let _ = monitor.qmp().execute("job-cancel", json!({ "id": id }));
    }
    // The job's result is an error because it was cancelled.
    let unseen = Progress::default();
    let _ = block_job::finish(monitor, id, CANCEL_TIMEOUT, &unseen, || Ok(()));
    Ok(())
}

fn set_drive(qmp: &mut Qmp, device: &str, node: &str) -> Result<(), SnapshotError> {
    let set = json!({ "path": device, "property": "drive", "value": node });
    Ok(qmp.execute("qom-set", set).map(drop)?)
}

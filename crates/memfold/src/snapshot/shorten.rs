//! Chains of overlays that are longer than the VM needs, or that nobody could open again, are made short while it runs.
//!
//! A save that fails behind its switch of disks, or whose daemon was killed there, leaves the VM writing to a newer overlay than it needs. The
//! VM goes back to the older one:
//!
//! ```text
//!   base <-- older (frozen) <-- newer (the VM writes)
//!   base <-- older (the VM writes)                      what the newer one held was written to the older one (block-commit)
//! ```
//! The older one may be a snapshot's by then: it has a second name, and stays as it is.
//!
//! When that snapshot is removed, only this QEMU has its disk, and a snapshot over it could be restored by nobody. The VM gets what it held:
//!
//! ```text
//!   base <-- older (removed) <-- newer (the VM writes)
//!   base <-- newer (the VM writes)                      what the older one held was written to the newer one (block-stream)
//! ```

use std::collections::HashSet;
use std::fs;
use std::ops::DerefMut;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Pid;
use serde_json::{Value, json};

use super::freeze::{self, Below, active, age, header, open_files};
use super::{SnapshotError, job};
use crate::vm::{Qmp, VmSpec};

/// Most files of a chain that are looked at.
const MOST_OVERLAYS: usize = 200;

/// How long QEMU may write what an overlay holds.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Has QEMU write to the older of `overlays` again, which are all temporary ones of the VM, and removes the newer.
pub(super) fn shorten<M: DerefMut<Target = Qmp>>(
    monitor: &impl Fn() -> M,
    spec: &VmSpec,
    overlays: &[PathBuf],
) -> Result<(), SnapshotError> {
    for (disk, _) in spec.disks.iter().enumerate().filter(|(_, d)| d.snapshot) {
        loop {
            let (top, file, below) = {
                let mut qmp = monitor();
                let devices = qmp.query("query-block")?;
                let nodes = nodes(&mut qmp)?;
                let Some(active) = active(&devices, &nodes, disk) else {
                    break;
                };
                (active.node, active.file, active.below)
            };
            let Some(below) = below.filter(|b| overlays.contains(&b.file) && has_one_name(&b.file))
            else {
                break;
            };
            commit(monitor, disk, &top, &below).map_err(|why| {
                SnapshotError::Impossible(format!(
                    "disk {disk} has an overlay more than it needs, of a save that failed, and QEMU doesn't merge it with the older one: {why}"
                ))
            })?;
            monitor().execute("blockdev-del", json!({ "node-name": top }))?;
            tracing::info!(overlay = %file.display(), "merged with the older one");
            // It goes with the VM otherwise.
            let _ = fs::remove_file(&file);
        }
    }
    Ok(())
}

/// Has what removed snapshots hold of the VM's disks written to the overlays that it writes, which are over the disks' own files then.
pub(super) fn pull<M: DerefMut<Target = Qmp>>(
    monitor: &impl Fn() -> M,
    pid: Pid,
    spec: &VmSpec,
) -> Result<(), SnapshotError> {
    let open = open_files(pid)?;
    for (disk, own) in spec.disks.iter().enumerate().filter(|(_, d)| d.snapshot) {
        let top = {
            let mut qmp = monitor();
            let devices = qmp.query("query-block")?;
            active(&devices, &nodes(&mut qmp)?, disk)
        };
        let Some(top) = top.filter(|top| top.below.is_some() && is_cut(&top.file, &open)) else {
            continue;
        };
        let id = format!("memfold-pull{disk}");
        let orders = json!({
            "job-id": id, "device": top.node, "base-node": format!("base{disk}"), "backing-file": own.path, "auto-dismiss": false,
        });
        work(monitor, &id, "block-stream", &orders).map_err(|why| {
            SnapshotError::Impossible(format!(
                "disk {disk} builds on a snapshot that was removed, and QEMU doesn't copy what that held: {why}"
            ))
        })?;
        tracing::info!(overlay = %top.file.display(), "has what removed snapshots held of its disk");
        forget_older(&mut monitor(), disk, &top.node)?;
    }
    Ok(())
}

/// Whether a file that an overlay is built on, by its header and those below, is none that QEMU has open.
fn is_cut(overlay: &Path, open: &HashSet<(u64, u64)>) -> bool {
    let mut file = overlay.to_owned();
    // Only what QEMU itself has open is looked into: headers are QEMU's to write.
    for _ in 0..MOST_OVERLAYS {
        let Ok(image) = header(&file) else {
            return false;
        };
        let Some(backing) = image["backing-filename"].as_str() else {
            return false;
        };
        let backing = PathBuf::from(backing);
        if !fs::metadata(&backing).is_ok_and(|facts| open.contains(&(facts.dev(), facts.ino()))) {
            return true;
        }
        if image["backing-filename-format"] != "qcow2" {
            return false;
        }
        file = backing;
    }
    false
}

/// Has QEMU close what was below; a removed file's bytes are free then. What it doesn't let go of costs no more than room.
fn forget_older(qmp: &mut Qmp, disk: usize, top: &str) -> Result<(), SnapshotError> {
    let all = nodes(qmp)?;
    let names = all.as_array().into_iter().flatten();
    let names = names.filter_map(|node| node["node-name"].as_str());
    let mut older: Vec<(u64, &str)> = names
        .filter_map(|name| Some((age(disk, name)?, name)))
        .filter(|(time, _)| age(disk, top).is_some_and(|own| *time < own))
        .collect();
    older.sort_unstable();
    // The first one's file is a node that was named for itself.
    let first = freeze::first_file_node(disk);
    let names = older.iter().rev().map(|(_, name)| *name);
    for name in names.chain([first.as_str()]) {
        if let Err(error) = qmp.execute("blockdev-del", json!({ "node-name": name })) {
            tracing::debug!(node = name, %error, "is kept");
        }
    }
    Ok(())
}

fn nodes(qmp: &mut Qmp) -> Result<Value, SnapshotError> {
    Ok(qmp.execute("query-named-block-nodes", json!({ "flat": true }))?)
}

/// Whether a file is nobody else's.
fn has_one_name(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|facts| facts.nlink() == 1)
}

/// Writes what `top` holds to the overlay below it, and has the VM write there.
fn commit<M: DerefMut<Target = Qmp>>(
    monitor: &impl Fn() -> M,
    disk: usize,
    top: &str,
    below: &Below,
) -> Result<(), String> {
    let id = format!("memfold-disk{disk}");
    let orders =
        json!({ "job-id": id, "device": top, "base-node": below.node, "auto-dismiss": false });
    work(monitor, &id, "block-commit", &orders)
}

/// Has QEMU do a job, and waits for its end.
fn work<M: DerefMut<Target = Qmp>>(
    monitor: &impl Fn() -> M,
    id: &str,
    command: &str,
    orders: &Value,
) -> Result<(), String> {
    let mut begun = job::find(monitor, id)?;
    if begun
        .as_ref()
        .is_some_and(|job| job["status"] == "concluded")
    {
        // Nobody has looked at it, and it says nothing of now.
        job::dismiss(monitor, id)?;
        begun = None;
    }
    // One that an earlier daemon began goes on.
    if begun.is_none() {
        let done = monitor().execute(command, orders.clone());
        done.map_err(|error| error.to_string())?;
    }
    job::finish(monitor, id, TIMEOUT, None, || Ok(()))
}

//! Who uses a snapshot: VMs that run from its memory, and disks that are built on its disks.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use memfold_store::{StoreIdentity, mapped};
use memfold_vm::VmSpec;
use rustix::process::Pid;

use super::disk_chain::chain;
use super::error::{SnapshotError, failed};
use super::manifest::{RAM, SavedDisk};
use super::shelf::Shelf;

/// The snapshots that a VM's disks are built on.
#[must_use]
pub fn below(shelf: &Shelf, spec: &VmSpec) -> Vec<String> {
    let files: Vec<PathBuf> = spec
        .disks
        .iter()
        .filter_map(|disk| chain(&disk.path).ok())
        .flatten()
        .collect();
    let mut names = shelf.names().unwrap_or_default();
    names.retain(|name| {
        shelf
            .path(name)
            .is_ok_and(|place| files.iter().any(|file| file.starts_with(&place)))
    });
    names
}

/// Other snapshots whose disks are built on those of this one.
pub fn built_on(shelf: &Shelf, name: &str) -> Result<Vec<String>, SnapshotError> {
    let place = shelf.path(name)?;
    let mut found = Vec::new();
    for other in shelf.names().unwrap_or_default() {
        // One that is broken builds on nothing that could be used.
        let Ok(manifest) = shelf.manifest(&other) else {
            continue;
        };
        let own = shelf.path(&other)?;
        let builds = |disk: &SavedDisk| {
            !disk.read_only
                && chain(&own.join(&disk.path))
                    .is_ok_and(|files| files.iter().any(|file| file.starts_with(&place)))
        };
        if other != name && manifest.disks.iter().any(builds) {
            found.push(other);
        }
    }
    Ok(found)
}

/// Processes that map the RAM image of a snapshot, or what was laid out of it.
pub fn users(shelf: &Shelf, name: &str) -> Result<Vec<Pid>, SnapshotError> {
    let found = users_of_each(&[in_maps(shelf, name)?])?;
    Ok(found.into_iter().flatten().collect())
}

/// The same of each of several snapshots, given as [`in_maps`] names them.
pub fn users_of_each(snapshots: &[Vec<String>]) -> Result<Vec<Vec<Pid>>, SnapshotError> {
    mapped::processes_with(snapshots).map_err(failed("/proc"))
}

/// How lines of `/proc/PID/maps` name the RAM image of a snapshot and what was laid out of it.
pub fn in_maps(shelf: &Shelf, name: &str) -> Result<Vec<String>, SnapshotError> {
    let path = shelf.path(name)?.join(RAM);
    let mut texts = Vec::new();
    match fs::metadata(&path) {
        Ok(facts) => texts.push(mapped::identity_text(StoreIdentity {
            dev: facts.dev(),
            ino: facts.ino(),
        })),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(failed(&path)(error)),
    }
    match shelf.laid_out_name(name) {
        Ok(laid_out) => texts.push(format!("/memfd:{laid_out} ")),
        // Without its checksums nothing can be laid out of it. Who runs from what was laid out before needs none of its files but its disks.
        Err(SnapshotError::Files { source, .. }) if source.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    Ok(texts)
}

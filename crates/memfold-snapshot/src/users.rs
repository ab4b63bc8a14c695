//! Finds the users of a snapshot: VMs that run from its memory, and disks whose backing files are
//! its disks.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memfold_store::{StoreIdentity, mapped};
use memfold_vm::VmSpec;
use rustix::process::Pid;

use super::disk_chain::chain;
use super::error::{SnapshotError, failed};
use super::manifest::{RAM, SavedDisk};
use super::shelf::Shelf;

/// Returns the snapshots that a VM's disks are built on.
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

/// Returns other snapshots whose disks are built on this one's.
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

/// Returns the processes that map the RAM image of a snapshot, in its file or laid out.
pub fn users(shelf: &Shelf, name: &str) -> Result<Vec<Pid>, SnapshotError> {
    let found = users_of_each(&[in_maps(shelf, name)?])?;
    Ok(found.into_iter().flatten().collect())
}

/// Processes that hold a snapshot: its [`users`], and those whose memory is a view of one of its
/// disks, as that of VMs of snapshots that are built on it. What is written to a file would be seen
/// in such memory.
pub fn holders(shelf: &Shelf, name: &str) -> Result<Vec<Pid>, SnapshotError> {
    let mut texts = in_maps(shelf, name)?;
    // One that is broken may lack any of its files.
    let disks = shelf.manifest(name).map_or(Vec::new(), |saved| saved.disks);
    for disk in disks.iter().filter(|disk| disk.path.is_relative()) {
        let path = shelf.path(name)?.join(&disk.path);
        texts.extend(text_of(&path).map_err(failed(&path))?);
    }
    let found = users_of_each(&[texts])?;
    Ok(found.into_iter().flatten().collect())
}

/// Processes whose memory is a view of a file.
pub(super) fn mappers(file: &Path) -> Result<Vec<Pid>, SnapshotError> {
    let text = text_of(file).map_err(failed(file))?;
    let found = users_of_each(&[text.into_iter().collect()])?;
    Ok(found.into_iter().flatten().collect())
}

/// How lines of `/proc/PID/maps` name a file, if there is one.
fn text_of(path: &Path) -> io::Result<Option<String>> {
    match fs::metadata(path) {
        Ok(facts) => Ok(Some(mapped::identity_text(StoreIdentity {
            dev: facts.dev(),
            ino: facts.ino(),
        }))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// [`users`] of each of several snapshots, given as [`in_maps`] names them.
pub fn users_of_each(snapshots: &[Vec<String>]) -> Result<Vec<Vec<Pid>>, SnapshotError> {
    mapped::processes_with(snapshots).map_err(failed("/proc"))
}

/// How lines of `/proc/PID/maps` name the RAM image of a snapshot and what was laid out of it.
pub fn in_maps(shelf: &Shelf, name: &str) -> Result<Vec<String>, SnapshotError> {
    let path = shelf.path(name)?.join(RAM);
    let mut texts = Vec::from_iter(text_of(&path).map_err(failed(&path))?);
    match shelf.laid_out_name(name) {
        Ok(laid_out) => texts.push(format!("/memfd:{laid_out} ")),
        // Without its checksums nothing can be laid out of it. Who runs from what was laid out
        // before needs none of its files but its disks.
        Err(SnapshotError::Files { source, .. }) if source.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    Ok(texts)
}

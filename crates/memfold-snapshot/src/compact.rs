//! Turns a layer into a snapshot that needs no other snapshot. A layer holds only the pages and
//! disk blocks that differ from another snapshot, its parent, and refers to the parent for the
//! rest.
//!
//! ```text
//!   before   ram ##..#.....   ram.refs -> ram of a parent, disk of a parent, base image     disk0 -> disk0 of a parent -> base image
//!   after    ram ######.#..   ram.refs -> base image                                        disk0 -> base image
//! ```
//! The complete snapshot is written beside the layer, and then the two directories are exchanged in
//! one step (`RENAME_EXCHANGE`). VMs that run from the layer keep its files open. The contents of
//! memory are the same in both, and so are its checksums.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use memfold_host::helper;
use memfold_host::progress::Progress;
use memfold_units::PAGE_SIZE;

use super::disk_chain::{chain, header};
use super::draft::Draft;
use super::error::{SnapshotError, failed};
use super::file_facts::{backing_file, backing_files, facts, facts_at};
use super::image::{CHUNK_BYTES, CHUNK_PAGES, bytes, write_nonzero};
use super::manifest::{Manifest, RAM, REFERENCES, References, SUMS, SavedDisk, file_name};
use super::pipeline;
use super::refer::{self, Reference};
use super::restore;
use super::shelf::{DEVICES, Shelf};
use super::stored::Stored;
use super::working_set;

/// Time limit for `qemu-img` to copy what a disk has in other snapshots.
const REBASE_LIMIT: Duration = Duration::from_secs(3600);

/// Returns whether a snapshot needs no other snapshot.
pub fn is_complete(shelf: &Shelf, manifest: &Manifest) -> Result<bool, SnapshotError> {
    let place = shelf.path(&manifest.name)?;
    let is_of_another =
        |path: &PathBuf| path.starts_with(shelf.root()) && !path.starts_with(&place);
    Ok(manifest.parent.is_none() && !manifest.outside().iter().any(is_of_another))
}

/// Makes the snapshot complete that `manifest` describes, and returns its new manifest. Callers
/// check that no other snapshot is built on it.
///
/// # Errors
///
/// Errors as of a restore. The snapshot is then as it was.
pub fn compact(
    shelf: &Shelf,
    manifest: &Manifest,
    progress: &Progress,
) -> Result<Manifest, SnapshotError> {
    let (name, place) = (&manifest.name, shelf.path(&manifest.name)?);
    if manifest.packed.is_some() {
        return Err(SnapshotError::Impossible(format!(
            "snapshot '{name}' is compressed, and cannot be made complete; restore it, and save the VM with --whole"
        )));
    }
    // Damaged bytes, or disks that do not match the saved RAM, must not get into the new snapshot.
    restore::spec(shelf, manifest, &manifest.vm)?;
    if let Some(changed) = restore::changed_disks(shelf, manifest)?.first() {
        return Err(manifest.broken(changed.clone()));
    }
    shelf.checked_image(manifest, progress)?;
    let draft = shelf.replacement(name)?;
    let files = (0..manifest.files.len()).map(file_name);
    let whole = [SUMS, DEVICES].map(str::to_owned).into_iter();
    for part in whole.chain(files).chain([working_set::FILE.to_owned()]) {
        let (from, to) = (place.join(&part), draft.path().join(&part));
        if from.exists() {
            fs::hard_link(&from, &to).map_err(failed(&to))?;
        }
    }
    let stored = shelf.stored(manifest)?;
    let mut complete = manifest.clone();
    complete.parent = None;
    complete.references = copy_pages(shelf, manifest, &stored, &draft, progress)?;
    progress.begin("disks made complete", 0);
    for disk in &mut complete.disks {
        complete_disk(shelf, &place, &draft, disk)?;
    }
    draft.replace(&complete)?;
    shelf.forget(name);
    Ok(complete)
}

/// Returns whether a path that a manifest names leads outside the directory of all snapshots. (A
/// path without a slash is a file of the snapshot.)
fn is_outside(shelf: &Shelf, path: &Path) -> bool {
    path.is_absolute() && !path.starts_with(shelf.root())
}

/// Writes the RAM image: the layer's own pages, and those that it refers to in any snapshot.
/// Returns the references that remain.
fn copy_pages(
    shelf: &Shelf,
    manifest: &Manifest,
    stored: &Stored,
    draft: &Draft,
    progress: &Progress,
) -> Result<Option<References>, SnapshotError> {
    let failed = draft.failed(RAM);
    let ram = draft.file(RAM)?;
    ram.set_len(manifest.ram_bytes).map_err(&failed)?;
    let all: Vec<&PathBuf> = manifest
        .references
        .iter()
        .flat_map(|refs| &refs.sources)
        .collect();
    let (mut sources, mut numbers) = (Vec::new(), Vec::new());
    for path in all {
        let is_left = is_outside(shelf, path);
        numbers.push(is_left.then_some(u32::try_from(sources.len()).unwrap_or(u32::MAX)));
        sources.extend(is_left.then(|| path.clone()));
    }
    let left = stored.references.iter().filter_map(|reference| {
        let of = usize::try_from(reference.file).ok()?;
        Some(Reference {
            file: numbers.get(of).copied().flatten()?,
            ..*reference
        })
    });
    let left: Vec<Reference> = left.collect();
    progress.begin("RAM made complete", stored.bytes);
    let chunks = stored.bytes.div_ceil(CHUNK_BYTES as u64);
    pipeline::run(chunks, CHUNK_BYTES, |chunk, buffer| {
        let first = chunk * CHUNK_PAGES;
        if stored.read(first, buffer)? {
            let from = left.partition_point(|reference| reference.page < first);
            let here = left[from..].iter();
            for reference in here.take_while(|r| r.page < first + CHUNK_PAGES) {
                let at = bytes(reference.page - first);
                buffer[at..][..reference.length()].fill(0);
            }
            write_nonzero(buffer, &ram, first * PAGE_SIZE)?;
        }
        progress.add(CHUNK_BYTES as u64);
        Ok(())
    })
    .map_err(&failed)?;
    if left.is_empty() {
        return Ok(None);
    }
    let mut table = draft.file(REFERENCES)?;
    let written = table.write_all(&refer::encode(&left));
    let table = written.and_then(|()| facts(table));
    Ok(Some(References {
        table: table.map_err(draft.failed(REFERENCES))?,
        sources,
        pages: left.iter().map(|r| u64::from(r.pages)).sum(),
        parent_pages: 0,
        mappings: Some(refer::mappings(&left)),
    }))
}

/// Takes a disk into the draft. What other snapshots hold of it is copied into its own file.
fn complete_disk(
    shelf: &Shelf,
    place: &Path,
    draft: &Draft,
    disk: &mut SavedDisk,
) -> Result<(), SnapshotError> {
    if disk.file.path.is_absolute() {
        return Ok(());
    }
    let (from, to) = (
        place.join(&disk.file.path),
        draft.path().join(&disk.file.path),
    );
    let is_of_another = |path: &Path| path.starts_with(shelf.root()) && !path.starts_with(place);
    let files = chain(&from)?;
    let Some(last) = files.iter().rposition(|file| is_of_another(file)) else {
        return fs::hard_link(&from, &to).map_err(failed(&to));
    };
    // A sparse copy, which shares blocks with the original if the file system can.
    fs::copy(&from, &to).map_err(failed(&to))?;
    let base = files.get(last + 1);
    let format = header(&files[last]).map_err(failed(&files[last]))?;
    let format = format["backing-filename-format"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    rebase(&to, base.map(|base| (base.as_path(), format.as_str())))?;
    disk.file = backing_file(&to, &disk.file.path)?;
    disk.xxh3_128 = Some(facts_at(&to)?.xxh3_128);
    disk.backing = backing_files(files.into_iter().skip(last + 1))?;
    Ok(())
}

/// Gives a disk another backing file, and copies what differs into the disk.
fn rebase(disk: &Path, base: Option<(&Path, &str)>) -> Result<(), SnapshotError> {
    let mut command = Command::new("qemu-img");
    command.args(["rebase", "-f", "qcow2", "-b"]);
    match base {
        Some((path, format)) => command.arg(path).args(["-F", format]),
        None => command.arg(""),
    };
    command.arg(disk).stdin(Stdio::null());
    let output = helper::output(&mut command, REBASE_LIMIT).map_err(failed(disk))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(SnapshotError::Qemu(format!("qemu-img: {}", words.trim())))
}

//! Turns a layer into a snapshot that needs no other snapshot. A layer holds only the pages and
//! disk blocks that differ from another snapshot, its parent, and refers to the parent for the
//! rest.
//!
//! ```text
//!   before   ram ##..#.....   ram.refs -> ram of a parent, disk of a parent, base image     disk0 -> disk0 of a parent -> base image
//!   after    ram ######.#..   ram.refs -> base image                                        disk0 -> base image
//! ```
//! The complete snapshot is written beside the layer, and then both change places at one instant
//! (`RENAME_EXCHANGE`). The contents of memory are the same, and so are its checksums, with which
//! each chunk is compared before it is written.
//!
//! Files of other snapshots that a layer only reads (read-only disks, kernels) get a second name
//! in the layer, `baseN`, as in a pulled snapshot (`portable.rs`).
//!
//! No process may use a file that is replaced ([`users`]): a VM would go on with a disk file that
//! has no name any more, and could not be saved again.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use memfold_host::progress::Progress;
use memfold_store::mapped;
use memfold_units::PAGE_SIZE;
use memfold_vm::DiskFormat;
use rustix::process::Pid;

use super::disk_chain::{chain, identity};
use super::draft::Draft;
use super::error::{SnapshotError, failed};
use super::file_facts::{backing_file, backing_files, facts, facts_at};
use super::image::SUMS;
use super::image::{CHUNK_PAGES, bytes, write_nonzero};
use super::links::is_in;
use super::manifest::{Manifest, RAM, REFERENCES, References, SavedDisk, file_name};
use super::portable::base_name;
use super::rebase::{is_of_another, merge, split, used};
use super::refer::{self, Reference};
use super::restore;
use super::room::enough_room;
use super::shelf::{DEVICES, Shelf};
use super::sparse_copy::copy_file;
use super::working_set;

/// Returns whether a snapshot needs no other snapshot.
pub fn is_complete(shelf: &Shelf, manifest: &Manifest) -> Result<bool, SnapshotError> {
    let place = shelf.path(&manifest.name)?;
    let mut outside = manifest.outside().into_iter();
    let needs_another = outside.any(|path| is_of_another(shelf, &place, &path));
    Ok(manifest.parent.is_none() && !needs_another)
}

/// Returns the processes (except this one) that map files of the snapshot, or have a file open that
/// [`compact`] replaces.
pub fn users(shelf: &Shelf, manifest: &Manifest) -> Result<Vec<Pid>, SnapshotError> {
    let place = shelf.path(&manifest.name)?;
    // A compressed image has no such file.
    let ram = manifest.packed.is_none().then(|| place.join(RAM));
    let mut files = Vec::from_iter(ram);
    for disk in manifest.disks.iter().filter(|d| d.file.path.is_relative()) {
        let file = place.join(&disk.file.path);
        let mut below = chain(&file)?.into_iter().skip(1);
        // A disk that is only linked stays the same file.
        if below.any(|other| is_of_another(shelf, &place, &other)) {
            files.push(file);
        }
    }
    let identities = files
        .iter()
        .map(|file| identity(file).map_err(failed(file)));
    let identities = identities.collect::<Result<Vec<_>, _>>()?;
    let mut pids = restore::holders(shelf, &manifest.name)?;
    let open = mapped::processes_with_open(&identities).map_err(failed("/proc"))?;
    let only_open = open.into_iter().filter(|pid| !pids.contains(pid));
    let only_open: Vec<Pid> = only_open.collect();
    pids.extend(only_open);
    Ok(pids)
}

/// A snapshot that was made complete.
#[derive(Debug)]
pub struct Compacted {
    /// The snapshot's new manifest.
    pub manifest: Manifest,
    /// Number of bytes of RAM and of disks that were copied from other snapshots.
    pub copied_bytes: u64,
}

/// Makes the snapshot complete that `manifest` describes. Callers check that no other snapshot is
/// built on it, and that it has no [`users`].
///
/// # Errors
///
/// Errors as of a restore, and [`SnapshotError::Broken`] if a page that is copied, or a disk, is
/// not as it was saved. The snapshot is then as it was.
pub fn compact(
    shelf: &Shelf,
    manifest: &Manifest,
    progress: &Progress,
) -> Result<Compacted, SnapshotError> {
    let (name, place) = (&manifest.name, shelf.path(&manifest.name)?);
    if manifest.packed.is_some() {
        return Err(SnapshotError::Impossible(format!(
            "snapshot '{name}' is compressed or encrypted, and cannot be made complete; restore it, and save the VM with --whole"
        )));
    }
    // Damaged bytes, or disks that do not match the saved RAM, must not get into the new snapshot.
    restore::spec(shelf, manifest, &manifest.vm)?;
    progress.begin("disks compared", 0);
    restore::refuse_changed(shelf, manifest)?;
    enough_room(&place, bytes_to_write(shelf, manifest, &place)?).map_err(|why| {
        SnapshotError::Impossible(format!(
            "cannot make snapshot '{name}' complete ({why}); free space in the directory of snapshots"
        ))
    })?;
    let mut layer = Layer {
        shelf,
        draft: shelf.replacement(name)?,
        place,
        bases: 0,
    };
    let files = (0..manifest.files.len()).map(file_name);
    let whole = [SUMS, DEVICES].map(str::to_owned).into_iter();
    for part in whole.chain(files).chain([working_set::FILE.to_owned()]) {
        let from = layer.place.join(&part);
        if from.exists() {
            layer.link(&from, &part)?;
        }
    }
    let mut complete = manifest.clone();
    complete.parent = None;
    complete.references = layer.copy_pages(manifest, progress)?;
    let mut copied_bytes = complete.own_bytes().saturating_sub(manifest.own_bytes());
    progress.begin("disks made complete", 0);
    for (disk, spec) in complete.disks.iter_mut().zip(&mut complete.spec.disks) {
        copied_bytes += layer.complete_disk(disk)?;
        if disk.file.path.is_absolute() {
            spec.path.clone_from(&disk.file.path);
        }
    }
    let boot = &mut complete.spec.boot;
    let boot = [&mut boot.kernel, &mut boot.initrd, &mut boot.firmware];
    for path in boot.into_iter().flatten() {
        if is_of_another(shelf, &layer.place, path) {
            let base = layer.next_base();
            layer.link(path, &base)?;
            *path = layer.place.join(base);
        }
    }
    layer.draft.replace(&complete)?;
    shelf.forget(name);
    Ok(Compacted {
        manifest: complete,
        copied_bytes,
    })
}

/// Returns the number of bytes that [`compact`] writes at most.
fn bytes_to_write(shelf: &Shelf, manifest: &Manifest, place: &Path) -> Result<u64, SnapshotError> {
    let mut bytes = manifest.parent_bytes() + used(&place.join(RAM));
    for disk in manifest.disks.iter().filter(|d| d.file.path.is_relative()) {
        let files = chain(&place.join(&disk.file.path))?;
        let (merged, _) = split(&files, |file| is_of_another(shelf, place, file));
        if merged.len() > 1 {
            bytes += merged.iter().map(|file| used(file)).sum::<u64>();
        }
    }
    Ok(bytes)
}

/// A layer that is being made complete.
struct Layer<'a> {
    shelf: &'a Shelf,
    place: PathBuf,
    draft: Draft,
    /// Number of files `baseN` in the draft.
    bases: usize,
}

impl Layer<'_> {
    /// Gives a file a second name in the draft.
    fn link(&self, from: &Path, part: &str) -> Result<(), SnapshotError> {
        let to = self.draft.path().join(part);
        fs::hard_link(from, &to).map_err(failed(&to))
    }

    /// Returns the name of the next file from another snapshot.
    fn next_base(&mut self) -> String {
        self.bases += 1;
        base_name(self.bases - 1)
    }

    /// Writes the RAM image: the layer's own pages, and those that it refers to in any snapshot.
    /// Returns the references that remain.
    fn copy_pages(
        &self,
        manifest: &Manifest,
        progress: &Progress,
    ) -> Result<Option<References>, SnapshotError> {
        let draft = &self.draft;
        let failed = draft.failed(RAM);
        let ram = draft.file(RAM)?;
        ram.set_len(manifest.ram_bytes).map_err(&failed)?;
        let all = manifest.references.iter().flat_map(|refs| &refs.sources);
        let (mut sources, mut numbers) = (Vec::new(), Vec::new());
        for path in all {
            // A path without a slash is a file of the snapshot.
            let is_left = path.is_absolute() && !is_in(path, self.shelf.root());
            numbers.push(is_left.then_some(u32::try_from(sources.len()).unwrap_or(u32::MAX)));
            sources.extend(is_left.then(|| path.clone()));
        }
        let stored = self.shelf.stored(manifest)?;
        let left = stored.references.iter().filter_map(|reference| {
            let of = usize::try_from(reference.file).ok()?;
            Some(Reference {
                file: numbers.get(of).copied().flatten()?,
                ..*reference
            })
        });
        let left: Vec<Reference> = left.collect();
        progress.begin("RAM made complete", stored.bytes);
        let copied = stored.check(progress, |chunk, buffer| {
            let first = chunk * CHUNK_PAGES;
            let from = left.partition_point(|reference| reference.page < first);
            let here = left[from..].iter();
            for reference in here.take_while(|r| r.page < first + CHUNK_PAGES) {
                let at = bytes(reference.page - first);
                buffer[at..][..reference.length()].fill(0);
            }
            write_nonzero(buffer, &ram, first * PAGE_SIZE).map(drop)
        });
        let wrong = copied.map_err(&failed)?;
        if !wrong.is_empty() {
            return Err(Shelf::wrong(manifest, &wrong));
        }
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
    /// Returns the number of copied bytes.
    fn complete_disk(&mut self, disk: &mut SavedDisk) -> Result<u64, SnapshotError> {
        let is_of_another = |path: &Path| is_of_another(self.shelf, &self.place, path);
        let is_own = disk.file.path.is_relative();
        if !is_own && !is_of_another(&disk.file.path) {
            return Ok(0);
        }
        let from = self.place.join(&disk.file.path);
        // The guest writes the contents of a raw disk, so even a header in it must not be believed.
        let files = if disk.format == DiskFormat::Qcow2.driver() {
            chain(&from)?
        } else {
            vec![from.clone()]
        };
        let (merged, left) = split(&files, is_of_another);
        let (name, path) = if is_own {
            let name = disk.file.path.to_string_lossy().into_owned();
            (name, disk.file.path.clone())
        } else {
            let name = self.next_base();
            let path = self.place.join(&name);
            (name, path)
        };
        if merged.len() == 1 {
            self.link(&from, &name)?;
            disk.file.path = path;
            return Ok(0);
        }
        let to = self.draft.path().join(&name);
        copy_file(&from, &to).map_err(failed(&to))?;
        merge(&to, merged, left)?;
        disk.file = backing_file(&to, &path)?;
        disk.xxh3_128 = is_own.then_some(facts_at(&to)?.xxh3_128);
        disk.backing = backing_files(left.iter().cloned())?;
        Ok(used(&to).saturating_sub(used(&from)))
    }
}

#[cfg(test)]
#[path = "compact_tests.rs"]
mod tests;

//! Completes a snapshot's RAM image after the disks are frozen and the VM runs again. Writes the
//! table of pages that are stored only as references to the snapshot's disks, or compresses the
//! image.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use memfold_host::progress::Progress;
use memfold_store::StoreIdentity;

use super::candidates::{Candidates, SourceFile};
use super::disk_chain::identity;
use super::draft::Draft;
use super::encryption::DataKey;
use super::error::SnapshotError;
use super::file_facts::facts;
use super::manifest::{INDEX, PACKED, Packed, RAM, REFERENCES, References, SavedDisk, disk_name};
use super::pack;
use super::refer::{self, Reference};
use super::room::ReserveGuard;

/// Writes the table of the image's pages that this snapshot's disks contain, encrypted with `key`
/// if there is one.
pub(super) fn write_references(
    (draft, key): (&Draft, Option<&DataKey>),
    (mut references, candidates): (Vec<Reference>, Candidates),
    disks: &[SavedDisk],
) -> Result<Option<References>, SnapshotError> {
    if references.is_empty() {
        return Ok(None);
    }
    let (mut sources, mut renumbered) = (Vec::new(), HashMap::new());
    for (file, number) in candidates.files.iter().zip(0..) {
        if !references.iter().any(|r| r.file == number) {
            continue;
        }
        let name = name_in_snapshot(file, disks)?;
        // A disk of the VM may be one of its parent's files, too.
        let known = sources.iter().position(|source| *source == name);
        let place = known.unwrap_or(sources.len());
        if known.is_none() {
            sources.push(name);
        }
        renumbered.insert(number, u32::try_from(place).unwrap_or(u32::MAX));
    }
    let mut parent_pages = 0;
    for reference in &mut references {
        let of = usize::try_from(reference.file).ok();
        let source = of.and_then(|of| candidates.files.get(of));
        if source.is_some_and(|source| source.in_parent) {
            parent_pages += u64::from(reference.pages);
        }
        reference.file = renumbered[&reference.file];
    }
    let mut table = draft.file(REFERENCES)?;
    let encoded = refer::encode(&references);
    let encoded = match key {
        Some(key) => key.seal_file(REFERENCES, &[], encoded),
        None => Ok(encoded),
    };
    let written = encoded.and_then(|bytes| table.write_all(&bytes));
    let table = written.and_then(|()| facts(table));
    Ok(Some(References {
        table: table.map_err(draft.failed(REFERENCES))?,
        sources,
        pages: references.iter().map(|r| u64::from(r.pages)).sum(),
        parent_pages,
        mappings: Some(refer::mappings(&references)),
    }))
}

/// Returns the path by which the snapshot names a file of its disks. A former overlay is now in the
/// snapshot, itself or as a copy with the same offsets.
fn name_in_snapshot(source: &SourceFile, disks: &[SavedDisk]) -> Result<PathBuf, SnapshotError> {
    if source.in_parent {
        return Ok(source.path.clone());
    }
    if let Some(disk) = source.overlay_of {
        return Ok(disk_name(disk).into());
    }
    let own = StoreIdentity::of(&source.file).ok();
    let files = disks.iter();
    let files = files.flat_map(|disk| std::iter::once(&disk.file).chain(&disk.backing));
    let mut absolute = files.map(|of| &of.path).filter(|path| path.is_absolute());
    let named = absolute.find(|path| own.is_some() && identity(path).ok() == own);
    named.cloned().ok_or_else(|| {
        SnapshotError::Impossible(format!(
            "{} was replaced while the VM was saved: save it again",
            source.path.display()
        ))
    })
}

/// Writes the encrypted table of the frames of an encrypted image, `ram.sealed`, which has `bytes`
/// bytes.
pub(super) fn write_index(
    draft: &Draft,
    bytes: u64,
    index: &[u8],
) -> Result<Packed, SnapshotError> {
    let mut file = draft.file(INDEX)?;
    let written = file.write_all(index).and_then(|()| facts(file));
    let index = written.map_err(draft.failed(INDEX))?;
    Ok(Packed { bytes, index })
}

/// Replaces `ram` by a compressed image.
pub(super) fn compress(
    draft: &Draft,
    ram: &File,
    progress: &Progress,
) -> Result<Packed, SnapshotError> {
    let (packed, mut index) = (draft.file(PACKED)?, draft.file(INDEX)?);
    let saved = ram.metadata().map_err(draft.failed(RAM))?.blocks() * 512;
    progress.begin("RAM compressed", saved);
    let reserve = ReserveGuard::new(&draft.path);
    let places = pack::pack(ram, &packed, progress, |bytes| reserve.take(bytes));
    let places = places.map_err(draft.failed(PACKED))?;
    let index = index.write_all(&places).and_then(|()| facts(index));
    fs::remove_file(draft.path.join(RAM)).map_err(draft.failed(RAM))?;
    Ok(Packed {
        bytes: packed.metadata().map_err(draft.failed(PACKED))?.len(),
        index: index.map_err(draft.failed(INDEX))?,
    })
}

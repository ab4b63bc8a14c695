//! Taking apart an image that was written, when the VM has gone on and its disks are frozen: what the disks hold, and a compressed rest.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Instant;

use memfold_host::progress::Progress;

use super::draft::Draft;
use super::error::{SnapshotError, failed};
use super::file_facts::facts;
use super::manifest::{INDEX, Keep, PACKED, Packed, RAM, REFERENCES, References, SavedDisk, Steps};
use super::pack;
use super::refer::{self, DiskBlocks};
use super::request::{Request, milliseconds};

/// Takes an image apart as far as it was asked for.
pub(super) fn take_apart(
    draft: &Draft,
    ram: &File,
    disks: &[SavedDisk],
    request: &Request,
    steps: &mut Steps,
    progress: &Progress,
) -> Result<(Option<References>, Option<Packed>), SnapshotError> {
    let mut parts = (None, None);
    if request.keep == Keep::Hot {
        let began = Instant::now();
        parts.0 = refer_to_disks(draft, ram, disks, progress)?;
        steps.refer_ms = milliseconds(began.elapsed());
    }
    if request.compress {
        let began = Instant::now();
        parts.1 = Some(compress(draft, ram, progress)?);
        steps.pack_ms = milliseconds(began.elapsed());
    }
    Ok(parts)
}

/// Takes out of the image what the disks of this snapshot hold, and writes down where.
fn refer_to_disks(
    draft: &Draft,
    ram: &File,
    disks: &[SavedDisk],
    progress: &Progress,
) -> Result<Option<References>, SnapshotError> {
    let mut sources: Vec<PathBuf> = Vec::new();
    let mut files = Vec::new();
    let mut left = refer::MOST_DISK_BYTES;
    let all = disks.iter().flat_map(|disk| {
        let backing = disk.backing.iter().map(|file| &file.path);
        std::iter::once(&disk.path).chain(backing)
    });
    for path in all {
        let place = draft.path().join(path);
        let failed = failed(place.as_path());
        let file = File::open(&place).map_err(failed)?;
        let held = file.metadata().map_err(failed)?.blocks() * 512;
        if sources.contains(path) {
            continue;
        }
        let Some(rest) = left.checked_sub(held) else {
            tracing::info!(path = %place.display(), "disk too large to be searched for pages that the guest has cached");
            continue;
        };
        left = rest;
        sources.push(path.clone());
        files.push(file);
    }
    progress.begin("disks searched", refer::MOST_DISK_BYTES - left);
    let blocks = DiskBlocks::read(files, progress).map_err(draft.failed("disks"))?;
    let saved = ram.metadata().map_err(draft.failed(RAM))?.blocks() * 512;
    progress.begin("pages of disks removed", saved);
    let references = refer::refer(ram, &blocks, progress).map_err(draft.failed(RAM))?;
    // As it is, it can be mapped.
    if references.is_empty() {
        return Ok(None);
    }
    let mut table = draft.file(REFERENCES)?;
    table
        .write_all(&refer::encode(&references))
        .map_err(draft.failed(REFERENCES))?;
    Ok(Some(References {
        table: facts(table).map_err(draft.failed(REFERENCES))?,
        sources,
        pages: references.iter().map(|r| u64::from(r.pages)).sum(),
    }))
}

/// Puts a compressed image in the place of `ram`.
fn compress(draft: &Draft, ram: &File, progress: &Progress) -> Result<Packed, SnapshotError> {
    let (packed, mut index) = (draft.file(PACKED)?, draft.file(INDEX)?);
    let saved = ram.metadata().map_err(draft.failed(RAM))?.blocks() * 512;
    progress.begin("RAM compressed", saved);
    let places = pack::pack(ram, &packed, progress).map_err(draft.failed(PACKED))?;
    index.write_all(&places).map_err(draft.failed(INDEX))?;
    fs::remove_file(draft.path().join(RAM)).map_err(draft.failed(RAM))?;
    Ok(Packed {
        bytes: packed.metadata().map_err(draft.failed(PACKED))?.len(),
        index: facts(index).map_err(draft.failed(INDEX))?,
    })
}

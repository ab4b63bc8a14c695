//! Reads facts about files: length, checksum, modification time, and block-device identity.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memfold_vm::block_device::BlockDevice;
use xxhash_rust::xxh3::Xxh3;

use super::error::{SnapshotError, failed};
use super::manifest::{BackingFile, FileFacts, hex};
use super::pipeline;

/// File attributes that change as soon as the file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified_ns: i128,
    /// Nobody can set this one, but by setting the clock.
    changed_ns: i128,
}

impl Stamp {
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let facts = file.metadata()?;
        Ok(Self {
            device: facts.dev(),
            inode: facts.ino(),
            bytes: facts.len(),
            modified_ns: modified_ns(&facts),
            changed_ns: i128::from(facts.ctime()) * 1_000_000_000 + i128::from(facts.ctime_nsec()),
        })
    }
}

/// Reads a file, and returns its length and checksum.
#[allow(clippy::needless_pass_by_value)] // whoever has its facts is done with it
pub fn facts(file: File) -> io::Result<FileFacts> {
    let mut hasher = Xxh3::new();
    let bytes = pipeline::read_ahead(&file, |piece| hasher.update(piece))?;
    Ok(FileFacts {
        bytes,
        xxh3_128: hex(hasher.digest128()),
    })
}

/// Reads the file at `path`, and returns its length and checksum.
pub(super) fn facts_at(path: &Path) -> Result<FileFacts, SnapshotError> {
    File::open(path).and_then(facts).map_err(failed(path))
}

/// Returns the block device at `path`; `None`: it is something else.
pub(super) fn device(path: &Path) -> Result<Option<BlockDevice>, SnapshotError> {
    BlockDevice::of(path).map_err(failed(path))
}

/// Returns a file's modification time, in nanoseconds since 1970.
pub(super) fn modified_ns(facts: &fs::Metadata) -> i128 {
    i128::from(facts.mtime()) * 1_000_000_000 + i128::from(facts.mtime_nsec())
}

/// Returns the current facts of files and block devices. Paths that lead to no file are left out.
pub(super) fn backing_files(
    paths: impl Iterator<Item = PathBuf>,
) -> Result<Vec<BackingFile>, SnapshotError> {
    let mut found = Vec::new();
    for path in paths {
        let Ok(facts) = fs::metadata(&path) else {
            continue;
        };
        found.push(BackingFile {
            bytes: facts.len(),
            modified_ns: modified_ns(&facts),
            device: device(&path)?,
            path,
        });
    }
    Ok(found)
}

//! Reads facts about files: length, checksum, modification time, identity of a block device.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memfold_vm::block_device::BlockDevice;
use xxhash_rust::xxh3::Xxh3;

use super::error::{SnapshotError, failed};
use super::manifest::{BackingFile, FileFacts, hex};
use super::pipeline;

/// Attributes of a file that change as soon as somebody writes to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified_ns: i128,
    /// Time of the last change of the inode, which nobody can set without setting the host's clock.
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

/// Reads a whole file, and returns its length and checksum.
#[allow(clippy::needless_pass_by_value)] // callers do not need the file afterwards
pub fn facts(file: File) -> io::Result<FileFacts> {
    let mut hasher = Xxh3::new();
    let bytes = pipeline::read_ahead(&file, |piece| hasher.update(piece))?;
    Ok(FileFacts {
        bytes,
        xxh3_128: hex(hasher.digest128()),
    })
}

/// Reads the whole file at `path`, and returns its length and checksum.
pub(super) fn facts_at(path: &Path) -> Result<FileFacts, SnapshotError> {
    File::open(path).and_then(facts).map_err(failed(path))
}

/// Returns the block device at `path`; `None` if the path leads to another kind of file.
pub(super) fn device(path: &Path) -> Result<Option<BlockDevice>, SnapshotError> {
    BlockDevice::of(path).map_err(failed(path))
}

/// Returns a file's modification time, in nanoseconds since 1970.
pub(super) fn modified_ns(facts: &fs::Metadata) -> i128 {
    i128::from(facts.mtime()) * 1_000_000_000 + i128::from(facts.mtime_nsec())
}

/// Returns the present facts of files and block devices. Leaves out paths that lead to no file.
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

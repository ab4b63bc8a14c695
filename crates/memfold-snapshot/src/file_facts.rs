//! Reads facts about a snapshot's files, such as length, checksum and modification time. A later
//! restore compares them, to find files that have changed.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memfold_store::StoreIdentity;
use memfold_vm::block_device::BlockDevice;
use xxhash_rust::xxh3::Xxh3;

use super::error::{SnapshotError, failed};
use super::manifest::{BackingFile, FileFacts, hex};
use super::pipeline;

/// Attributes of a file that change as soon as somebody writes to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    identity: StoreIdentity,
    bytes: u64,
    modified: (i64, i64),
    /// Time of the last change of the inode, which nobody can set without setting the host's clock.
    changed: (i64, i64),
}

impl Stamp {
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let facts = file.metadata()?;
        Ok(Self {
            identity: (&facts).into(),
            bytes: facts.len(),
            modified: (facts.mtime(), facts.mtime_nsec()),
            changed: (facts.ctime(), facts.ctime_nsec()),
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
pub(super) fn modified_ns(facts: &fs::Metadata) -> i64 {
    let seconds = facts.mtime().saturating_mul(1_000_000_000);
    seconds.saturating_add(facts.mtime_nsec())
}

/// Returns the present facts of files and block devices. Leaves out paths that lead to no file.
pub(super) fn backing_files(
    paths: impl Iterator<Item = PathBuf>,
) -> Result<Vec<BackingFile>, SnapshotError> {
    let files = paths.filter(|path| path.exists());
    files.map(|path| backing_file(&path, &path)).collect()
}

/// Returns the present facts of the file or block device at `at`, to be recorded as `path`.
pub(super) fn backing_file(at: &Path, path: &Path) -> Result<BackingFile, SnapshotError> {
    let facts = fs::metadata(at).map_err(failed(at))?;
    Ok(BackingFile {
        path: path.into(),
        bytes: facts.len(),
        modified_ns: modified_ns(&facts),
        device: device(at)?,
    })
}

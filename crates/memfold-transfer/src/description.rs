//! Description of a snapshot in an object store: `snapshots/NAME.json`.

use memfold_snapshot::{Manifest, portable};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::PathBuf;

use super::chunk;

/// Version of the layout.
pub(crate) const FORMAT: u32 = 1;

/// Most bytes of a description.
pub(crate) const MOST_BYTES: u64 = 16 << 20;

/// Most chunks of a snapshot: 4 TiB.
const MOST_CHUNKS: u64 = 4 << 20;

/// A file of a snapshot in an object store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Name of the file; `baseN` for a file from outside the snapshot.
    pub name: String,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Path, on the host of the push, of a file from outside the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<PathBuf>,
}

/// Description of a snapshot in an object store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// Version of the layout.
    pub format: u32,
    /// Name of the snapshot in the store.
    pub name: String,
    /// Length of a chunk in bytes.
    pub chunk_bytes: u64,
    /// Bytes of all files that are not zero chunks.
    pub stored_bytes: u64,
    /// BLAKE3 hash of the index: the names of the chunks of all files, in order.
    pub index: String,
    /// The files, in the order of the index.
    pub files: Vec<FileEntry>,
    /// The manifest of the snapshot, as on the host of the push.
    pub manifest: Manifest,
}

impl Description {
    /// Parses the description of snapshot `name`, and checks all that does not need the index.
    ///
    /// # Errors
    ///
    /// The reason why it is refused, as text.
    pub fn parse(bytes: &[u8], name: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let version: Version = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if version.format != FORMAT {
            return Err(format!(
                "its format is {}, and this memfold reads format {FORMAT}; update memfold",
                version.format
            ));
        }
        let description: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if description.name != name {
            return Err(format!("it describes snapshot '{}'", description.name));
        }
        if description.chunk_bytes != chunk::CHUNK_BYTES {
            return Err(format!("its chunks have {} bytes", description.chunk_bytes));
        }
        let mut names = HashSet::new();
        let mut chunks = 0_u64;
        for file in &description.files {
            let is_right = portable::is_member_name(&description.manifest, &file.name)
                && file.name.starts_with("base") == file.origin.is_some();
            if !is_right || !names.insert(&file.name) {
                return Err(format!("it names a file {:?}", file.name));
            }
            chunks = chunks.saturating_add(chunk::count(file.bytes));
        }
        if chunks > MOST_CHUNKS {
            return Err(format!("it has {chunks} chunks"));
        }
        description.index_hash()?;
        Ok(description)
    }

    /// Returns the number of chunks of all files, at most 4 Mi.
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.files.iter().map(|file| chunk::count(file.bytes)).sum()
    }

    /// Returns the hash of the index.
    pub(crate) fn index_hash(&self) -> Result<blake3::Hash, String> {
        blake3::Hash::from_hex(&self.index).map_err(|_| "its index has no valid name".to_owned())
    }
}

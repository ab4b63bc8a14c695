//! What is kept of a snapshot's description while VMs run from the snapshot, so that the next
//! daemon can go on although the object store is gone: description, signature and list of chunks.
//! They are kept in the draft as a small object store ([`PLACE`]), and are read and checked as in
//! the store that they come from.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use futures_util::future::try_join;
use serde::{Deserialize, Serialize};
use url::Url;

use super::chunk::{self, ChunkName};
use super::description::Description;
use super::error::{TransferError, files};
use super::remote::Remote;

/// Name of the directory in a draft. No file of a snapshot has this name.
pub(crate) const PLACE: &str = ".store";

/// Identifies a snapshot that a daemon began to fetch, so that a later one fetches no other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchedSnapshot {
    /// Name of the snapshot's list of chunks: the BLAKE3 hash of the list.
    pub index: String,
    /// BLAKE3 hash of the snapshot's description; `None` if an earlier version of memfold began.
    #[serde(default)]
    pub description: Option<String>,
}

/// Description of a snapshot, as it was read from an object store and checked.
#[derive(Debug)]
pub(crate) struct Described {
    pub(crate) description: Description,
    /// Bytes of the description, over which the signature is.
    pub(crate) bytes: Vec<u8>,
    /// The signature, if one was asked for.
    pub(crate) signature: Option<Vec<u8>>,
    pub(crate) index: Vec<ChunkName>,
    /// Whether this is what an earlier daemon has kept.
    pub(crate) is_kept: bool,
}

/// Removes what was kept in a draft that is a snapshot now.
pub fn remove_kept(snapshot: &Path) {
    let place = snapshot.join(PLACE);
    match fs::remove_dir_all(&place) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::debug!(path = %place.display(), %error, "a description stays in the snapshot");
        }
        _ => {}
    }
}

impl Described {
    pub(crate) fn identity(&self) -> FetchedSnapshot {
        FetchedSnapshot {
            index: self.description.index.clone(),
            description: Some(blake3::hash(&self.bytes).to_hex().to_string()),
        }
    }

    /// Keeps what was read in a draft, unless it was read there.
    pub(crate) fn keep(&self, draft: &Path) -> Result<(), TransferError> {
        if self.is_kept {
            return Ok(());
        }
        let place = draft.join(PLACE);
        let made = DirBuilder::new().mode(0o700).create(&place);
        match made {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(files(&place)(error));
            }
            _ => {}
        }
        let remote = open(&place)?;
        let index = chunk::encode(&self.index);
        let name = blake3::hash(&index);
        let index = chunk::pack(&index).map_err(files(&place))?;
        remote.wait(async {
            remote.put(&remote.index(&name), index).await?;
            if let Some(signature) = &self.signature {
                let path = remote.signature(&self.bytes);
                remote.put(&path, signature.clone()).await?;
            }
            let path = remote.description(&self.description.name);
            remote.put(&path, self.bytes.clone()).await
        })
    }
}

/// Reads the description of snapshot `from` in an object store, and checks its list of chunks and,
/// with the public key `trust`, its signature.
pub(crate) fn describe(
    remote: &Remote,
    (from, trust): (&str, Option<&str>),
) -> Result<Described, TransferError> {
    remote.wait(async {
        let (description, bytes) = remote.describe(from).await?;
        let signature = remote.check(from, &bytes, trust);
        let (signature, index) = try_join(signature, remote.read_index(&description)).await?;
        Ok(Described {
            description,
            bytes,
            signature,
            index,
            is_kept: false,
        })
    })
}

/// Reads what an earlier daemon has kept in a draft; `None` if it has not kept all, or if that was
/// changed since.
pub(crate) fn read(
    draft: &Path,
    source: (&str, Option<&str>),
    expected: &FetchedSnapshot,
) -> Option<Described> {
    // Without this hash, nothing says whether an unsigned description is right.
    expected.description.as_ref()?;
    let kept = open(&draft.join(PLACE)).and_then(|remote| describe(&remote, source));
    match kept {
        Ok(kept) if kept.identity() == *expected => Some(Described {
            is_kept: true,
            ..kept
        }),
        Ok(_) => None,
        Err(error) => {
            tracing::debug!(
                snapshot = source.0,
                error = memfold_host::chain(&error),
                "the description is read from the object store again"
            );
            None
        }
    }
}

fn open(place: &Path) -> Result<Remote, TransferError> {
    let url = Url::from_directory_path(place).map_err(|()| TransferError::Address {
        url: place.display().to_string(),
        why: "it is not an absolute path".into(),
    })?;
    // A VM waits for its start, and does not outlive a power failure. After one, what is kept may
    // be damaged, and is read from the object store again.
    Ok(Remote::open_with(url.as_str(), std::iter::empty())?.without_sync())
}

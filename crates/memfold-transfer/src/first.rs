//! Fetches the first pages of a snapshot, and checks them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use memfold_units::PAGE_SIZE;
use tokio::time::timeout;

use super::chunk;
use super::error::{TransferError, files};
use super::first_pages::{Part, PartEntry, check_order};
use super::kept;
use super::pull::Arriving;
use super::push::blocking;
use super::remote::{AT_ONCE, FIRST_PAGES, MISSING, Remote, damaged, most_packed};

/// How long VMs that start wait for first pages at most. After this time, the pages arrive with
/// their chunks.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The first pages of a snapshot that is being fetched.
#[derive(Debug, Default)]
pub(crate) struct FirstPages {
    /// Names of the parts, from the description.
    pub entries: Vec<PartEntry>,
    /// Directory on this host in which the parts are kept, so that the next daemon knows which
    /// pages VMs have seen.
    place: PathBuf,
    /// Number of whole pages of each file. First pages may also lie in files that are fetched
    /// before VMs run: such a page is only compared.
    file_pages: Vec<u64>,
}

impl FirstPages {
    pub(crate) fn new(entries: &[PartEntry], draft: &Path, arriving: &[Arriving]) -> Self {
        let pages = |file: &Arriving| file.entry.bytes / PAGE_SIZE;
        Self {
            entries: entries.to_vec(),
            place: draft.join(kept::PLACE).join(FIRST_PAGES),
            file_pages: arriving.iter().map(pages).collect(),
        }
    }

    /// Fetches all parts, and checks them. Parts that an earlier daemon has kept are not fetched.
    pub(crate) async fn fetch(&self, remote: &Remote) -> Result<Vec<Part>, TransferError> {
        fs::create_dir_all(&self.place).map_err(files(&self.place))?;
        let parts = stream::iter(&self.entries).map(|entry| self.part(remote, entry));
        let parts = parts.buffered(AT_ONCE).try_collect();
        let late = |_| TransferError::Local(std::io::ErrorKind::TimedOut.into());
        let parts: Vec<Part> = timeout(PATIENCE, parts).await.map_err(late)??;
        check_order(&parts).map_err(|why| damaged(&remote.firsts(), why))?;
        Ok(parts)
    }

    async fn part(&self, remote: &Remote, entry: &PartEntry) -> Result<Part, TransferError> {
        let name = entry.hash();
        let name = name.map_err(|why| damaged(&remote.firsts(), why))?;
        let length = usize::try_from(entry.bytes).unwrap_or(usize::MAX);
        let file_pages = self.file_pages.clone();
        let unpack = move |packed: &[u8]| {
            let part = chunk::unpack(packed, length, &name)?;
            Part::decode(part, &file_pages)
        };
        let (most, place) = (most_packed(entry.bytes), self.place.join(&entry.object));
        let (of_kept, at) = (unpack.clone(), place.clone());
        let kept = blocking(move || {
            let is_short = fs::metadata(&at).is_ok_and(|facts| facts.len() <= most);
            let packed = is_short.then(|| fs::read(&at)).transpose()?;
            Ok(packed.and_then(|packed| of_kept(&packed).ok()))
        });
        if let Some(part) = kept.await? {
            return Ok(part);
        }
        let path = remote.first(&name);
        let packed = remote.get(&path, most).await?;
        let packed = packed.ok_or_else(|| damaged(&path, MISSING.into()))?;
        let unpacked = blocking(move || {
            let part = unpack(&packed);
            if part.is_ok() {
                // Not synced: no VM outlives a power failure.
                fs::write(&place, &packed)?;
            }
            Ok(part)
        });
        unpacked.await?.map_err(|why| damaged(&path, why))
    }
}

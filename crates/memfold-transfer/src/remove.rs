//! Removes a snapshot from an object store, and the chunks, indexes and first pages that no other
//! snapshot needs.

use std::collections::HashSet;
use std::time::SystemTime;

use futures_util::TryStreamExt;
use object_store::ObjectMeta;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::error::TransferError;
use super::remote::{Remote, UNUSED};

/// Most chunks that the snapshots of a store may need so that unneeded ones are removed: 32 TiB of
/// snapshots. A store that says more would take gigabytes of memory.
const MOST_USED: usize = 32 << 20;

/// Result of removing a snapshot from an object store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemoveReport {
    /// Name of the removed snapshot.
    pub name: String,
    /// Number of chunks and indexes that were removed because no snapshot names them.
    pub objects_removed: u64,
    /// Bytes that the removed chunks and indexes took in the store.
    pub bytes_removed: u64,
    /// Number of chunks and indexes that no snapshot names, but that were kept because they are
    /// younger than a day: a running push may need them. A later removal removes them.
    pub objects_left: u64,
    /// Reason why no chunk and no index was removed: the description or index of another snapshot
    /// cannot be read, so the chunks that it needs are not known. Unset: unneeded chunks were
    /// removed.
    pub kept_because: Option<String>,
}

/// Removes snapshot `name` from an object store: first its description, so that no new pull begins,
/// then the chunks and indexes that no other snapshot needs and that were older than a day when the
/// removal began: a push may write a description after the removal has read all of them.
pub fn remove(remote: &Remote, name: &str) -> Result<RemoveReport, TransferError> {
    let began = SystemTime::now();
    remote.wait(async {
        let place = remote.description(name);
        let Some(bytes) = remote.get(&place, super::description::MOST_BYTES).await? else {
            return Err(remote.unknown(name));
        };
        let used = used(remote, name).await;
        remote.delete(&place).await?;
        remote.delete(&remote.signature(&bytes)).await?;
        let mut report = RemoveReport {
            name: name.to_owned(),
            objects_removed: 0,
            bytes_removed: 0,
            objects_left: 0,
            kept_because: None,
        };
        match used {
            Ok(used) => clean(remote, (&used, began), &mut report).await?,
            Err(error) => report.kept_because = Some(error.to_string()),
        }
        remote.sync().await?;
        Ok(report)
    })
}

/// Returns the objects that snapshots other than `name` need.
async fn used(remote: &Remote, name: &str) -> Result<HashSet<blake3::Hash>, TransferError> {
    let mut used = HashSet::new();
    for other in remote.names().await?.iter().filter(|other| *other != name) {
        let description = match remote.describe(other).await {
            Err(TransferError::Unknown { .. }) => continue,
            found => found?.0,
        };
        let index = remote.read_index(&description).await?;
        used.extend(index.iter().flatten());
        let first = description.first_pages.iter();
        used.extend(first.filter_map(|part| part.hash().ok()));
        used.extend(description.index_hash().ok());
        if used.len() > MOST_USED {
            return Err(TransferError::Damaged {
                object: remote.description(other).to_string(),
                why: format!("the store's snapshots need more than {MOST_USED} chunks"),
            });
        }
    }
    Ok(used)
}

/// Removes chunks and indexes that are not in `used` and that no push may need, and parts of them
/// that killed pushes have left. The removal began at `began`, before it read what snapshots use.
async fn clean(
    remote: &Remote,
    (used, began): (&HashSet<blake3::Hash>, SystemTime),
    report: &mut RemoveReport,
) -> Result<(), TransferError> {
    for place in [remote.chunks(), remote.indexes(), remote.firsts()] {
        // A store may have more objects than fit into memory.
        let mut objects = remote.list_under(&place);
        while let Some(object) = objects.try_next().await? {
            let hash = hash_of(remote, &object);
            if hash.is_none_or(|hash| used.contains(&hash)) {
                continue;
            }
            // A push may have sent it again since it was listed.
            let now = if is_old(&object, began) {
                remote.look(&object.location).await?
            } else {
                Some(object)
            };
            match now {
                Some(now) if is_old(&now, began) => {
                    remote.delete_found(&now.location).await?;
                    report.objects_removed += 1;
                    report.bytes_removed += now.size;
                }
                Some(_) => report.objects_left += 1,
                None => {}
            }
        }
    }
    let (parts, bytes) = remote.remove_parts(began - UNUSED).await?;
    report.objects_removed += parts;
    report.bytes_removed += bytes;
    Ok(())
}

/// Returns the name of an object that lies where memfold puts a chunk, an index or first pages. A
/// directory may hold other files, and links to them.
fn hash_of(remote: &Remote, object: &ObjectMeta) -> Option<blake3::Hash> {
    let name = object.location.filename().unwrap_or_default();
    let hash = blake3::Hash::from_hex(name).ok()?;
    let places = [
        remote.chunk(&hash),
        remote.index(&hash),
        remote.first(&hash),
    ];
    places.contains(&object.location).then_some(hash)
}

fn is_old(object: &ObjectMeta, began: SystemTime) -> bool {
    let age = began.duration_since(object.last_modified.into());
    age.is_ok_and(|age| age > UNUSED)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;

    /// A store in a directory.
    fn store() -> (tempfile::TempDir, Remote) {
        let place = tempfile::tempdir().unwrap();
        let remote = Remote::open(&format!("file://{}", place.path().display())).unwrap();
        (place, remote)
    }

    /// Writes a file that was last changed at `modified`.
    fn write(path: PathBuf, modified: SystemTime) -> PathBuf {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "packed").unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_modified(modified).unwrap();
        path
    }

    fn report() -> RemoveReport {
        RemoveReport {
            name: "warm".into(),
            objects_removed: 0,
            bytes_removed: 0,
            objects_left: 0,
            kept_because: None,
        }
    }

    #[test]
    fn a_chunk_that_gets_a_day_old_while_a_removal_runs_is_kept() {
        let (_place, remote) = store();
        let (used, now) = (HashSet::new(), SystemTime::now());
        let minute = Duration::from_secs(60);
        let path = remote.chunk(&blake3::hash(b"chunk"));
        let file = crate::local::LocalStore::file(&path).unwrap();
        let file = write(file, now - UNUSED - minute);
        for (began, is_kept) in [(now - 2 * minute, true), (now, false)] {
            let mut report = report();
            let cleaned = clean(&remote, (&used, began), &mut report);
            remote.wait(cleaned).unwrap();
            assert_eq!(file.exists(), is_kept);
            assert_eq!(report.objects_left, u64::from(is_kept));
            assert_eq!(report.objects_removed, u64::from(!is_kept));
        }
    }

    #[test]
    fn parts_of_objects_that_killed_pushes_have_left_are_removed_after_a_day() {
        let (_place, remote) = store();
        let (hash, now) = (blake3::hash(b"chunk"), SystemTime::now());
        let old = now - 2 * UNUSED;
        let file = |path, name: &str, modified| {
            let object = crate::local::LocalStore::file(&path).unwrap();
            write(object.with_file_name(name), modified)
        };
        let part = |path, modified| file(path, &format!("{}#3", hash.to_hex()), modified);
        let left = [
            part(remote.chunk(&hash), old),
            part(remote.index(&hash), old),
            part(remote.first(&hash), old),
            part(remote.signature(b"description"), old),
            file(remote.description("warm"), "warm.json#1", old),
        ];
        let kept = [
            part(remote.chunk(&blake3::hash(b"other")), now),
            file(remote.chunk(&hash), "notes#3", old),
            file(remote.description("warm"), "warm.json", old),
            file(remote.description("warm"), "warm.json#2", now),
            file(remote.description("warm"), "warm#1", old),
            file(remote.chunk(&hash), hash.to_hex().as_str(), old),
        ];
        // The parts of an object that a snapshot uses, too.
        let used = HashSet::from([hash]);
        let mut report = report();
        let cleaned = clean(&remote, (&used, now), &mut report);
        remote.wait(cleaned).unwrap();
        assert!(left.iter().all(|path| !path.exists()), "{left:?}");
        assert!(kept.iter().all(|path| path.exists()), "{kept:?}");
        assert_eq!((report.objects_removed, report.bytes_removed), (5, 5 * 6));
    }
}

//! Removes a snapshot from an object store, and chunks that no snapshot needs.

use std::collections::HashSet;
use std::time::SystemTime;

use object_store::ObjectMeta;
use object_store::path::Path;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::error::TransferError;
use super::remote::{Remote, UNUSED, failed};

/// Result of a removal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemoveReport {
    /// Name of the removed snapshot.
    pub name: String,
    /// Number of chunks and indexes that were removed because no snapshot names them.
    pub objects_removed: u64,
    /// Bytes that they took in the store.
    pub bytes_removed: u64,
    /// Number of chunks and indexes that no snapshot names but that are younger than a day: a push
    /// may be under way that needs them. A later removal takes them.
    pub objects_left: u64,
}

/// Removes a snapshot from a store: first its description, so that nobody begins to pull it, then
/// the chunks that no other snapshot has.
pub fn remove(remote: &Remote, name: &str) -> Result<RemoveReport, TransferError> {
    remote.wait(async {
        let place = remote.description(name);
        if remote.look(&place).await?.is_none() {
            return Err(remote.unknown(name));
        }
        delete(remote, &place).await?;
        let signature = remote.signature(name);
        // Not every server takes the deletion of an object that is not there.
        if remote.look(&signature).await?.is_some() {
            delete(remote, &signature).await?;
        }
        let mut used = HashSet::new();
        for (other, _) in remote.names().await? {
            let description = match remote.describe(&other).await {
                Err(TransferError::Unknown { .. }) => continue,
                // A snapshot that cannot be read may be mended, so all of its chunks must stay.
                found => found?.0,
            };
            let index = remote.read_index(&description).await?;
            used.extend(index.iter().flatten().map(|chunk| remote.chunk(chunk)));
            used.extend(
                description
                    .index_hash()
                    .ok()
                    .map(|index| remote.index(&index)),
            );
        }
        let mut report = RemoveReport {
            name: name.to_owned(),
            objects_removed: 0,
            bytes_removed: 0,
            objects_left: 0,
        };
        for place in [remote.chunks(), remote.indexes()] {
            let objects = remote.under(&place).await?;
            for object in objects.iter().filter(|o| !used.contains(&o.location)) {
                if is_old(object) {
                    delete(remote, &object.location).await?;
                    report.objects_removed += 1;
                    report.bytes_removed += object.size;
                } else {
                    report.objects_left += 1;
                }
            }
        }
        Ok(report)
    })
}

fn is_old(object: &ObjectMeta) -> bool {
    let age = SystemTime::now().duration_since(object.last_modified.into());
    age.is_ok_and(|age| age > UNUSED)
}

async fn delete(remote: &Remote, path: &Path) -> Result<(), TransferError> {
    match remote.store.delete(path).await {
        Err(object_store::Error::NotFound { .. }) => Ok(()),
        done => done.map_err(failed(path)),
    }
}

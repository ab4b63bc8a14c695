//! Changes the key of an encrypted snapshot: its data key is encrypted with another key of the
//! operator. Memory, device state and disks are not written again.
//!
//! ```text
//!   before   key (of the old key)  manifest.json, manifest.sum  | ram.sealed, devices, disk0.qcow2 ...
//!   after    key (of the new key)  manifest.json, manifest.sum  | the same files
//! ```
//! The manifest names the operator's key and has the checksum of `key`, so these three files must
//! change at one instant. They are written into a directory beside the snapshot, where all other
//! files get a second name. Then both directories change places (`RENAME_EXCHANGE`). A crash leaves
//! the snapshot with the old key or with the new one, and beside it a directory that the next
//! daemon removes.
//!
//! VMs that run from the snapshot go on: their memory is decrypted already, and their disks stay
//! the same files at the same paths.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

use super::error::{SnapshotError, failed};
use super::file_facts::facts;
use super::manifest::{KEY, MANIFEST, MANIFEST_SUM, Manifest};
use super::shelf::Shelf;

/// Files that change with the key.
const CHANGED: [&str; 3] = [KEY, MANIFEST, MANIFEST_SUM];

/// Encrypts the data key of the snapshot that `manifest` describes with the operator's key `to`.
/// Returns the name of the old key; `None` if the snapshot has the key `to` already. Nobody else
/// may use the snapshot's files meanwhile, except VMs that run from it.
///
/// # Errors
///
/// [`SnapshotError::Impossible`] if the snapshot is not encrypted, [`SnapshotError::Locked`] and
/// [`SnapshotError::Key`] if the old or the new key cannot be read, [`SnapshotError::Broken`] if
/// the old key is not the one with which the snapshot was encrypted. The snapshot is then as it
/// was. After [`SnapshotError::Files`], it has the old or the new key.
pub fn rekey(
    shelf: &Shelf,
    manifest: &Manifest,
    to: &str,
) -> Result<Option<String>, SnapshotError> {
    let name = &manifest.name;
    let mut changed = manifest.clone();
    let data_key = shelf.data_key(manifest)?;
    let (Some(data_key), Some(encryption)) = (data_key, &mut changed.encryption) else {
        return Err(SnapshotError::Impossible(format!(
            "snapshot '{name}' is not encrypted, so it has no key; save its VM with 'memfold snapshot save VM NAME --encrypt={to}'"
        )));
    };
    if encryption.key == to {
        // The exchange of an earlier attempt may not be on the disk yet. The old key may be thrown
        // away when this succeeds.
        let synced = File::open(shelf.root()).and_then(|root| root.sync_all());
        synced.map_err(failed(shelf.root()))?;
        return Ok(None);
    }
    let operator = shelf.keys().load(to)?;
    let draft = shelf.replacement(name)?;
    let header = data_key.wrap(&operator).map_err(draft.failed(KEY))?;
    let mut file = draft.file(KEY)?;
    let written = file.write_all(&header).and_then(|()| facts(file));
    encryption.header = written.map_err(draft.failed(KEY))?;
    let old = std::mem::replace(&mut encryption.key, to.to_owned());
    let place = shelf.path(name)?;
    for entry in fs::read_dir(&place).map_err(failed(&place))? {
        let part = entry.map_err(failed(&place))?.file_name();
        // A VM that has just started records its working set, which may be gone at any time.
        let is_unfinished = Path::new(&part).extension() == Some("new".as_ref());
        if is_unfinished || CHANGED.iter().any(|changed| part == *changed) {
            continue;
        }
        let second = draft.path().join(&part);
        fs::hard_link(place.join(&part), &second).map_err(failed(&second))?;
    }
    draft.replace(&changed)?;
    shelf.forget(name);
    Ok(Some(old))
}

#[cfg(test)]
#[path = "rekey_tests.rs"]
mod tests;

//! Writes the objects of a store that is a directory (`file://`). Unlike the `object_store` crate,
//! it syncs them: an object gets its name when its bytes are on the disk, so that no power failure
//! leaves a part of one, and an acknowledged snapshot stays.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, DirEntry, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use object_store::local::LocalFileSystem;
use parking_lot::Mutex;

use super::error::{TransferError, failed, files};

/// The directory of a store.
#[derive(Debug)]
pub(crate) struct LocalStore {
    /// The store's own directory, which exists.
    root: PathBuf,
    /// Directories that have names which are not synced yet.
    unsynced: Mutex<BTreeSet<PathBuf>>,
}

impl LocalStore {
    /// Returns the store whose objects are below `root`.
    pub fn new(root: &object_store::path::Path) -> Result<Self, TransferError> {
        // The object store has no name for `/` itself.
        let is_top = root.parts().next().is_none();
        Ok(Self {
            root: if is_top {
                PathBuf::from("/")
            } else {
                Self::file(root)?
            },
            unsynced: Mutex::default(),
        })
    }

    /// Returns the file of an object.
    pub fn file(path: &object_store::path::Path) -> Result<PathBuf, TransferError> {
        let file = LocalFileSystem::new().path_to_filesystem(path);
        file.map_err(failed(path))
    }

    /// Writes an object. Returns false if there is one and it shall not be replaced. The name is
    /// synced by [`LocalStore::sync`].
    pub fn write(&self, file: &Path, bytes: &[u8], replace: bool) -> Result<bool, TransferError> {
        self.try_write(file, bytes, replace).map_err(files(file))
    }

    fn try_write(&self, file: &Path, bytes: &[u8], replace: bool) -> io::Result<bool> {
        let directory = file.parent().unwrap_or(Path::new("/"));
        // Chunks are memory of guests.
        DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(directory)?;
        let (part, mut open) = new_part(file)?;
        let written = open
            .write_all(bytes)
            .and_then(|()| open.sync_all())
            .and_then(|()| {
                if replace {
                    return fs::rename(&part, file).map(|()| true);
                }
                match fs::hard_link(&part, file) {
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
                    linked => linked.map(|()| true),
                }
            });
        if !(replace && written.is_ok()) {
            // A part that stays is no object: lists leave it out, and `remove_parts` removes it.
            let _ = fs::remove_file(&part);
        }
        self.touched(file);
        written
    }

    /// Removes parts of objects in these directories that were last changed before `before`: pushes
    /// that were killed have left them. Returns their number, and the bytes that they took.
    pub fn remove_parts(
        &self,
        directories: &[PathBuf],
        before: SystemTime,
    ) -> Result<(u64, u64), TransferError> {
        let (mut parts, mut bytes) = (0, 0);
        for directory in directories {
            let entries = match fs::read_dir(directory) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                opened => opened.map_err(files(directory))?,
            };
            for entry in entries {
                let entry = entry.map_err(files(directory))?;
                let removed = remove_part(&entry, before).map_err(files(&entry.path()))?;
                if let Some(length) = removed {
                    parts += 1;
                    bytes += length;
                    self.touched(&entry.path());
                }
            }
        }
        Ok((parts, bytes))
    }

    /// Syncs the names of all objects that were written or removed.
    pub fn sync(&self) -> Result<(), TransferError> {
        let directories = self.unsynced.lock().clone();
        for directory in directories {
            let synced = File::open(&directory).and_then(|open| open.sync_all());
            synced.map_err(files(&directory))?;
            self.unsynced.lock().remove(&directory);
        }
        Ok(())
    }

    /// Notes that the object's name must be synced: it was written or removed, or another push,
    /// which may have been killed since, has written it. Such a push may also have made the
    /// directories above it, so their names are synced, too.
    pub fn touched(&self, file: &Path) {
        let above = file.ancestors().skip(1);
        let inside = above.take_while(|place| place.starts_with(&self.root));
        self.unsynced.lock().extend(inside.map(Path::to_owned));
    }
}

/// Removes a file if it is a part of an object that was last changed before `before`. Returns its
/// length; `None` if it is another file, or another host has removed it.
fn remove_part(entry: &DirEntry, before: SystemTime) -> io::Result<Option<u64>> {
    if !is_part(&entry.file_name()) {
        return Ok(None);
    }
    let done = entry.metadata().and_then(|facts| {
        let is_old = facts.is_file() && facts.modified()? < before;
        if !is_old {
            return Ok(None);
        }
        fs::remove_file(entry.path())?;
        Ok(Some(facts.len()))
    });
    match done {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        done => done,
    }
}

/// Returns whether a file has a name that [`new_part`] gives to parts of objects: of those that are
/// named by a hash, and of descriptions. A directory may hold files of other programs.
fn is_part(name: &OsStr) -> bool {
    let name = name.to_str().and_then(|name| name.split_once('#'));
    name.is_some_and(|(object, number)| {
        let is_snapshot = |name: &str| memfold_vm::check_name("snapshot", name).is_ok();
        let is_object = blake3::Hash::from_hex(object).is_ok()
            || object.strip_suffix(".json").is_some_and(is_snapshot);
        is_object && number.parse::<u64>().is_ok()
    })
}

/// Creates the file that becomes an object: with `#` and a number, as the `object_store` crate
/// names such files, which it does not list.
fn new_part(file: &Path) -> io::Result<(PathBuf, File)> {
    let mut number = 1_u64;
    loop {
        let mut part = file.as_os_str().to_owned();
        part.push(format!("#{number}"));
        let part = PathBuf::from(part);
        let mut options = File::options();
        options.write(true).create_new(true).mode(0o600);
        match options.open(&part) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            opened => return opened.map(|open| (part, open)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn an_object_of_a_directory_is_written_replaced_or_kept_and_no_part_of_it_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let store = store(directory.path());
        let file = directory.path().join("chunks/aa/object");
        assert!(store.write(&file, b"first", false).unwrap());
        assert!(!store.write(&file, b"second", false).unwrap());
        assert_eq!(fs::read(&file).unwrap(), b"first");
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&file), 0o600);
        assert_eq!(mode(&directory.path().join("chunks")), 0o700);
        // A push that was killed has left a part.
        fs::write(directory.path().join("chunks/aa/object#1"), "part").unwrap();
        assert!(store.write(&file, b"third", true).unwrap());
        assert_eq!(fs::read(&file).unwrap(), b"third");
        let names = fs::read_dir(file.parent().unwrap()).unwrap().flatten();
        let mut names: Vec<_> = names.map(|entry| entry.file_name()).collect();
        names.sort();
        assert_eq!(names, ["object", "object#1"]);
        check_unsynced(&store);
        store.sync().unwrap();
        assert!(store.unsynced.lock().is_empty());
    }

    #[test]
    fn the_names_of_directories_that_a_failed_push_has_made_are_synced_by_the_next_push() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("chunks/aa/object");
        let failed = store(directory.path());
        assert!(failed.write(&file, b"first", false).unwrap());
        drop(failed);
        let writes = store(directory.path());
        let other = file.with_file_name("other");
        assert!(writes.write(&other, b"second", false).unwrap());
        check_unsynced(&writes);
        let finds = store(directory.path());
        finds.touched(&file);
        check_unsynced(&finds);
    }

    #[test]
    fn the_top_directory_can_be_a_store() {
        let store = store(Path::new("/"));
        assert_eq!(store.root, Path::new("/"));
    }

    fn store(root: &Path) -> LocalStore {
        let root = object_store::path::Path::from_absolute_path(root).unwrap();
        LocalStore::new(&root).unwrap()
    }

    /// Checks that all directories down to `chunks/aa` will be synced, and none outside the store.
    fn check_unsynced(store: &LocalStore) {
        let place = |below: &str| store.root.join(below);
        let all = BTreeSet::from([store.root.clone(), place("chunks"), place("chunks/aa")]);
        assert_eq!(*store.unsynced.lock(), all);
    }
}

//! Draft: a snapshot that is being saved, or copied from an object store. A draft is a locked
//! directory. When the snapshot is complete, the directory is renamed to the snapshot's name. After
//! a failed save, the directory is removed. After an interrupted copy, the directory stays, and the
//! next attempt continues it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use xxhash_rust::xxh3::xxh3_128;

use super::error::{SnapshotError, failed};
use super::links::real;
use super::manifest::{MANIFEST, MANIFEST_SUM, Manifest, RAM, hex, read_manifest};

/// How often, and after which pauses, a draft that comes from elsewhere is locked.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// Directory of a snapshot that is being saved or pulled. If the value is dropped before
/// [`Draft::commit`], the directory of a save is removed, and the directory of a pull stays.
#[derive(Debug)]
pub struct Draft {
    /// Present path of the draft.
    pub(super) path: PathBuf,
    /// Path of the finished snapshot.
    pub(super) place: PathBuf,
    /// Whether the directory stays when the value is dropped.
    stays: bool,
    _lock: File,
}

impl Draft {
    /// Creates the draft of snapshot `name` in the directory of all snapshots, `root`. The finished
    /// snapshot will be at `place`.
    pub(super) fn begin(root: &Path, place: PathBuf, name: &str) -> Result<Self, SnapshotError> {
        if place.exists() {
            return Err(SnapshotError::Taken(name.into()));
        }
        Self::begin_replacement(root, place, name)
    }

    /// Creates a draft that will replace the snapshot at `place`.
    pub(super) fn begin_replacement(
        root: &Path,
        place: PathBuf,
        name: &str,
    ) -> Result<Self, SnapshotError> {
        let path = root.join(format!(".{name}.draft"));
        let failed = failed(path.as_path());
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        builder.recursive(true).create(root).map_err(failed)?;
        builder.recursive(false);
        match builder.create(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                remove_leftover(&path, name)?;
                builder.create(&path).map_err(failed)?;
            }
            other => other.map_err(failed)?,
        }
        let lock = File::open(&path).map_err(failed)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|errno| failed(errno.into()))?;
        // Another save may have taken the new directory for a leftover.
        if !is_at(&lock, &path) {
            return Err(SnapshotError::Taken(name.into()));
        }
        Ok(Self {
            path,
            place,
            stays: false,
            _lock: lock,
        })
    }

    /// Returns the directory of a pull of snapshot `name`.
    pub(super) fn of_pull(root: &Path, name: &str) -> PathBuf {
        root.join(format!(".{name}.pull"))
    }

    /// Begins or continues a snapshot that comes from elsewhere. Its directory stays when the value
    /// is dropped, so that what has arrived need not be fetched again.
    pub(super) fn resume(root: &Path, place: PathBuf, name: &str) -> Result<Self, SnapshotError> {
        let path = Self::of_pull(root, name);
        if is_taken(&place, &path) {
            return Err(SnapshotError::Taken(name.into()));
        }
        let failed = failed(path.as_path());
        let mut builder = DirBuilder::new();
        builder.mode(0o700).recursive(true);
        builder.create(&path).map_err(failed)?;
        let lock = File::open(&path).map_err(failed)?;
        // A process that is just being started holds the descriptors of this one until its `exec`,
        // and with them the lock of a pull that has ended.
        let mut tries = LOCK_TRIES;
        while flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            tries -= 1;
            if tries == 0 {
                return Err(SnapshotError::Busy(format!(
                    "snapshot '{name}' is being pulled already; wait until that ends"
                )));
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        // Whoever had the lock before may have finished or removed the directory.
        if is_taken(&place, &path) || !is_at(&lock, &path) {
            return Err(SnapshotError::Taken(name.into()));
        }
        hide(&place, &path).map_err(failed)?;
        // A pull that was interrupted at its very end has left a manifest: the draft must not look
        // complete while its files are written.
        for part in [MANIFEST, MANIFEST_SUM] {
            match fs::remove_file(path.join(part)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
                _ => {}
            }
        }
        Ok(Self {
            path,
            place,
            stays: true,
            _lock: lock,
        })
    }

    /// Makes the files of a pull visible at their final paths, for VMs that start before all have
    /// arrived. The snapshot is not listed yet.
    pub fn show(&self) -> Result<(), SnapshotError> {
        let name = self.path.file_name().unwrap_or_default();
        std::os::unix::fs::symlink(name, &self.place).map_err(failed(&self.place))
    }

    /// Takes back what [`Draft::show`] has done.
    pub fn hide(&self) -> Result<(), SnapshotError> {
        hide(&self.place, &self.path).map_err(failed(&self.place))
    }

    /// Returns a function that adds the path of one of the draft's files to an I/O error.
    pub(super) fn failed(&self, part: &str) -> impl Fn(io::Error) -> SnapshotError + use<> {
        let path = self.path.join(part);
        move |source| failed(&path)(source)
    }

    /// Returns the present path of the draft's directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path that the directory will have as a finished snapshot.
    #[must_use]
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Creates the file `part` in the draft's directory, open for reading and writing. Fails if the
    /// file exists.
    pub fn file(&self, part: &str) -> Result<File, SnapshotError> {
        let path = self.path.join(part);
        File::create_new(&path).map_err(failed(&path))
    }

    /// Writes the manifest last, and syncs all files to disk: the snapshot's own, and those of the
    /// snapshots that it needs. The layer of forks is synced later ([`sync_fork`]).
    fn write(&self, manifest: &Manifest) -> Result<(), SnapshotError> {
        let write = || -> io::Result<()> {
            let text = serde_json::to_vec_pretty(manifest).map_err(io::Error::other)?;
            fs::write(self.path.join(MANIFEST), &text)?;
            let sum = format!("{}\n", hex(xxh3_128(&text)));
            fs::write(self.path.join(MANIFEST_SUM), sum)?;
            if manifest.fork {
                return Ok(());
            }
            for needed in self.needed(manifest) {
                sync_snapshot(&needed)?;
            }
            sync_directory(&self.path)
        };
        write().map_err(failed(&self.path))
    }

    /// Returns the directories of the snapshots that this one needs.
    fn needed(&self, manifest: &Manifest) -> BTreeSet<PathBuf> {
        let Some(root) = self.place.parent().map(real) else {
            return BTreeSet::new();
        };
        let parent = manifest.parent.iter().map(|parent| root.join(&parent.name));
        let files = manifest.outside().into_iter();
        let places = files.filter_map(|file| real(&file).parent().map(Path::to_owned));
        let of_shelf = places.filter(|place| place.parent() == Some(&root));
        let own = real(&self.place);
        parent
            .chain(of_shelf)
            .filter(|place| *place != own)
            .collect()
    }

    /// Syncs the directory of all snapshots. A crash before this leaves a draft or a snapshot, and
    /// both are valid.
    fn sync_parent(&self) -> Result<(), SnapshotError> {
        let Some(parent) = self.place.parent() else {
            return Ok(());
        };
        let synced = File::open(parent).and_then(|dir| dir.sync_all());
        synced.map_err(failed(parent))
    }

    /// Turns the draft into a snapshot. After an error, there is no snapshot.
    pub fn commit(mut self, manifest: &Manifest) -> Result<(), SnapshotError> {
        self.write(manifest)?;
        self.hide()?;
        if self.place.exists() {
            // A pull and a save of one name have run side by side.
            return Err(SnapshotError::Taken(manifest.name.clone()));
        }
        fs::rename(&self.path, &self.place).map_err(failed(&self.place))?;
        if !manifest.fork {
            if let Err(error) = self.sync_parent() {
                // Whoever saves takes the disks back then, so the snapshot must not stay.
                self.stays |= fs::rename(&self.place, &self.path).is_err();
                return Err(error);
            }
        }
        self.stays = true;
        Ok(())
    }

    /// Puts the draft in the place of the snapshot that it replaces, at one instant, and removes
    /// that snapshot's files. A draft that cannot be read is an error, and replaces nothing.
    pub(super) fn replace(self, manifest: &Manifest) -> Result<(), SnapshotError> {
        self.write(manifest)?;
        read_manifest(&self.path, &manifest.name)?;
        renameat_with(CWD, &self.path, CWD, &self.place, RenameFlags::EXCHANGE)
            .map_err(|errno| failed(&self.place)(errno.into()))?;
        // The replaced files are the draft now, and go with it.
        self.sync_parent()
    }
}

/// Returns whether the open file or directory is the one at `path` now.
pub(super) fn is_at(open: &File, path: &Path) -> bool {
    open.metadata().is_ok_and(|held| {
        fs::metadata(path).is_ok_and(|now| (now.dev(), now.ino()) == (held.dev(), held.ino()))
    })
}

/// Removes a draft that a failed save or a failed removal of a snapshot has left, because its files
/// could not be removed then. A draft that is in use is locked, and stays.
pub(super) fn remove_leftover(path: &Path, name: &str) -> Result<(), SnapshotError> {
    let taken = || SnapshotError::Taken(name.into());
    let lock = File::open(path).map_err(|_| taken())?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| taken())?;
    if !is_at(&lock, path) {
        return Err(taken());
    }
    fs::remove_dir_all(path).map_err(failed(path))
}

/// Removes what daemons that have died have left in the directory of all snapshots: drafts of
/// saves, and links to pulls that no daemon will finish.
pub(super) fn clean_up(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        let hidden = name.strip_prefix('.');
        // A draft on which another daemon works is locked.
        let lock = |dir| flock(dir, FlockOperation::NonBlockingLockExclusive).is_ok();
        let is_unused = || File::open(&path).is_ok_and(lock);
        let saved = hidden.and_then(|name| name.strip_suffix(".draft"));
        if saved.is_some() && is_unused() {
            if let Err(error) = fs::remove_dir_all(&path) {
                tracing::warn!(path = %path.display(), %error, "cannot remove the draft directory of an interrupted snapshot; remove the directory by hand");
            }
        }
        let pulled = hidden.and_then(|name| name.strip_suffix(".pull"));
        let will_end = |name: &str| stream_request(root, name).exists();
        if let Some(pulled) = pulled.filter(|name| !will_end(name) && is_unused()) {
            // The name would be taken by a snapshot that is not listed.
            if let Err(error) = hide(&root.join(pulled), &path) {
                tracing::warn!(snapshot = pulled, %error, "cannot remove the link to an interrupted pull; remove the link by hand, because no snapshot can have its name");
            }
        }
    }
}

/// Returns the file that says how a snapshot, which VMs use already, is fetched further.
pub(super) fn stream_request(root: &Path, name: &str) -> PathBuf {
    root.join(format!(".{name}.stream"))
}

/// Returns whether `place` is the link to the draft at `path` that [`Draft::show`] has made.
fn is_shown(place: &Path, path: &Path) -> bool {
    fs::read_link(place).is_ok_and(|target| Some(target.as_os_str()) == path.file_name())
}

/// Returns whether there is a snapshot at `place`, or anything else but the link to the draft.
fn is_taken(place: &Path, path: &Path) -> bool {
    !is_shown(place, path) && fs::symlink_metadata(place).is_ok()
}

/// Removes the link that [`Draft::show`] has made.
fn hide(place: &Path, path: &Path) -> io::Result<()> {
    if is_shown(place, path) {
        fs::remove_file(place)?;
    }
    Ok(())
}

/// Syncs the memory of a layer of forks to disk. Called before a VM maps the layer: after a failed
/// write, the kernel may drop the bytes, and the VM's memory would change. The kernel reports the
/// failure only once, so the layer is made unusable then. Other files of the layer are not synced,
/// because the VMs that need them do not outlast a crash of the host either.
pub(super) fn sync_fork(place: &Path) -> Result<(), SnapshotError> {
    let ram = place.join(RAM);
    let synced = File::open(&ram).and_then(|file| file.sync_data());
    let is_usable = || place.join(MANIFEST_SUM).exists();
    let lost =
        || io::Error::other("an earlier write of the layer to the disk failed; fork the VM again");
    synced
        .and_then(|()| is_usable().then_some(()).ok_or_else(lost))
        .map_err(|error| unusable(place, error))
        .map_err(failed(&ram))
}

/// Makes a layer unusable whose bytes did not reach the disk.
fn unusable(place: &Path, error: io::Error) -> io::Error {
    let removed = fs::remove_file(place.join(MANIFEST_SUM));
    tracing::warn!(path = %place.display(), %error, is_unusable = removed.is_ok(), "cannot write the memory of a fork to the disk, so no VM starts from this layer; check the disk, and fork the VM again");
    error
}

/// Syncs a snapshot that another one needs. Layers of forks were perhaps never synced.
fn sync_snapshot(place: &Path) -> io::Result<()> {
    let of_forks = |name: &str| read_manifest(place, name).is_ok_and(|manifest| manifest.fork);
    let name = place.file_name().and_then(OsStr::to_str);
    let is_of_forks = name.is_some_and(of_forks);
    sync_directory(place).map_err(|error| {
        if is_of_forks {
            unusable(place, error)
        } else {
            error
        }
    })
}

/// Syncs a directory and the files in it to disk.
fn sync_directory(place: &Path) -> io::Result<()> {
    for entry in fs::read_dir(place)?.flatten() {
        File::open(entry.path())?.sync_all()?;
    }
    File::open(place)?.sync_all()
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.stays {
            if let Err(error) = fs::remove_dir_all(&self.path) {
                tracing::warn!(path = %self.path.display(), %error, "cannot remove the draft directory of a failed snapshot; remove the directory by hand");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use memfold_units::ByteSize;

    use super::*;
    use crate::manifest::tests::manifest;

    #[test]
    fn a_draft_that_a_failed_save_has_left_is_replaced_by_the_next_one_unless_it_is_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let left = root.join(".a.draft");
        fs::create_dir(&left).unwrap();
        fs::write(left.join(RAM), "old").unwrap();
        let draft = Draft::begin(root, root.join("a"), "a").unwrap();
        assert!(!draft.path().join(RAM).exists());
        draft.file(RAM).unwrap();
        let second = Draft::begin(root, root.join("a"), "a");
        assert!(matches!(second, Err(SnapshotError::Taken(_))));
        assert!(draft.path().join(RAM).exists());
        drop(draft);
        assert!(!left.exists());
    }

    #[test]
    fn a_draft_that_cannot_be_read_replaces_no_snapshot() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let place = root.join("a");
        let manifest = manifest("a", ByteSize::mib(64));
        let fill = |draft: &Draft, parts: &[&str]| {
            for part in parts {
                draft.file(part).unwrap();
            }
        };
        let draft = Draft::begin(root, place.clone(), "a").unwrap();
        fill(&draft, &[RAM, "ram.sums", "devices"]);
        draft.commit(&manifest).unwrap();
        let inode = |place: &Path| fs::metadata(place).unwrap().ino();
        let before = inode(&place);
        let draft = Draft::begin_replacement(root, place.clone(), "a").unwrap();
        fill(&draft, &[RAM, "ram.sums"]);
        let why = draft.replace(&manifest).unwrap_err().to_string();
        assert!(why.contains("devices"), "{why}");
        assert_eq!(inode(&place), before);
        assert!(read_manifest(&place, "a").is_ok());
        // The directory of the draft is gone, and the next draft replaces the snapshot.
        let draft = Draft::begin_replacement(root, place.clone(), "a").unwrap();
        fill(&draft, &[RAM, "ram.sums", "devices"]);
        draft.replace(&manifest).unwrap();
        assert_ne!(inode(&place), before);
    }

    #[test]
    fn a_manifest_is_read_whole_while_its_snapshot_is_replaced() {
        const ROUNDS: u64 = 200;
        let directory = tempfile::tempdir().unwrap();
        let (root, place) = (directory.path(), directory.path().join("a"));
        let begin = |round| {
            let draft = Draft::begin_replacement(root, place.clone(), "a").unwrap();
            for part in [RAM, "ram.sums", "devices"] {
                draft.file(part).unwrap();
            }
            let mut next = manifest("a", ByteSize::mib(64));
            next.created_s = round;
            (draft, next)
        };
        let (draft, first) = begin(0);
        draft.commit(&first).unwrap();
        let reads = AtomicU64::new(0);
        let mut wrong = Vec::new();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for round in 1..=ROUNDS {
                    let (draft, next) = begin(round);
                    draft.replace(&next).unwrap();
                    // No read sees two exchanges.
                    let before = reads.load(Ordering::Relaxed);
                    while reads.load(Ordering::Relaxed) < before + 2 {
                        std::thread::yield_now();
                    }
                }
            });
            while !writer.is_finished() {
                wrong.extend(read_manifest(&place, "a").err());
                reads.fetch_add(1, Ordering::Relaxed);
            }
            writer.join().unwrap();
        });
        assert!(wrong.is_empty(), "{wrong:?}");
        assert_eq!(read_manifest(&place, "a").unwrap().created_s, ROUNDS);
    }

    #[test]
    fn a_draft_finds_the_snapshots_it_needs_by_another_spelling_of_the_directory() {
        let directory = tempfile::tempdir().unwrap();
        let (root, link) = (directory.path().join("root"), directory.path().join("link"));
        fs::create_dir_all(root.join("p")).unwrap();
        fs::write(root.join("p/kernel"), "").unwrap();
        std::os::unix::fs::symlink(&root, &link).unwrap();
        let mut manifest = manifest("a", ByteSize::mib(64));
        manifest.spec.boot.kernel = Some(root.join("p/kernel"));
        let draft = Draft::begin(&link, link.join("a"), "a").unwrap();
        let needed = BTreeSet::from([real(&root.join("p"))]);
        assert_eq!(draft.needed(&manifest), needed);
    }

    #[test]
    fn a_pull_leaves_alone_what_another_pull_shows_and_begins_without_an_old_manifest() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let place = root.join("a");
        let draft = Draft::resume(root, place.clone(), "a").unwrap();
        draft.show().unwrap();
        fs::write(draft.path().join(MANIFEST), "old").unwrap();
        // The draft is locked: a second pull does not touch the link.
        let why = Draft::resume(root, place.clone(), "a").unwrap_err();
        assert!(why.to_string().contains("being pulled already"), "{why}");
        assert!(place.join(MANIFEST).exists());
        drop(draft);
        let draft = Draft::resume(root, place.clone(), "a").unwrap();
        assert!(fs::symlink_metadata(&place).is_err());
        assert!(!draft.path().join(MANIFEST).exists());
        drop(draft);
        // A link to somewhere else is not the pull's.
        std::os::unix::fs::symlink(root.join("elsewhere"), &place).unwrap();
        let why = Draft::resume(root, place.clone(), "a").unwrap_err();
        assert!(matches!(why, SnapshotError::Taken(_)), "{why}");
        assert!(fs::symlink_metadata(&place).is_ok());
    }

    #[test]
    fn the_link_of_a_pull_that_no_daemon_will_finish_is_removed_at_the_next_start() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let begin = |name: &str| {
            let draft = Draft::resume(root, root.join(name), name).unwrap();
            draft.show().unwrap();
            draft
        };
        drop(begin("lost"));
        drop(begin("resumed"));
        fs::write(stream_request(root, "resumed"), "{}").unwrap();
        let _running = begin("running");
        clean_up(root);
        let is_taken = |name: &str| fs::symlink_metadata(root.join(name)).is_ok();
        assert!(is_taken("resumed") && is_taken("running"));
        assert!(!is_taken("lost"));
        // What has arrived need not be fetched again.
        assert!(Draft::of_pull(root, "lost").exists());
        Draft::begin(root, root.join("lost"), "lost").unwrap();
    }

    #[test]
    fn if_the_saved_memory_of_a_fork_cannot_be_synced_to_disk_the_saved_memory_is_unusable() {
        let place = tempfile::tempdir().unwrap();
        let draft = |name: &str, fork: bool| {
            let draft = Draft::begin(place.path(), place.path().join(name), name).unwrap();
            for part in [RAM, "ram.sums", "devices"] {
                draft.file(part).unwrap();
            }
            let manifest = Manifest {
                fork,
                ..manifest(name, ByteSize::mib(64))
            };
            draft.commit(&manifest).unwrap();
            place.path().join(name)
        };
        let is_usable = |place: &Path, name: &str| read_manifest(place, name).is_ok();
        let layer = draft("layer", true);
        sync_fork(&layer).unwrap();
        assert!(is_usable(&layer, "layer"));
        // A missing file stands for a failed disk.
        fs::rename(layer.join(RAM), layer.join("moved")).unwrap();
        sync_fork(&layer).unwrap_err();
        fs::rename(layer.join("moved"), layer.join(RAM)).unwrap();
        assert!(!is_usable(&layer, "layer"));
        // The kernel reports a failed write only once, and another start may come later.
        let again = sync_fork(&layer).unwrap_err();
        let why = std::error::Error::source(&again).unwrap().to_string();
        assert!(why.contains("fork the VM again"), "{why}");
        let whole = draft("whole", false);
        sync_snapshot(&whole).unwrap();
        assert!(is_usable(&whole, "whole"));
    }
}

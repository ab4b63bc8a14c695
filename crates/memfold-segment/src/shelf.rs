//! The directory that contains all segments of a host (in the code: shelf). Each build of a segment
//! makes a numbered subdirectory, a *generation*, with an image and its description. The
//! subdirectory gets its number only when it is complete.
//!
//! ```text
//!   SHELF/NAME/GENERATION/    image            what VMs map, read-only and (where the file system can) immutable
//!                             manifest.json    description of the generation
//!   SHELF/NAME/writer         name of the VM that writes the next generation, if one does
//!   SHELF/.NAME.last          number of the last generation, even if it was removed: numbers are not used again
//!   SHELF/.NAME.draft/        a build in progress (locked), or interrupted (removed by the next daemon)
//!   RUNTIME/NAME@GENERATION   a pinned segment's copy in memory (tmpfs), while VMs use it
//! ```

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memfold_host::progress::Progress;
use memfold_store::{StoreIdentity, mapped};
use memfold_vm::missing_is_fine;
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, IFlags, flock, ioctl_getflags, ioctl_setflags};
use rustix::process::Pid;

use super::error::{SegmentError, broken, failed};
use super::manifest::{FORMAT, Manifest};
use super::name::Reference;
use super::tree::sum_up;

/// Default path of the directory of all segments.
pub const DEFAULT_SHELF: &str = "/var/lib/memfold/segments";

/// Name of the image, the file that VMs map, in a generation's directory.
pub const IMAGE: &str = "image";
const MANIFEST: &str = "manifest.json";
const WRITER: &str = "writer";

/// File system type of a tmpfs: `TMPFS_MAGIC` of `linux/magic.h`.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The directory of all segments of a host.
#[derive(Clone, Debug)]
pub struct Shelf {
    root: PathBuf,
    /// Directory of images that are kept in memory; refused if it is not on a tmpfs.
    runtime: PathBuf,
    /// Images whose digest was verified, each with the stamp of the file at that time.
    right: Arc<Mutex<HashMap<PathBuf, Stamp>>>,
    /// Held while a copy is put into memory, because two threads would write the same file.
    pinning: Arc<Mutex<()>>,
    /// Held while a generation's directory is created or removed.
    naming: Arc<Mutex<()>>,
}

/// Facts about a file that change as soon as the file is written to or replaced.
type Stamp = (u64, u64, u64, i64, i64, i64, i64);

fn stamp(facts: &fs::Metadata) -> Stamp {
    (
        facts.dev(),
        facts.ino(),
        facts.len(),
        facts.mtime(),
        facts.mtime_nsec(),
        facts.ctime(),
        facts.ctime_nsec(),
    )
}

impl Shelf {
    /// Opens the directory of segments `root`, which need not exist yet. Copies of images that are
    /// kept in memory are in `runtime`, which must be on a tmpfs. Removes the unfinished builds of
    /// daemons that died.
    pub fn open(root: &Path, runtime: &Path) -> Self {
        for entry in fs::read_dir(root).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with('.') && name.ends_with(".part") {
                let _ = fs::remove_file(entry.path());
                continue;
            }
            let is_draft = name.starts_with('.') && name.ends_with(".draft");
            // A draft that another daemon works on is locked.
            let is_left = is_draft
                && File::open(entry.path())
                    .is_ok_and(|dir| flock(&dir, FlockOperation::NonBlockingLockExclusive).is_ok());
            if is_left {
                if let Err(error) = fs::remove_dir_all(entry.path()) {
                    tracing::warn!(path = %entry.path().display(), %error, "cannot remove the draft directory of an interrupted segment build; remove the directory by hand");
                }
            }
        }
        let shelf = Self {
            // The path must be absolute, because QEMU gets it.
            root: std::path::absolute(root).unwrap_or_else(|_| root.into()),
            runtime: std::path::absolute(runtime).unwrap_or_else(|_| runtime.into()),
            right: Arc::default(),
            pinning: Arc::default(),
            naming: Arc::default(),
        };
        // A daemon may have died before it protected an image, or while it removed one.
        for manifest in shelf.all().unwrap_or_default() {
            protect(&shelf.stored_image(&manifest), true);
        }
        shelf
    }

    /// Returns the number of the generation that the next build of segment `name` will make,
    /// from 1. Numbers are not used again.
    pub fn next_generation(&self, name: &str) -> Result<u32, SegmentError> {
        let newest = self.generations(name)?.last().copied().unwrap_or(0);
        let last = fs::read_to_string(self.last(name)).ok();
        let last = last.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        Ok(newest.max(last) + 1)
    }

    fn last(&self, name: &str) -> PathBuf {
        self.root.join(format!(".{name}.last"))
    }

    /// Returns the generations of a segment, in order; none if there is no such segment.
    fn generations(&self, name: &str) -> Result<Vec<u32>, SegmentError> {
        let place = self.root.join(name);
        let mut found: Vec<u32> = names(&place)?
            .iter()
            // A directory without a manifest is not complete, or is being removed.
            .filter(|name| place.join(name).join(MANIFEST).exists())
            .filter_map(|name| name.parse().ok())
            .collect();
        found.sort_unstable();
        Ok(found)
    }

    /// Returns the manifests of all generations (images) of all segments, sorted by name and
    /// number. Generations whose manifest cannot be read are logged and left out.
    pub fn all(&self) -> Result<Vec<Manifest>, SegmentError> {
        let mut names = names(&self.root)?;
        names.retain(|name| !name.starts_with('.'));
        names.sort();
        let mut all = Vec::new();
        for name in names {
            for generation in self.generations(&name)? {
                match self.manifest_of(&name, generation) {
                    Ok(manifest) => all.push(manifest),
                    Err(error) => {
                        let error: &dyn std::error::Error = &error;
                        tracing::warn!(segment = %format_args!("{name}@{generation}"), error, "cannot read the segment, so no VM can map the segment; build the segment again");
                    }
                }
            }
        }
        Ok(all)
    }

    /// Returns the manifest of the newest generation (image) of segment `name`; `None` if there is
    /// none.
    pub fn newest(&self, name: &str) -> Result<Option<Manifest>, SegmentError> {
        let generations = self.generations(name)?;
        let newest = generations.last();
        newest.map(|&n| self.manifest_of(name, n)).transpose()
    }

    /// Returns the manifest of the generation that the reference names; without a number, of the
    /// segment's newest generation.
    pub fn manifest(&self, reference: &Reference) -> Result<Manifest, SegmentError> {
        match reference.generation {
            Some(generation) => self.manifest_of(&reference.name, generation),
            None => (self.newest(&reference.name)?)
                .ok_or_else(|| SegmentError::Unknown(reference.to_string())),
        }
    }

    fn manifest_of(&self, name: &str, generation: u32) -> Result<Manifest, SegmentError> {
        let reference = format!("{name}@{generation}");
        let path = self.place(name, generation).join(MANIFEST);
        let text = fs::read(&path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => SegmentError::Unknown(reference.clone()),
            _ => failed(&path)(source),
        })?;
        let broken = |why| broken(&reference, why);
        let unreadable = |error| broken(format!("{MANIFEST}: {error}"));
        let value: serde_json::Value = serde_json::from_slice(&text).map_err(unreadable)?;
        if value["format"] != FORMAT {
            return Err(broken(format!(
                "the format is {}, this memfold reads format {FORMAT} only",
                value["format"]
            )));
        }
        let manifest: Manifest = serde_json::from_value(value).map_err(unreadable)?;
        match manifest.reference() {
            own if own == reference => Ok(manifest),
            other => Err(broken(format!("{MANIFEST} belongs to {other}"))),
        }
    }

    fn place(&self, name: &str, generation: u32) -> PathBuf {
        self.root.join(name).join(generation.to_string())
    }

    fn stored_image(&self, manifest: &Manifest) -> PathBuf {
        self.place(&manifest.name, manifest.generation).join(IMAGE)
    }

    fn pinned_image(&self, manifest: &Manifest) -> PathBuf {
        self.runtime.join(manifest.reference())
    }

    fn images(&self, manifest: &Manifest) -> [PathBuf; 2] {
        [self.stored_image(manifest), self.pinned_image(manifest)]
    }

    /// Returns the manifest of a segment and the path of the image that VMs map. The image's digest
    /// is verified first, unless this was done since the file's last change. The image of a pinned
    /// segment is copied into memory first.
    pub fn image(&self, reference: &Reference) -> Result<(Manifest, PathBuf), SegmentError> {
        let manifest = self.manifest(reference)?;
        let stored = self.stored_image(&manifest);
        if !manifest.pinned {
            self.check(&manifest, &stored)?;
            return Ok((manifest, stored));
        }
        let _alone = self.pinning.lock();
        let pinned = self.pinned_image(&manifest);
        if self.check(&manifest, &pinned).is_ok() {
            return Ok((manifest, pinned));
        }
        let runtime = failed(&self.runtime);
        let mut builder = DirBuilder::new();
        builder.mode(0o700).recursive(true);
        builder.create(&self.runtime).map_err(&runtime)?;
        let place = rustix::fs::statfs(&self.runtime).map_err(|errno| runtime(errno.into()))?;
        if place.f_type != TMPFS_MAGIC {
            return Err(SegmentError::Impossible(format!(
                "cannot hold segment '{}' in memory, because {} is on a disk; start the daemon with --state on a tmpfs such as /run",
                manifest.reference(),
                self.runtime.display()
            )));
        }
        let part = self.runtime.join(format!(".{}", manifest.reference()));
        let copied = fs::copy(&stored, &part)
            .map_err(failed(&part))
            .and_then(|_| self.check(&manifest, &part))
            .and_then(|()| unpin(&pinned).map_err(failed(&pinned)))
            .and_then(|()| fs::rename(&part, &pinned).map_err(failed(&pinned)));
        if copied.is_err() {
            let _ = fs::remove_file(&part);
        }
        copied?;
        // tmpfs supports this since Linux 6.6.
        protect(&pinned, true);
        self.check(&manifest, &pinned)?;
        Ok((manifest, pinned))
    }

    /// Reads the whole image of a segment, and its copy in memory if there is one, and compares
    /// both with the digest in the manifest. Fails if one differs.
    pub fn verify(&self, reference: &Reference) -> Result<(), SegmentError> {
        let manifest = self.manifest(reference)?;
        let mut images = self.images(&manifest).into_iter().filter(|i| i.exists());
        images.try_for_each(|image| {
            self.right.lock().remove(&image);
            self.check(&manifest, &image)
        })
    }

    /// Compares an image with its digest, unless this was done since the image's last change.
    fn check(&self, manifest: &Manifest, image: &Path) -> Result<(), SegmentError> {
        let facts = fs::metadata(image).map_err(failed(image))?;
        let now = stamp(&facts);
        if self.right.lock().get(image) == Some(&now) {
            return Ok(());
        }
        let broken = |why| Err(broken(&manifest.reference(), why));
        if let Some(why) = wrong_length(manifest, &facts) {
            return broken(why);
        }
        if digest(image, &Progress::default()).map_err(failed(image))? != manifest.digest {
            return broken("the image was changed after the build".into());
        }
        self.right.lock().insert(image.to_owned(), now);
        Ok(())
    }

    /// Returns the reason why VMs cannot use a segment's image; `None` if they can. Does not read
    /// the whole image, but only checks that the file has the right length and was not changed
    /// since it was verified.
    #[must_use]
    pub fn problem(&self, manifest: &Manifest) -> Option<String> {
        let image = self.stored_image(manifest);
        let facts = match fs::metadata(&image) {
            Ok(facts) => facts,
            Err(error) => return Some(format!("{}: {error}", image.display())),
        };
        let seen = self.right.lock().get(&image).copied();
        if seen.is_some_and(|seen| seen != stamp(&facts)) {
            return Some("the image was changed or replaced after its check; running VMs keep what they map, new VMs are refused if it differs".into());
        }
        wrong_length(manifest, &facts)
    }

    /// Returns how a segment's image is protected against changes: `immutable` (file system flag),
    /// `memory` (only this daemon can access the copy in memory), or `nothing`.
    #[must_use]
    pub fn protection(&self, manifest: &Manifest) -> &'static str {
        let [stored, pinned] = self.images(manifest);
        let is_pinned = manifest.pinned && pinned.exists();
        let flags =
            File::open(if is_pinned { pinned } else { stored }).map(|file| ioctl_getflags(&file));
        match flags {
            Ok(Ok(flags)) if flags.contains(IFlags::IMMUTABLE) => "immutable",
            // Only this daemon can access the directory of the copy in memory.
            _ if manifest.pinned => "memory",
            _ => "nothing",
        }
    }

    /// Returns how many bytes of a segment's image are in the host's memory now.
    #[must_use]
    pub fn resident_bytes(&self, manifest: &Manifest) -> u64 {
        let [stored, pinned] = self.images(manifest);
        File::open(if manifest.pinned { pinned } else { stored })
            .ok()
            .and_then(|file| memfold_sys::page_cache::cached_pages(&file).ok())
            .map_or(0, |pages| pages * memfold_units::PAGE_SIZE)
    }

    /// Returns the identities (device and inode number) of a segment's image and of its copy in
    /// memory, as far as they exist.
    #[must_use]
    pub fn identities(&self, manifest: &Manifest) -> Vec<StoreIdentity> {
        let files = self.images(manifest).into_iter().map(fs::metadata);
        files.flatten().map(|f| StoreIdentity::from(&f)).collect()
    }

    /// Returns, for each segment in `manifests`, the processes (except this one) that map its
    /// image.
    pub fn users(&self, manifests: &[Manifest]) -> Result<Vec<Vec<Pid>>, SegmentError> {
        let texts = |manifest: &Manifest| {
            let files = self.identities(manifest).into_iter();
            files.map(mapped::identity_text).collect()
        };
        let texts: Vec<Vec<String>> = manifests.iter().map(texts).collect();
        mapped::processes_with(&texts).map_err(failed(Path::new("/proc")))
    }

    /// Returns the name of the VM in which files of segment `name` are changed for the next build;
    /// `None` if no VM is recorded. The VM may have ended since.
    #[must_use]
    pub fn writer(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.root.join(name).join(WRITER)).ok()
    }

    /// Records the VM in which files of segment `name` are changed for the next build; `None` means
    /// that there is none.
    pub fn set_writer(&self, name: &str, vm: Option<&str>) -> Result<(), SegmentError> {
        let place = self.root.join(name).join(WRITER);
        let written = match vm {
            Some(vm) => write_at_once(&place, vm),
            None => missing_is_fine(fs::remove_file(&place)),
        };
        written.map_err(failed(&place))
    }

    /// Creates the draft (directory) for a build of segment `name`. Fails if the segment is being
    /// built already.
    pub fn draft(&self, name: &str) -> Result<Draft, SegmentError> {
        let path = self.root.join(format!(".{name}.draft"));
        let mut builder = DirBuilder::new();
        let of_root = builder.mode(0o700).recursive(true).create(&self.root);
        of_root.map_err(failed(&self.root))?;
        match builder.recursive(false).create(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err(SegmentError::Busy(format!(
                    "segment '{name}' is already being built; wait until that build ends"
                )));
            }
            other => other.map_err(failed(&path))?,
        }
        let lock = File::open(&path).map_err(failed(&path))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|errno| failed(&path)(errno.into()))?;
        Ok(Draft { path, _lock: lock })
    }

    /// Makes the finished build in `draft` the segment's newest generation.
    pub fn publish(&self, draft: &Draft, manifest: &Manifest) -> Result<(), SegmentError> {
        let (image, facts) = (draft.path.join(IMAGE), draft.path.join(MANIFEST));
        let write = || -> io::Result<()> {
            fs::set_permissions(&image, fs::Permissions::from_mode(0o444))?;
            fs::write(&facts, serde_json::to_vec_pretty(manifest)?)?;
            File::open(&facts)?.sync_all()?;
            for part in ["source", "source.packages", "tree"] {
                missing_is_fine(fs::remove_dir_all(draft.path.join(part)))?;
            }
            File::open(&draft.path)?.sync_all()
        };
        write().map_err(failed(&draft.path))?;
        let place = self.place(&manifest.name, manifest.generation);
        let parent = self.root.join(&manifest.name);
        let name = || -> io::Result<()> {
            write_at_once(&self.last(&manifest.name), &manifest.generation.to_string())?;
            fs::create_dir_all(&parent)?;
            fs::rename(&draft.path, &place)?;
            File::open(&parent)?.sync_all()
        };
        let naming = self.naming.lock();
        name().map_err(failed(&place))?;
        drop(naming);
        let image = place.join(IMAGE);
        protect(&image, true);
        if let Ok(facts) = fs::metadata(&image) {
            self.right.lock().insert(image, stamp(&facts));
        }
        Ok(())
    }

    /// Removes a generation: its image, the copy in memory, and the manifest. The caller ensures
    /// that no VM uses the image.
    pub fn remove(&self, manifest: &Manifest) -> Result<(), SegmentError> {
        let place = self.place(&manifest.name, manifest.generation);
        let image = place.join(IMAGE);
        protect(&image, false);
        unpin(&self.pinned_image(manifest)).map_err(failed(&self.runtime))?;
        // The rename removes the generation at once (with the last generation, the whole segment).
        // If the deletion below is interrupted, the next daemon completes it.
        let gone = self.root.join(format!(".{}.draft", manifest.reference()));
        let naming = self.naming.lock();
        let is_last = self.generations(&manifest.name)? == [manifest.generation];
        let all = self.root.join(&manifest.name);
        let whole = if is_last { &all } else { &place };
        fs::rename(whole, &gone).map_err(failed(whole))?;
        drop(naming);
        fs::remove_dir_all(&gone).map_err(failed(&gone))?;
        self.right.lock().remove(&image);
        Ok(())
    }

    /// Removes the copies of pinned images from memory that no process maps.
    pub fn let_go(&self) {
        let mut pinned = self.all().unwrap_or_default();
        pinned.retain(|manifest| manifest.pinned);
        let Ok(users) = self.users(&pinned) else {
            return;
        };
        for (manifest, users) in pinned.iter().zip(users) {
            if users.is_empty() {
                let copy = self.pinned_image(manifest);
                if let Err(error) = unpin(&copy) {
                    tracing::warn!(copy = %copy.display(), %error, "cannot remove the segment's unused --pinned copy; remove the copy by hand");
                }
            }
        }
    }

    /// Clears the immutable file flag of all images, so that tests can remove the files.
    pub fn unprotect(&self) {
        for manifest in self.all().unwrap_or_default() {
            let images = self.images(&manifest).into_iter();
            images
                .filter(|i| i.exists())
                .for_each(|i| protect(&i, false));
        }
    }
}

/// Removes an image's copy in memory, if there is one.
fn unpin(copy: &Path) -> io::Result<()> {
    if !copy.exists() {
        return Ok(());
    }
    protect(copy, false);
    missing_is_fine(fs::remove_file(copy))
}

/// Returns the names in a directory; none if there is no such directory.
fn names(place: &Path) -> Result<Vec<String>, SegmentError> {
    let entries = match fs::read_dir(place) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed(place))?.flatten(),
    };
    Ok(entries
        .filter_map(|e| e.file_name().into_string().ok())
        .collect())
}

/// Writes a file. The rename makes the file appear with its whole content.
fn write_at_once(place: &Path, text: &str) -> io::Result<()> {
    let part = place.with_extension("part");
    let written = fs::write(&part, text).and_then(|()| fs::rename(&part, place));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written
}

fn wrong_length(manifest: &Manifest, image: &fs::Metadata) -> Option<String> {
    let (length, wanted) = (image.len(), manifest.image_bytes);
    (length != wanted).then(|| format!("the image has {length} bytes instead of {wanted}"))
}

/// Returns the BLAKE3 digest of a file, 64 hexadecimal digits.
pub(super) fn digest(path: &Path, progress: &Progress) -> io::Result<String> {
    let mut file = File::open(path)?;
    progress.begin("checksum made", file.metadata()?.len());
    let mut sum = blake3::Hasher::new();
    sum_up(&mut file, &mut sum, progress)?;
    Ok(sum.finalize().to_hex().to_string())
}

/// Sets or clears a file's immutable flag (`chattr +i`), because truncating the file would kill
/// every VM that maps it. Not every file system supports this.
fn protect(image: &Path, on: bool) {
    let set = || -> io::Result<()> {
        let file = File::open(image)?;
        let mut flags = ioctl_getflags(&file)?;
        flags.set(IFlags::IMMUTABLE, on);
        Ok(ioctl_setflags(&file, flags)?)
    };
    if let Err(error) = set() {
        tracing::debug!(image = %image.display(), %error, "cannot set the immutable flag on the segment's image");
    }
}

/// Directory of a build of a segment in progress. Dropping a draft that was not published removes
/// the directory.
#[derive(Debug)]
pub struct Draft {
    path: PathBuf,
    _lock: File,
}

impl Draft {
    /// Returns the path of the directory of the unfinished build.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // A published draft was renamed.
        if self.path.exists() {
            if let Err(error) = fs::remove_dir_all(&self.path) {
                tracing::warn!(path = %self.path.display(), %error, "cannot remove the draft directory of a failed segment build; remove the directory by hand");
            }
        }
    }
}

//! Prepares, mounts and unmounts the overlay file system that shows a segment's files in one
//! directory of the guest.

use std::ffi::CString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::StatVfsMountFlags;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::compare::Plan;
use super::error::{During, Error, Result, shown};
use super::manifest::overlap;
use super::mask;
use super::merge::{Merged, merge};
use super::mount_table::{Mount, MountTable};
use super::state::Places;
use super::tree;
use super::verify;
use crate::mounts::LAID_SOURCE;

/// `OVERLAYFS_SUPER_MAGIC` (include/uapi/linux/magic.h).
const OVERLAY_MAGIC: u32 = 0x794c_7630;
/// Mount options of the overlay, set explicitly because the kernel's defaults vary. With them,
/// files are found in lower layers by path only, and every file of the upper layer is complete.
/// Merging relies on both.
const OPTIONS: &str = "redirect_dir=nofollow,metacopy=off,index=off,xino=auto";
/// Name of the empty file in a layer's directory on disk that exists after the mounted overlay was
/// checked ([`Layer::verify`]).
const VERIFIED: &str = "verified";
/// Most bytes of mount options: `mount(2)` takes one page.
const MAX_OPTIONS: usize = 4095;

/// A guest directory and a segment, and the overlay directories (`mask`, `upper`, `work`) on disk
/// that belong to both.
pub struct Layer<'a> {
    places: &'a Places,
    name: &'a str,
    /// Path of the guest directory over which the segment is mounted.
    pub directory: &'a [u8],
    /// Path by which the agent opens the guest directory; differs from `directory` only in tests.
    pub point: PathBuf,
    /// Directory on the guest's disk that contains `mask`, `upper` and `work`.
    disk: PathBuf,
}

impl<'a> Layer<'a> {
    /// Creates the value for segment `name` and guest directory `directory`. Changes nothing on
    /// disk.
    pub fn new(places: &'a Places, name: &'a str, directory: &'a [u8]) -> Self {
        Self {
            places,
            name,
            directory,
            point: places.own(directory),
            disk: places.layer(name, directory),
        }
    }

    /// Returns the generation of the segment that is mounted over the guest directory; `None` if
    /// the topmost mount there is not the segment's overlay.
    pub fn laid(&self, table: &MountTable) -> Option<u64> {
        generation(table.at(&self.point)?, self.name)
    }

    /// Opens the guest's own directory, not the segment's; returns `None` if it does not exist.
    pub fn open_own(&self) -> Result<Option<OwnedFd>> {
        let root = tree::open(&self.places.root).during(|| "opening the guest's root".into())?;
        let inner = self.directory.strip_prefix(b"/").unwrap_or(self.directory);
        match tree::directory_on_any_mount(&root, inner) {
            Ok(own) => Ok(Some(own)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                Err(Error::refused(
                    format!("{} goes through a symbolic link", shown(self.directory)),
                    "lay the directory that the link leads to",
                ))
            }
            Err(e) => Err(e).during(|| format!("opening {}", self.point.display())),
        }
    }

    /// Creates the directory for the overlay directories on disk. Checks that it is on the same
    /// mount as the guest directory, because written files are merged back by renaming.
    pub fn prepare(&self, own: &OwnedFd, table: &MountTable) -> Result<()> {
        let what = || format!("making {}", self.disk.display());
        self.places.steps.step().during(what)?;
        let make = |mode: u32, path: &Path| {
            DirBuilder::new()
                .recursive(true)
                .mode(mode)
                .create(path)
                .during(what)
        };
        if let Some(parent) = self.places.state.parent() {
            make(0o755, parent)?;
        }
        make(0o700, &self.disk)?;
        let disk = tree::open(&self.disk).during(what)?;
        let magic = rustix::fs::fstatfs(&disk).during(what)?.f_type;
        if u32::try_from(magic) == Ok(OVERLAY_MAGIC) {
            return Err(Error::refused(
                format!(
                    "{} lies on an overlay, which cannot be the upper layer of another overlay",
                    self.disk.display()
                ),
                "boot this guest from a disk of its own; a guest whose root is a segment needs no laying",
            ));
        }
        if !tree::on_one_mount(&disk, own).during(what)? {
            return Err(Error::refused(
                format!(
                    "{} and {} are not on the same mount, so writes could not be merged back by renaming",
                    shown(self.directory),
                    self.places.state.display()
                ),
                "unmount what is mounted on the directory, or lay another directory",
            ));
        }
        if let Some(below) = table.below(&self.point) {
            return Err(Error::refused(
                format!(
                    "a file system is mounted on {}, below {}",
                    shown(&below.point),
                    shown(self.directory)
                ),
                "unmount that file system, or lay the directories beside it with --only",
            ));
        }
        Ok(())
    }

    /// Creates the overlay directories `mask`, `work` and `upper`. `upper` appears last, with
    /// owner, mode and times of the guest's own directory, so that merging is correct whenever
    /// `upper` exists.
    pub fn build(&self, plan: &Plan, own: &OwnedFd) -> Result<()> {
        let make = |name: &str, mode: u32| {
            let path = self.disk.join(name);
            let what = || format!("making {}", path.display());
            self.places.steps.step().during(what)?;
            DirBuilder::new().mode(mode).create(&path).during(what)?;
            Ok(path)
        };
        let mask = make("mask", 0o700)?;
        mask::build(plan, own, &mask, &self.places.steps)?;
        make("work", 0o700)?;
        let new = make("upper.new", 0o700)?;
        let what = || format!("preparing {}", new.display());
        let upper = tree::open(&new).during(what)?;
        tree::copy_directory_facts(own, &upper, None).during(what)?;
        self.places.steps.step().during(what)?;
        fs::rename(&new, self.disk.join("upper")).during(what)
    }

    /// Mounts the overlay over the guest directory. `segment` is the path at which the segment's
    /// image is mounted.
    pub fn mount(&self, segment: &Path, generation: u64, own: &OwnedFd) -> Result<()> {
        let what = || format!("mounting the overlay on {}", self.point.display());
        let inner = self.directory.strip_prefix(b"/").unwrap_or(self.directory);
        let segment = segment.join(std::ffi::OsStr::from_bytes(inner));
        let [mask, upper, work] = ["mask", "upper", "work"].map(|n| self.disk.join(n));
        for path in [&mask, &segment, &self.point] {
            let mut bytes = path.as_os_str().as_bytes().iter();
            if bytes.any(|b| b":,\\\"".contains(b)) {
                return Err(Error::refused(
                    format!(
                        "{} has a character that separates overlayfs' options",
                        path.display()
                    ),
                    "lay a directory without : , \\ and \" in its path",
                ));
            }
        }
        let mut data = b"lowerdir=".to_vec();
        for (path, after) in [
            (&mask, &b":"[..]),
            (&segment, b":"),
            (&self.point, b",upperdir="),
            (&upper, b",workdir="),
            (&work, b","),
        ] {
            data.extend(path.as_os_str().as_bytes());
            data.extend(after);
        }
        data.extend(OPTIONS.as_bytes());
        if data.len() > MAX_OPTIONS {
            return Err(Error::refused(
                "the layers' paths are too long",
                "lay a directory with a shorter path",
            ));
        }
        let data = CString::new(data).map_err(io::Error::from).during(what)?;
        // Restrictions of the mount that holds the directory also apply to the overlay.
        let below = rustix::fs::fstatvfs(own).during(what)?.f_flag;
        let mut flags = MountFlags::empty();
        for (flag, of_directory) in [
            (MountFlags::NOSUID, StatVfsMountFlags::NOSUID),
            (MountFlags::NODEV, StatVfsMountFlags::NODEV),
            (MountFlags::NOEXEC, StatVfsMountFlags::NOEXEC),
        ] {
            flags.set(flag, below.contains(of_directory));
        }
        self.places.steps.step().during(what)?;
        let source = format!("{LAID_SOURCE}{}@{generation}", self.name);
        mount(source, &self.point, "overlay", flags, &*data).during(what)
    }

    /// Checks that the guest sees the same files through the overlay as before, and that the
    /// compared files have not changed. Marks the layer as verified if this is so.
    pub fn verify(&self, plan: &Plan, own: &OwnedFd) -> Result<verify::Verdict> {
        let what = || format!("checking {}", self.point.display());
        self.places.steps.step().during(what)?;
        let merged = tree::open(&self.point).during(what)?;
        verify::merged(plan, &merged, own)?;
        let verdict = verify::unchanged(plan, own)?;
        if verdict == verify::Verdict::Unchanged {
            let path = self.disk.join(VERIFIED);
            let what = || format!("writing {}", path.display());
            self.places.steps.step().during(what)?;
            let mark = File::create(&path).during(what)?;
            mark.sync_all().during(what)?;
        }
        Ok(verdict)
    }

    /// Returns whether the check of the mounted overlay came to its end. An overlay without a mark
    /// was mounted by a run that was killed before, or by an agent that wrote no marks.
    pub fn is_verified(&self) -> bool {
        self.disk.join(VERIFIED).exists()
    }

    /// Checks that the overlay can be unmounted now: nothing is mounted over it or inside it.
    pub fn check_take_off(&self, table: &MountTable) -> Result<()> {
        if self.laid(table).is_none() {
            let covered = |m: &Mount| {
                m.point == self.point.as_os_str().as_bytes() && generation(m, self.name).is_some()
            };
            if table.0.iter().any(covered) {
                return Err(Error::refused(
                    format!(
                        "something else is mounted over the overlay on {}",
                        shown(self.directory)
                    ),
                    "unmount the other file system first",
                ));
            }
        } else if let Some(below) = table.below(&self.point) {
            return Err(Error::refused(
                format!(
                    "a file system is mounted on {}, inside the overlay that is to be taken off",
                    shown(&below.point)
                ),
                "unmount it first",
            ));
        }
        Ok(())
    }

    /// Unmounts the overlay if it is mounted, merges the written files into the guest's own
    /// directory, and removes the overlay directories.
    pub fn take_off(&self) -> Result<Merged> {
        loop {
            let table = MountTable::read()?;
            self.check_take_off(&table)?;
            if self.laid(&table).is_none() {
                return self.settle();
            }
            // Programs that use files of the overlay keep them; only the mount point is released.
            unmount(&self.point, UnmountFlags::DETACH)
                .during(|| format!("unmounting {}", self.point.display()))?;
        }
    }

    /// Merges the written files of an overlay that is not mounted into the guest's own directory,
    /// and removes the overlay directories. If they do not exist, nothing is done.
    pub fn settle(&self) -> Result<Merged> {
        let upper = self.disk.join("upper");
        let mut merged = Merged::default();
        match tree::open(&upper) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e).during(|| format!("opening {}", upper.display())),
            Ok(upper) => {
                let own = self.own_for_merging()?;
                merged = merge(&upper, &own, &self.places.steps).during(|| {
                    format!(
                        "merging what was written to {} (it stays in {}, and the next run goes on from here)",
                        shown(self.directory),
                        self.disk.display()
                    )
                })?;
            }
        }
        self.remove()?;
        Ok(merged)
    }

    fn own_for_merging(&self) -> Result<OwnedFd> {
        let Some(own) = self.open_own()? else {
            return Err(Error::refused(
                format!(
                    "{} is gone, and {} holds the files written to it",
                    shown(self.directory),
                    self.disk.display()
                ),
                "create the directory again",
            ));
        };
        let what = || format!("looking at {}", self.point.display());
        let disk = tree::open(&self.disk).during(what)?;
        if !tree::on_one_mount(&disk, &own).during(what)? {
            return Err(Error::refused(
                format!(
                    "another file system is mounted on {}, so what was written cannot be merged back",
                    shown(self.directory)
                ),
                "unmount it",
            ));
        }
        Ok(own)
    }

    /// Removes the layer's directories; the upper one only if it is empty.
    fn remove(&self) -> Result<()> {
        let what = || format!("removing {}", self.disk.display());
        let disk = match tree::open(&self.disk) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.during(what)?,
        };
        for name in [c"verified", c"mask", c"work", c"upper.new"] {
            self.places.steps.step().during(what)?;
            tree::remove(&disk, name).during(what)?;
        }
        self.places.steps.step().during(what)?;
        for path in [self.disk.join("upper"), self.disk.clone()] {
            match fs::remove_dir(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e).during(what),
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the size on disk, in bytes, of the files that were written since the segment was
    /// mounted.
    pub fn upper_bytes(&self) -> u64 {
        tree::open(&self.disk.join("upper")).map_or(0, |upper| tree::bytes_below(&upper))
    }
}

/// Merges what is left of each overlay, of any segment, that is not mounted and whose directory
/// overlaps `directory`. Must precede a mount over `directory`: otherwise the older files would
/// replace newer ones in a later merge.
pub fn settle_overlapping(places: &Places, directory: &[u8]) -> Result<()> {
    let table = MountTable::read()?;
    for name in places.known()? {
        for other in places.layer_directories(&name)? {
            let layer = Layer::new(places, &name, &other);
            if overlap(&other, directory) && layer.laid(&table).is_none() {
                layer.take_off()?;
                places.forget_if_empty(&name);
            }
        }
    }
    Ok(())
}

/// Returns the generation of segment `name` that `mount` shows; `None` if `mount` is no overlay of
/// that segment. The overlay's source in the mount table is `memfold:NAME@GENERATION`.
pub fn generation(mount: &Mount, name: &str) -> Option<u64> {
    let source = std::str::from_utf8(&mount.source).ok()?;
    let (of, generation) = source.strip_prefix(LAID_SOURCE)?.split_once('@')?;
    if mount.kind != b"overlay" || of != name {
        return None;
    }
    generation.parse().ok()
}

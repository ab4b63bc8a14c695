//! Test fixture for segments: a temporary directory takes the place of a guest's directories, and a
//! read-only bind mount that of a segment's image. The test runs in a mount namespace of its own.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use memfold_agent::consent::Consent;
use memfold_agent::segment::error::Result;
use memfold_agent::segment::lay::{Request, lay};
use memfold_agent::segment::mount_table::MountTable;
use memfold_agent::segment::settle::{Settled, settle};
use memfold_agent::segment::state::Places;
use memfold_agent::segment::take_off::take_off;
use memfold_agent::segment::tree;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;

pub struct Guest {
    pub places: Places,
    _directory: tempfile::TempDir,
}

/// Gives this thread a mount namespace of its own. If that fails, prints the reason and returns
/// false.
pub fn private_mounts() -> bool {
    if !rustix::process::geteuid().is_root() {
        memfold_testkit::report_skip("needs root");
        return false;
    }
    let overlay = fs::read_to_string("/proc/filesystems").is_ok_and(|t| t.contains("\toverlay\n"));
    if !overlay {
        memfold_testkit::report_skip("the kernel has no overlayfs");
        return false;
    }
    // Descriptors stay shared; only UnshareFlags::FILES would make this unsafe.
    #[allow(deprecated)]
    let done = rustix::thread::unshare(UnshareFlags::NEWNS).and_then(|()| {
        let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", flags)
    });
    if let Err(e) = &done {
        memfold_testkit::report_skip(&format!("no mount namespace: {e}"));
    }
    done.is_ok()
}

impl Guest {
    /// Creates a guest: `fill` makes its /usr and /opt, the segment starts as a copy of both, and
    /// `change` makes the segment different.
    pub fn new(fill: impl FnOnce(&Path), change: impl FnOnce(&Path)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().canonicalize().unwrap();
        for name in ["root/usr", "root/opt", "run", "state", "dev", "image"] {
            fs::create_dir_all(top.join(name)).unwrap();
        }
        fill(&top.join("root"));
        for name in ["usr", "opt"] {
            let copied = Command::new("cp")
                .arg("-a")
                .arg(top.join("root").join(name))
                .arg(top.join("image"))
                .status()
                .unwrap();
            assert!(copied.success());
        }
        let manifest = "format 1\nname web\ngeneration 3\nlay /usr\nlay /opt\nlay /none\n";
        fs::write(top.join("image/.memfold-segment"), manifest).unwrap();
        change(&top.join("image"));
        let guest = Self {
            places: Places {
                root: top.join("root"),
                run: top.join("run"),
                state: top.join("state"),
                dev: top.join("dev"),
                ..Places::default()
            },
            _directory: directory,
        };
        guest.plug_in();
        guest
    }

    /// Mounts the image at its mount point.
    pub fn plug_in(&self) {
        self.mount_image(&self.image(), "web");
    }

    /// Mounts a copy of the image as that of another segment. Call this once for each name.
    pub fn plug_in_as(&self, name: &str) {
        let copy = self.image().with_file_name(format!("image-{name}"));
        let mut cp = Command::new("cp");
        let copied = cp.arg("-a").arg(self.image()).arg(&copy).status().unwrap();
        assert!(copied.success());
        let manifest = format!("format 1\nname {name}\ngeneration 3\nlay /usr\nlay /opt\n");
        fs::write(copy.join(".memfold-segment"), manifest).unwrap();
        self.mount_image(&copy, name);
    }

    fn mount_image(&self, image: &Path, name: &str) {
        let point = self.places.mounted(name, 3);
        fs::create_dir_all(&point).unwrap();
        rustix::mount::mount_bind(image, &point).unwrap();
        let flags = MountFlags::BIND | MountFlags::RDONLY;
        rustix::mount::mount_remount(&point, flags, c"").unwrap();
    }

    pub fn image(&self) -> PathBuf {
        self.places.root.with_file_name("image")
    }

    pub fn usr(&self, path: &str) -> PathBuf {
        self.places.root.join("usr").join(path)
    }

    pub fn opt(&self) -> PathBuf {
        self.places.root.join("opt")
    }

    pub fn lay(&self) -> Result<serde_json::Value> {
        let request = Request {
            max_differing: 100,
            ..Request::new("web", 3)
        };
        lay(&self.places, &request).map(|text| serde_json::from_str(&text).unwrap())
    }

    pub fn take_off(&self) -> Result<serde_json::Value> {
        take_off(&self.places, "web").map(|text| serde_json::from_str(&text).unwrap())
    }

    /// Boots the guest's agent, whose owner allows the defaults.
    pub fn settle(&self, command_line: &str) -> Settled {
        let no_file = self.places.root.with_file_name("agent.toml");
        settle(&self.places, command_line, &Consent::read_from(&no_file))
    }

    /// Returns every mount of this guest, topmost first.
    pub fn mounts(&self) -> Vec<PathBuf> {
        let prefix = self.places.root.parent().unwrap().as_os_str().as_bytes();
        let table = MountTable::read().unwrap();
        let points = table.0.iter().rev().map(|m| m.point.clone());
        points
            .filter(|p| p.starts_with(prefix))
            .map(|p| PathBuf::from(std::ffi::OsStr::from_bytes(&p)))
            .collect()
    }

    pub fn is_laid(&self) -> bool {
        self.mounts()
            .iter()
            .any(|m| m.starts_with(&self.places.root))
    }

    /// Simulates a power cut: ends all mounts.
    pub fn cut_power(&self) {
        for point in self.mounts() {
            let _ = rustix::mount::unmount(&point, UnmountFlags::DETACH);
        }
    }

    /// Returns whether no file of memfold is left on disk.
    pub fn is_clean(&self) -> bool {
        fs::read_dir(&self.places.state).unwrap().next().is_none()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.cut_power();
    }
}

/// Whether the modification times of directories count.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Times {
    All,
    NotOfDirectories,
}

/// Returns everything that a program can see of a directory tree, one line for each path.
pub fn picture(top: &Path, times: Times) -> BTreeMap<PathBuf, String> {
    let mut lines = BTreeMap::new();
    look(top, Path::new(""), times, &mut lines);
    lines
}

fn look(top: &Path, path: &Path, times: Times, lines: &mut BTreeMap<PathBuf, String>) {
    let full = top.join(path);
    let meta = fs::symlink_metadata(&full).unwrap();
    let mut line = format!("{:o} {}:{}", meta.mode(), meta.uid(), meta.gid());
    if !meta.is_dir() || times == Times::All {
        let _ = write!(line, " {}.{}", meta.mtime(), meta.mtime_nsec());
    }
    let parent = fs::File::open(full.parent().unwrap()).unwrap();
    let name = CString::new(full.file_name().unwrap().as_bytes()).unwrap();
    let xattrs = tree::without_overlay(tree::xattrs(&parent, &name).unwrap());
    let _ = write!(line, " {xattrs:?}");
    if meta.is_symlink() {
        let _ = write!(line, " -> {}", fs::read_link(&full).unwrap().display());
    } else if meta.is_file() {
        let _ = write!(line, " {:?}", fs::read(&full).unwrap());
    } else if meta.file_type().is_char_device() {
        let _ = write!(line, " device {}", meta.rdev());
    }
    lines.insert(path.to_path_buf(), line);
    if meta.is_dir() {
        for entry in fs::read_dir(&full).unwrap() {
            look(top, &path.join(entry.unwrap().file_name()), times, lines);
        }
    }
}

/// Sets a modification time, not following a link.
pub fn set_time(path: &Path, seconds: i64) {
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: 7,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// Writes a file with a fixed modification time.
pub fn file(path: &Path, content: &str, seconds: i64) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
    set_time(path, seconds);
}

//! Opens the files that a QEMU's command line names, in the way in which that QEMU process sees
//! them: relative to its working directory, in its mount namespace, with the rights of its user.
//!
//! The paths of a QEMU in a container are paths inside that container. `/proc/PID/root` is the
//! container's root directory, but an absolute symbolic link below it would lead back to the host.
//! memfold therefore resolves every path with that directory as the root (`openat2(2)`:
//! `RESOLVE_IN_ROOT`).

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, open, openat2};
use rustix::process::{Gid, Pid, Uid, getuid};
use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};

/// The file system as a process sees it: the process's root directory and working directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    root: PathBuf,
    /// Working directory of the process.
    place: PathBuf,
}

impl Default for View {
    fn default() -> Self {
        Self {
            root: "/".into(),
            place: "/".into(),
        }
    }
}

impl View {
    /// Reads root directory and working directory of process `pid`.
    pub fn of(pid: Pid) -> io::Result<Self> {
        Ok(Self {
            root: root_of(pid)?,
            place: fs::read_link(format!("/proc/{}/cwd", pid.as_raw_nonzero()))?,
        })
    }

    /// Returns the same view with another working directory.
    #[cfg(test)]
    pub(super) fn at(self, place: &Path) -> Self {
        let place = place.to_owned();
        Self { place, ..self }
    }

    /// Returns `path` as an absolute path, relative to the working directory. (The path of the
    /// working directory contains no links.)
    pub(super) fn whole(&self, path: impl AsRef<Path>) -> PathBuf {
        let (mut place, mut path) = (self.place.as_path(), path.as_ref());
        while let Ok(rest) = path.strip_prefix("..") {
            (place, path) = (place.parent().unwrap_or(place), rest);
        }
        place.join(path.strip_prefix(".").unwrap_or(path))
    }

    /// Returns the path at which the host has the process's `path`.
    pub(crate) fn on_host(&self, path: &Path) -> PathBuf {
        let whole = self.whole(path);
        self.root.join(whole.strip_prefix("/").unwrap_or(&whole))
    }

    pub(super) fn is_file(&self, path: &Path) -> bool {
        self.metadata(path).is_ok_and(|facts| facts.is_file())
    }

    pub(super) fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        let file = self.resolve(&self.open_root()?, path, OFlags::PATH)?;
        File::from(file).metadata()
    }

    /// Opens a file for reading, with the rights of this user and group only; `None`: root.
    pub(super) fn open_as(&self, path: &Path, ids: Option<(u32, u32)>) -> io::Result<File> {
        let root = self.open_root()?;
        // The file may have been replaced by a FIFO whose other end nobody opens, so opening must
        // not wait.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let as_user = || -> io::Result<File> {
            if let Some((uid, gid)) = ids.filter(|(uid, _)| *uid != 0 && getuid().is_root()) {
                // These identities change for this thread only, which ends after the open.
                set_thread_groups(&[])?;
                set_thread_gid(Gid::from_raw(gid))?;
                set_thread_uid(Uid::from_raw(uid))?;
            }
            Ok(self.resolve(&root, path, flags)?.into())
        };
        let opened = std::thread::scope(|scope| scope.spawn(as_user).join());
        opened.unwrap_or_else(|_| Err(io::Error::other("the thread that opens the file ended")))
    }

    fn open_root(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(open(&self.root, flags, Mode::empty())?)
    }

    fn resolve(&self, root: &OwnedFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC;
        let path = self.whole(path);
        let (mode, how) = (Mode::empty(), ResolveFlags::IN_ROOT);
        Ok(openat2(root, path, flags, mode, how)?)
    }
}

/// Returns the path at which the host finds a process's root directory: `/` if the process sees the
/// same file system as the daemon, else `/proc/PID/root`.
pub fn root_of(pid: Pid) -> io::Result<PathBuf> {
    let of = format!("/proc/{}", pid.as_raw_nonzero());
    let same = |name: &str| -> io::Result<bool> {
        let facts = |place: &str| fs::metadata(format!("{place}/{name}"));
        let (its, ours) = (facts(&of)?, facts("/proc/self")?);
        Ok((its.dev(), its.ino()) == (ours.dev(), ours.ino()))
    };
    Ok(if same("ns/mnt")? && same("root")? {
        "/".into()
    } else {
        format!("{of}/root").into()
    })
}

/// Returns the numbers of a user and of its primary group.
pub(super) fn user_ids(name: &str) -> io::Result<(u32, u32)> {
    let none = || io::Error::other(format!("no user '{name}' on this host"));
    memfold_sys::peer::user_ids(name)?.ok_or_else(none)
}

/// Returns the name of the user that a process runs as; `None`: root.
pub(super) fn user(pid: Pid) -> io::Result<Result<Option<String>, String>> {
    let facts = fs::metadata(format!("/proc/{}", pid.as_raw_nonzero()))?;
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()))?;
    // The directory of a process that cannot be dumped belongs to root, so `status` is read first.
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let effective = line.and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok());
    let uid = effective.unwrap_or_else(|| facts.uid());
    if uid == 0 {
        return Ok(Ok(None));
    }
    let name = memfold_sys::peer::user_name(uid)?;
    Ok(name.map(Some).ok_or_else(|| {
        format!(
            "QEMU's user {uid} has no name on this host, so another QEMU cannot switch to that user"
        )
    }))
}

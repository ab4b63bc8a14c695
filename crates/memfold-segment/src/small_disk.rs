//! A small file system for tests of what happens when a disk is nearly full.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// A tmpfs of 64 MiB at a temporary directory, until this is dropped.
#[derive(Debug)]
pub(crate) struct SmallDisk(TempDir);

impl SmallDisk {
    /// Mounts the file system. Returns `None` if this process has no right to mount one.
    pub(crate) fn mount() -> Option<Self> {
        let place = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=64m", "tmpfs"]);
        let status = mount.arg(place.path()).status();
        if !status.is_ok_and(|status| status.success()) {
            return None;
        }
        Some(Self(place))
    }

    /// Returns the path of the directory where the file system is mounted.
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Returns the bytes that users without root's rights may still use.
    pub(crate) fn free_bytes(&self) -> u64 {
        let disk = rustix::fs::statvfs(self.path()).unwrap();
        disk.f_bavail * disk.f_frsize
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A failed test may have left a process there, so the mount is only detached.
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

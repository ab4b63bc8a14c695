//! Makes a slow disk for studies: a file system on a loop device whose throughput the kernel limits
//! (`blkio.throttle.{read,write}_bps_device`,
//! `Documentation/admin-guide/cgroup-v1/blkio-controller.rst`).

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use memfold_lab::undo_at_interrupt;
use memfold_units::ByteSize;

use crate::host::run_program;

/// Directory with the throughput limits of the root control group (cgroup v1). The root group of
/// cgroup v2 has no such limits.
const LIMITS: &str = "/sys/fs/cgroup/blkio";

/// An ext4 file system in a file, mounted through a loop device. Dropping the value unmounts the
/// file system.
#[derive(Debug)]
pub struct LoopDisk {
    place: PathBuf,
}

/// Limits the throughput of the block device on which `path` lies, for reading and for writing
/// each; 0: no limit.
pub fn limit(path: &Path, bytes_per_s: u64) -> anyhow::Result<()> {
    let facts = rustix::fs::stat(path)?;
    let device = facts.st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    for way in ["read", "write"] {
        let file = format!("{LIMITS}/blkio.throttle.{way}_bps_device");
        let line = format!("{major}:{minor} {bytes_per_s}");
        std::fs::write(&file, line).with_context(|| {
            format!("cannot limit a disk's throughput with {file} (cgroup v1, 'blkio' controller)")
        })?;
    }
    Ok(())
}

fn run(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    run_program("util-linux e2fsprogs", program, arguments)
}

/// Unmounts the file system at `place`. The kernel then frees the loop device.
fn unmount(place: &Path) -> anyhow::Result<()> {
    run("umount", &[&place.to_string_lossy()]).map(drop)
}

impl LoopDisk {
    /// Returns the directory at which the file system is mounted.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Makes an empty ext4 file system of `size` in the sparse file `file`. Creates the directory
    /// `place`, and mounts the file system there.
    pub fn make(file: &Path, size: ByteSize, place: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(place)?;
        std::fs::File::create(file)?.set_len(size.0)?;
        let text = |path: &Path| {
            let text = path.to_str().map(str::to_owned);
            text.context("the path of the loop disk is not valid UTF-8")
        };
        let file = text(file)?;
        run("mkfs.ext4", &["-q", "-m", "0", &file])?;
        // Deleted files give their room back to the host.
        run("mount", &["-o", "loop,discard", &file, &text(place)?])?;
        let mounted = place.to_owned();
        undo_at_interrupt(move || {
            let _ = unmount(&mounted);
        });
        Ok(Self {
            place: place.to_owned(),
        })
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        // The limit would stay for the next device of this number; without cgroup v1 there is none.
        let _ = limit(&self.place, 0);
        if let Err(error) = unmount(&self.place) {
            eprintln!(
                "memfold: cannot unmount {}: {error:#}",
                self.place.display()
            );
        }
    }
}

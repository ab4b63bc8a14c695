//! Finds the path of an inode with a file handle, without reading directories. The kernel's page
//! cache events name only the inode, and the daemon needs the path.
//!
//! A file whose pages are being cached has its inode and, as a rule, its directory entry in memory,
//! so `open_by_handle_at` costs no disk access. If a file system needs more than the inode number
//! for a handle (XFS: the generation), or has other inode numbers in directories (EROFS), a
//! [`crate::walk`] has to find the file.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use memfold_sys::guest;
use rustix::fs::{FileType, Mode, OFlags};

use crate::mounts::{Kind, Mount, Mounts};

/// Type of a file handle with inode number and generation: `FILEID_INO32_GEN`
/// (include/linux/exportfs.h). On ext4 and f2fs, generation 0 stands for any.
const INO32_GEN: i32 = 1;
/// Type of a file handle with inode, subvolume and generation (0: any):
/// `FILEID_BTRFS_WITHOUT_PARENT`.
const BTRFS: i32 = 0x4d;
/// Number of btrfs's top-level subvolume (`BTRFS_FS_TREE_OBJECTID`).
const BTRFS_TOP: u64 = 5;

/// Result of looking up a file by its inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The file's path and size in bytes.
    Path(Vec<u8>, u64),
    /// The inode has no name any more, or is no regular file.
    Nameless,
    /// The path cannot be found by file handle; a walk may find it.
    Unknown,
}

/// Finds paths of inodes by file handle. It keeps mount points open until [`Resolver::close`]; an
/// open mount cannot be unmounted.
#[derive(Debug, Default)]
pub struct Resolver {
    open: HashMap<u64, File>,
}

impl Resolver {
    /// Closes all mount points that the resolver keeps open, so that they can be unmounted.
    pub fn close(&mut self) {
        self.open.clear();
    }

    /// Finds the path of the file with inode number `inode` on `device` (`major << 20 | minor`).
    pub fn by_handle(&mut self, mounts: &Mounts, device: u32, inode: u64) -> Found {
        for mount in mounts.by_device(device) {
            let found = self.on_mount(mount, inode).unwrap_or(Found::Unknown);
            if found != Found::Unknown {
                return found;
            }
        }
        Found::Unknown
    }

    fn on_mount(&mut self, mount: &Mount, inode: u64) -> io::Result<Found> {
        let Some((kind, bytes)) = handle(mount, inode) else {
            return Ok(Found::Unknown);
        };
        let directory = match self.open.entry(mount.id) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(open_directory(&mount.point)?),
        };
        let file = match guest::open_by_handle(directory, kind, &bytes) {
            // The inode no longer exists. (On btrfs, it may exist in another subvolume.)
            Err(e) if is_stale(&e) && mount.kind == Kind::Plain => return Ok(Found::Nameless),
            file => file?,
        };
        let stat = rustix::fs::fstat(&file)?;
        if stat.st_ino != inode {
            return Ok(Found::Unknown);
        }
        if stat.st_nlink == 0 || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(Found::Nameless);
        }
        let path = name(&file)?;
        // The path ends so if the name that the kernel remembers no longer belongs to the file, and
        // begins otherwise if the file is under no mount of this namespace. (A file in memory
        // without a directory entry in memory has the path `/`.) The path is not looked up again: a
        // path that another mount hides costs the daemon only a comparison, while a look-up costs
        // the guest time for each file.
        if path.first() != Some(&b'/') || path.ends_with(b"/") || path.ends_with(b" (deleted)") {
            return Ok(Found::Unknown);
        }
        Ok(Found::Path(path, u64::try_from(stat.st_size).unwrap_or(0)))
    }
}

fn is_stale(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::STALE.raw_os_error())
}

fn open_directory(point: &[u8]) -> io::Result<File> {
    let flags = OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::NOATIME | OFlags::CLOEXEC;
    let path = Path::new(OsStr::from_bytes(point));
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// Returns the path of an open file, as the kernel reports it.
fn name(file: &OwnedFd) -> io::Result<Vec<u8>> {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(std::fs::read_link(link)?.into_os_string().into_vec())
}

fn handle(mount: &Mount, inode: u64) -> Option<(i32, Vec<u8>)> {
    match mount.kind {
        Kind::Plain => {
            let inode = u32::try_from(inode).ok()?;
            Some((INO32_GEN, [inode, 0].map(u32::to_ne_bytes).concat()))
        }
        Kind::Btrfs => {
            let subvolume = mount.subvolume.unwrap_or(BTRFS_TOP);
            let mut bytes = [inode, subvolume].map(u64::to_ne_bytes).concat();
            bytes.extend(0_u32.to_ne_bytes());
            Some((BTRFS, bytes))
        }
        Kind::Xfs | Kind::Packed | Kind::Overlay => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn the_path_of_a_file_on_disk_is_found_by_its_inode_number() {
        let mounts = Mounts::read().unwrap();
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = directory.path().join("some file");
        std::fs::write(&path, b"12345").unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        let device = rustix::fs::major(meta.dev()) << 20 | rustix::fs::minor(meta.dev());
        let plain = mounts
            .by_device(device)
            .iter()
            .any(|m| m.kind == Kind::Plain);
        if !plain || !rustix::process::geteuid().is_root() {
            memfold_testkit::skip!("needs root and a source tree on ext4 or f2fs");
        }
        let open = std::fs::File::open(&path).unwrap();
        let expected = Found::Path(path.as_os_str().as_bytes().to_vec(), 5);
        assert_eq!(
            Resolver::default().by_handle(&mounts, device, meta.ino()),
            expected
        );
        std::fs::remove_file(&path).unwrap();
        assert_eq!(
            Resolver::default().by_handle(&mounts, device, meta.ino()),
            Found::Nameless
        );
        drop(open);
        assert_eq!(
            Resolver::default().by_handle(&mounts, device, meta.ino()),
            Found::Nameless
        );
    }
}

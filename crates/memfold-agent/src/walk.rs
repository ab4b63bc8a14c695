//! Finds cached files in the guest, by a walk through those directories that the kernel has in its
//! dentry cache.
//!
//! A cached page belongs to an inode in memory, and that inode was opened through a dentry. So it
//! is enough to look at cached dentries: `openat2` with `RESOLVE_CACHED` (Linux >= 5.12) opens a
//! file only if that needs no disk access and no new inode. The walk reads only directories that
//! are cached, so unused files cost nothing. The walk misses a file if the kernel has dropped the
//! file's dentry but not its pages.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, StatxFlags};
use rustix::mount::OpenTreeFlags;

use crate::mounts::Mount;

/// Most levels of directories that the walk descends. This limits the memory for a path.
const MAX_DEPTH: usize = 64;

/// A regular file that a directory walk found.
pub struct Entry<'a> {
    pub directory: BorrowedFd<'a>,
    /// Name of the file in the directory that contains it.
    pub name: &'a CStr,
    /// Inode number of the file according to its directory entry (`d_ino`).
    pub inode: u64,
    /// Path of the directory that contains the file, relative to the mount point, without slashes
    /// at its ends.
    pub parent: &'a [u8],
    /// Flags for `openat2` that forbid leaving this mount.
    stay: ResolveFlags,
}

impl Entry<'_> {
    /// Opens the file for reading. Returns `None` if the file's inode or dentry is not in memory,
    /// or if opening the file is not permitted.
    pub fn open(&self) -> Option<OwnedFd> {
        open(self.directory, self.name, OFlags::RDONLY, self.stay)
    }

    /// Returns the file's absolute path in the guest.
    pub fn path(&self, mount: &Mount) -> Vec<u8> {
        let mut path = mount.point.clone();
        for part in [self.parent, self.name.to_bytes()] {
            if !part.is_empty() {
                if path.last() != Some(&b'/') {
                    path.push(b'/');
                }
                path.extend(part);
            }
        }
        path
    }
}

fn open(
    directory: BorrowedFd<'_>,
    name: &CStr,
    flags: OFlags,
    stay: ResolveFlags,
) -> Option<OwnedFd> {
    let flags = flags
        | OFlags::NOFOLLOW
        | OFlags::NONBLOCK
        | OFlags::CLOEXEC
        | OFlags::NOATIME
        | OFlags::NOCTTY;
    let resolve = ResolveFlags::CACHED | ResolveFlags::NO_SYMLINKS | stay;
    // EAGAIN may also come from a rename at the same time, so the open is tried once more.
    for _ in 0..2 {
        match rustix::fs::openat2(directory, name, flags, Mode::empty(), resolve) {
            Ok(file) => return Some(file),
            Err(rustix::io::Errno::AGAIN) => {}
            Err(_) => return None,
        }
    }
    None
}

/// Calls `visit` for every regular file of `mount` in a cached directory, until `visit` returns
/// false. Files on other mounts below `mount` are not visited. Files that such mounts hide are
/// visited only if a segment is mounted over a directory of `mount`.
pub fn cached_files(mount: &Mount, mut visit: impl FnMut(&Entry<'_>) -> bool) -> io::Result<()> {
    let point = std::path::Path::new(std::ffi::OsStr::from_bytes(&mount.point));
    let top: OwnedFd = File::open(point)?.into();
    let stat = rustix::fs::statx(
        &top,
        c"",
        AtFlags::EMPTY_PATH,
        StatxFlags::from_bits_retain(STATX_MNT_ID),
    )?;
    // Another file system may be mounted over this one. Kernels before 5.8 do not report it, but
    // the agent needs 5.12 anyway.
    if stat.stx_mask & STATX_MNT_ID != 0 && stat.stx_mnt_id != mount.id {
        return Ok(());
    }
    // Programs that use a segment read the guest's own files below the segment's overlay, so the
    // walk uses a copy of the mount, without mounts below it. Other mounts are not copied: umount
    // would succeed while the copy keeps the file system alive.
    let (top, stay) = if mount.is_laid_over {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH;
        // NO_XDEV is not used on the copy: with CACHED, it also refuses directories on which
        // something is mounted outside of the copy.
        let copy = rustix::mount::open_tree(&top, c"", flags)?;
        (copy, ResolveFlags::empty())
    } else {
        (top, ResolveFlags::NO_XDEV)
    };
    let mut buffer = vec![MaybeUninit::uninit(); 16 << 10];
    let mut pending: Vec<(Vec<u8>, usize)> = vec![(Vec::new(), 0)];
    while let Some((parent, depth)) = pending.pop() {
        let path = if parent.is_empty() {
            b".".to_vec()
        } else {
            parent.clone()
        };
        let Ok(path) = std::ffi::CString::new(path) else {
            continue;
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let Some(directory) = open(top.as_fd(), &path, flags, stay) else {
            continue;
        };
        let mut entries = RawDir::new(&directory, &mut buffer);
        while let Some(Ok(entry)) = entries.next() {
            let name = entry.file_name();
            match entry.file_type() {
                FileType::Directory
                    if depth < MAX_DEPTH && !matches!(name.to_bytes(), b"." | b"..") =>
                {
                    let mut below = parent.clone();
                    if !below.is_empty() {
                        below.push(b'/');
                    }
                    below.extend(name.to_bytes());
                    pending.push((below, depth + 1));
                }
                // Some file systems do not report the type.
                FileType::RegularFile | FileType::Unknown => {
                    let entry = Entry {
                        directory: directory.as_fd(),
                        name,
                        inode: entry.ino(),
                        parent: &parent,
                        stay,
                    };
                    if !visit(&entry) {
                        return Ok(());
                    }
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Bit that requests `stx_mnt_id`, and shows in the result that it is valid
/// (include/uapi/linux/stat.h).
const STATX_MNT_ID: u32 = 0x1000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mounts::Kind;
    use rustix::mount::MountPropagationFlags;

    fn paths_of(directory: &std::path::Path, is_laid_over: bool) -> Vec<String> {
        let flags = (
            AtFlags::EMPTY_PATH,
            StatxFlags::from_bits_retain(STATX_MNT_ID),
        );
        let top = File::open(directory).unwrap();
        let mount = Mount {
            id: rustix::fs::statx(top, c"", flags.0, flags.1)
                .unwrap()
                .stx_mnt_id,
            device: 0,
            root: b"/".to_vec(),
            point: directory.as_os_str().as_bytes().to_vec(),
            kind: Kind::Plain,
            subvolume: None,
            laid: false,
            is_laid_over,
        };
        let mut paths = Vec::new();
        cached_files(&mount, |e| {
            assert!(e.open().is_some());
            let path = String::from_utf8(e.path(&mount)).unwrap();
            let prefix = format!("{}/", directory.display());
            paths.push(path.strip_prefix(&prefix).unwrap().to_owned());
            true
        })
        .unwrap();
        paths.sort();
        paths
    }

    /// Returns whether this process may copy a mount, as a walk does.
    fn may_mount() -> bool {
        let root = rustix::process::geteuid().is_root();
        if !root {
            memfold_testkit::report_skip("needs root");
        }
        root
    }

    #[test]
    fn a_walk_over_a_mounted_file_system_finds_newly_written_files_with_their_paths() {
        if !may_mount() {
            return;
        }
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        std::fs::create_dir(directory.path().join("sub")).unwrap();
        std::fs::write(directory.path().join("a"), b"1").unwrap();
        std::fs::write(directory.path().join("sub/b"), b"2").unwrap();
        assert_eq!(paths_of(directory.path(), false), ["a", "sub/b"]);
        assert_eq!(paths_of(directory.path(), true), ["a", "sub/b"]);
    }

    #[test]
    fn a_walk_finds_files_hidden_under_a_mount_point_and_skips_the_files_of_the_mount() {
        if !may_mount() {
            return;
        }
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let sub = directory.path().join("sub");
        std::fs::create_dir(&sub).unwrap();
        std::fs::write(sub.join("below"), b"1").unwrap();
        // This runs in a mount namespace of its own, which ends with the thread.
        let own = || {
            in_a_mount_namespace();
            let none = rustix::mount::MountFlags::empty();
            rustix::mount::mount("tmpfs", &sub, "tmpfs", none, None).unwrap();
            std::fs::write(sub.join("above"), b"2").unwrap();
            assert_eq!(paths_of(directory.path(), true), ["sub/below"]);
            assert_eq!(paths_of(directory.path(), false), [""; 0]);
        };
        std::thread::scope(|scope| scope.spawn(own).join().unwrap());
    }

    // The safe function is deprecated because of the effects of other flags; NEWNS only gives this
    // thread its own mounts.
    #[allow(deprecated)]
    fn in_a_mount_namespace() {
        rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNS).unwrap();
        let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", flags).unwrap();
    }
}

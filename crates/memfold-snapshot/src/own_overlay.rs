//! Moves frozen overlays between a VM whose QEMU runs as a user without root's rights, and a
//! snapshot, which only root may write.
//!
//! The guest may control that QEMU. So the overlay becomes root's, and the kernel is asked whether
//! anybody still has it open for writing. If nobody has, the file itself becomes the snapshot's;
//! otherwise the snapshot gets a copy.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use memfold_sys::lease;
use memfold_vm::QemuUser;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

use super::room::check_free;
use super::sparse_copy::{copy_data, is_shared};

/// Extended attribute with a file's access list (`acl(5)`), which its owner can set.
const ACCESS_LIST: &str = "system.posix_acl_access";

/// Gives the frozen overlay `from` the name `to` in a snapshot, and root as its owner, so that QEMU
/// can no longer write it. Copies the overlay instead if somebody has it open for writing, or if
/// `to` is on another file system. `most`: largest length that the overlay can have.
pub(super) fn take(from: &Path, to: &Path, most: u64) -> io::Result<()> {
    let file = open(from)?;
    let is_ours = is_roots_alone(&file)?;
    let length = file.metadata()?.len();
    if length > most {
        let why = format!(
            "the file is {length} bytes long, and the disk's overlay can have {most}, perhaps because the guest controls QEMU"
        );
        return Err(io::Error::other(why));
    }
    if is_ours && link(&file, to)? {
        return Ok(());
    }
    copy(&file, to, length)
}

/// Replaces a file of a snapshot by a copy if somebody has it open for writing: a QEMU that its
/// guest controls may have kept a descriptor.
pub(super) fn take_from_writers(path: &Path) -> io::Result<()> {
    let file = open(path)?;
    if matches!(lease::has_writers(&file), Ok(false)) {
        return Ok(());
    }
    let copied = path.with_extension("copied");
    copy(&file, &copied, file.metadata()?.len())?;
    std::fs::rename(copied, path)
}

/// Makes QEMU's user the owner of an overlay again that [`take`] has made root's. The VM is going
/// to write to the overlay.
pub(super) fn give_back(overlay: &Path, user: Option<QemuUser>) -> io::Result<()> {
    let Some(QemuUser { uid, gid }) = user else {
        return Ok(());
    };
    let file = open(overlay)?;
    // QEMU's user may have put a hard link to somebody else's file in the overlay's place.
    if file.metadata()?.nlink() != 1 {
        return Err(io::Error::other("the file has a second name"));
    }
    fchown(&file, Some(uid), Some(gid))
}

/// Opens a file in a directory where QEMU's user may have replaced it, for example by a link or a
/// pipe.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("the file is not a regular file"));
    }
    Ok(file)
}

/// Makes root the owner of a file with one name. Returns whether nobody else can write to the file
/// any more; `false` also if the kernel cannot tell.
fn is_roots_alone(file: &File) -> io::Result<bool> {
    if file.metadata()?.nlink() != 1 {
        return Ok(false);
    }
    fchown(file, Some(0), Some(0))?;
    // The former owner cannot change the access list from now on.
    match rustix::fs::fremovexattr(file, ACCESS_LIST) {
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
        Err(error) => return Err(error.into()),
    }
    file.set_permissions(Permissions::from_mode(0o600))?;
    Ok(matches!(lease::has_writers(file), Ok(false)))
}

/// Gives an open file another name. Returns `false` if the name is on another file system.
fn link(file: &File, to: &Path) -> io::Result<bool> {
    let open = format!("/proc/self/fd/{}", file.as_raw_fd());
    match rustix::fs::linkat(CWD, open, CWD, to, AtFlags::SYMLINK_FOLLOW) {
        Ok(()) => Ok(true),
        Err(Errno::XDEV) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Copies the first `length` bytes of a file, if that leaves the reserve of free space. Holes stay
/// holes.
fn copy(from: &File, to: &Path, length: u64) -> io::Result<()> {
    let place = to.parent().unwrap_or(to);
    let open = PathBuf::from(format!("/proc/self/fd/{}", from.as_raw_fd()));
    if !is_shared(&open, place) {
        check_free(place, from.metadata()?.blocks() * 512)?;
    }
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600);
    let to = options.open(to)?;
    copy_data(from, &to, length, |_| {})?;
    to.sync_all()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::fs::XattrFlags;

    use super::*;

    const MOST: u64 = 1 << 20;
    const USER: QemuUser = QemuUser {
        uid: 2_100_000_000,
        gid: 2_100_000_000,
    };

    /// Returns whether two paths lead to one file, and the owner of the second.
    fn same(a: &Path, b: &Path) -> (bool, u32) {
        let facts = |path: &Path| path.metadata().unwrap();
        (facts(a).ino() == facts(b).ino(), facts(b).uid())
    }

    /// Creates an overlay of the user, which is open for writing.
    fn overlay(place: &Path) -> Option<(std::path::PathBuf, File)> {
        let path = place.join("overlay");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"bytes").unwrap();
        fchown(&file, Some(USER.uid), Some(USER.gid)).ok()?;
        Some((path, file))
    }

    #[test]
    fn an_overlay_that_nobody_writes_becomes_the_snapshots_and_can_be_given_back() {
        let place = tempfile::tempdir().unwrap();
        let Some((path, file)) = overlay(place.path()) else {
            memfold_testkit::skip!("only root can give files to other users");
        };
        // An access list keeps the rights of the user whom it names when the owner changes.
        let mut list = 2_u32.to_le_bytes().to_vec();
        for (tag, rights, id) in [
            (0x01_u16, 6_u16, u32::MAX),
            (0x02, 6, USER.uid),
            (0x04, 0, u32::MAX),
            (0x10, 6, u32::MAX),
            (0x20, 0, u32::MAX),
        ] {
            list.extend(tag.to_le_bytes());
            list.extend(rights.to_le_bytes());
            list.extend(id.to_le_bytes());
        }
        let has_list = rustix::fs::fsetxattr(&file, ACCESS_LIST, &list, XattrFlags::empty());
        drop(file);
        let kept = place.path().join("kept");
        take(&path, &kept, MOST).unwrap();
        assert_eq!(same(&path, &kept), (true, 0));
        let mode = kept.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        if has_list.is_ok() {
            let read = rustix::fs::getxattr(&kept, ACCESS_LIST, &mut [0_u8; 256][..]);
            assert_eq!(read, Err(Errno::NODATA));
        }
        let error = give_back(&path, Some(USER)).unwrap_err().to_string();
        assert!(error.contains("second name"), "{error}");
        std::fs::remove_file(&kept).unwrap();
        give_back(&path, Some(USER)).unwrap();
        assert_eq!(path.metadata().unwrap().uid(), USER.uid);
    }

    #[test]
    fn an_overlay_that_is_still_open_for_writing_is_copied_into_the_snapshot() {
        let place = tempfile::tempdir().unwrap();
        let Some((path, mut file)) = overlay(place.path()) else {
            memfold_testkit::skip!("only root can give files to other users");
        };
        let kept = place.path().join("kept");
        take(&path, &kept, MOST).unwrap();
        file.write_all(b" written later").unwrap();
        assert!(!same(&path, &kept).0);
        assert_eq!(std::fs::read(&kept).unwrap(), b"bytes");
    }

    #[test]
    fn links_and_pipes_in_an_overlays_place_are_refused() {
        let place = tempfile::tempdir().unwrap();
        let (target, kept) = (place.path().join("target"), place.path().join("kept"));
        std::fs::write(&target, "secret").unwrap();
        let link = place.path().join("link");
        std::os::unix::fs::symlink(&target, &link).unwrap();
        assert!(take(&link, &kept, MOST).is_err() && give_back(&link, Some(USER)).is_err());
        let pipe = place.path().join("pipe");
        rustix::fs::mknodat(CWD, &pipe, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert!(take(&pipe, &kept, MOST).is_err() && !kept.exists());
        // A second name of another file: the file's owner stays.
        let second = place.path().join("second");
        std::fs::hard_link(&target, &second).unwrap();
        let owner = target.metadata().unwrap().uid();
        assert!(give_back(&second, Some(USER)).is_err());
        take(&second, &kept, MOST).unwrap();
        assert!(!same(&second, &kept).0);
        assert_eq!(target.metadata().unwrap().uid(), owner);
    }

    #[test]
    fn an_overlay_that_is_longer_than_its_disk_allows_is_refused_and_holes_are_not_copied() {
        let place = tempfile::tempdir().unwrap();
        let Some((path, file)) = overlay(place.path()) else {
            memfold_testkit::skip!("only root can give files to other users");
        };
        let kept = place.path().join("kept");
        file.set_len(MOST + 1).unwrap();
        let error = take(&path, &kept, MOST).unwrap_err();
        assert!(error.to_string().contains("can have 1048576"), "{error}");
        assert!(!kept.exists());
        file.set_len(MOST).unwrap();
        // The descriptor `file` makes this a copy.
        take(&path, &kept, MOST).unwrap();
        let copied = std::fs::read(&kept).unwrap();
        assert!(copied == std::fs::read(&path).unwrap() && copied.starts_with(b"bytes"));
        assert!(kept.metadata().unwrap().blocks() * 512 < MOST / 2);
    }

    #[test]
    fn a_file_of_a_snapshot_that_somebody_can_still_write_is_replaced_by_a_copy() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("disk0.qcow2");
        std::fs::write(&path, "saved").unwrap();
        take_from_writers(&path).unwrap();
        let mut writer = File::options().write(true).open(&path).unwrap();
        take_from_writers(&path).unwrap();
        writer.write_all(b"wrong").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "saved");
    }
}

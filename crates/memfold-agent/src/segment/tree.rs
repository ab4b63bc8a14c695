//! Opens, reads and changes files of a directory tree by descriptors of their directories, not by
//! paths. Otherwise an ordinary user of the guest, who may own a directory of the tree, could
//! replace a part of a path by a symbolic link between check and use.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, FileType, Gid, IFlags, Mode, OFlags, ResolveFlags, Statx, StatxFlags, Timespec,
    Timestamps, UTIME_OMIT, Uid, XattrFlags,
};
use rustix::io::Errno;

/// Extended attributes of a file: values by name.
pub type Xattrs = BTreeMap<Vec<u8>, Vec<u8>>;

/// Prefix of the extended attributes that overlayfs sets in its layers. They describe the layer,
/// not the file.
pub const OVERLAY_XATTRS: &[u8] = b"trusted.overlay.";
/// Extended attribute by which a directory of the upper layer hides the entries of lower layers.
pub const OPAQUE: &CStr = c"trusted.overlay.opaque";
/// Permission bits of a file mode, with setuid, setgid and sticky.
const PERMISSIONS: u32 = 0o7777;

/// Opens a directory by its path, whose last part must not be a symbolic link.
pub fn open(path: &std::path::Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, DIRECTORY, Mode::empty())?)
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NOATIME)
    .union(OFlags::CLOEXEC);

/// Opens the directory `name` in the open directory `directory`.
pub fn open_in(directory: impl AsFd, name: &CStr) -> io::Result<OwnedFd> {
    directory_below(directory, name.to_bytes())
}

/// Opens the entry at the path `path` relative to `top` (empty: `top` itself). The path must stay
/// on the same mount and contain no symbolic link.
pub fn open_below(top: impl AsFd, path: &[u8], flags: OFlags) -> io::Result<OwnedFd> {
    let path = if path.is_empty() { b"." } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // EAGAIN means that a file was renamed meanwhile (openat2(2)).
    for _ in 0..16 {
        match rustix::fs::openat2(top.as_fd(), path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => {}
            other => return Ok(other?),
        }
    }
    Err(Errno::AGAIN.into())
}

/// Opens the directory at a path relative to `top`. The path may cross mounts, but must contain no
/// symbolic link.
pub fn directory_on_any_mount(top: impl AsFd, path: &[u8]) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    // With O_NOFOLLOW, a link at the end would give ENOTDIR, as a file does.
    let flags = DIRECTORY.difference(OFlags::NOFOLLOW);
    let mode = Mode::empty();
    Ok(rustix::fs::openat2(top, path, flags, mode, resolve)?)
}

/// Opens the directory at a path relative to `top`. The path must stay on the same mount and
/// contain no symbolic link.
pub fn directory_below(top: impl AsFd, path: &[u8]) -> io::Result<OwnedFd> {
    open_below(top, path, DIRECTORY)
}

/// Returns the names of a directory's entries, without `.` and `..`.
pub fn names(directory: impl AsFd) -> io::Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(directory)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
    }
    Ok(names)
}

/// Returns the `statx` of the entry `name` in `directory`, without following a symbolic link.
pub fn stat(directory: impl AsFd, name: &CStr) -> io::Result<Statx> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    Ok(rustix::fs::statx(directory, name, flags, STAT)?)
}

/// Returns the `statx` of an open file.
pub fn stat_of(file: impl AsFd) -> io::Result<Statx> {
    Ok(rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, STAT)?)
}

/// Fields of `statx` to read, among them `STATX_MNT_ID` (include/uapi/linux/stat.h).
const STAT: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::from_bits_retain(0x1000));

/// Returns the `statx` of the entry `name` in `directory`; `None` if there is no such entry.
pub fn find(directory: impl AsFd, name: &CStr) -> io::Result<Option<Statx>> {
    match stat(directory, name) {
        Ok(stat) => Ok(Some(stat)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Returns the type of a file from its `statx`.
pub fn kind(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

/// Returns whether a file is a whiteout, by which overlayfs hides a name of a lower layer: a
/// character device 0/0.
pub fn is_whiteout(stat: &Statx) -> bool {
    kind(stat) == FileType::CharacterDevice && stat.stx_rdev_major == 0 && stat.stx_rdev_minor == 0
}

/// Runs `call` with `directory` as the working directory, so that `l...xattr` calls reach a name in
/// it. Calls relative to a descriptor exist only since Linux 6.13, and a path through
/// `/proc/self/fd` takes several times as long. The working directory belongs to the process: the
/// agent's options for segments run in a process with one thread.
fn inside<T>(directory: BorrowedFd<'_>, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    rustix::process::fchdir(directory)?;
    let result = call();
    // The process leaves the directory again, because it would keep the file system busy.
    rustix::process::chdir(c"/")?;
    result
}

/// Returns all extended attributes of the entry `name` in `directory`.
pub fn xattrs(directory: impl AsFd, name: &CStr) -> io::Result<Xattrs> {
    inside(directory.as_fd(), || xattrs_here(name))
}

/// Returns the extended attributes of several entries of `directory`, in the order of `names`.
pub fn xattrs_of<'a>(
    directory: impl AsFd,
    names: impl Iterator<Item = &'a CStr>,
) -> io::Result<Vec<Xattrs>> {
    inside(directory.as_fd(), || names.map(xattrs_here).collect())
}

fn xattrs_here(name: &CStr) -> io::Result<Xattrs> {
    let list = all(|buffer| rustix::fs::llistxattr(name, buffer))?;
    let mut found = Xattrs::new();
    for key in list.split(|b| *b == 0).filter(|k| !k.is_empty()) {
        match all(|buffer| rustix::fs::lgetxattr(name, key, buffer)) {
            Ok(value) => found.insert(key.to_vec(), value),
            Err(e) if e.raw_os_error() == Some(Errno::NODATA.raw_os_error()) => None,
            Err(e) => return Err(e),
        };
    }
    Ok(found)
}

/// Repeats `call` until the buffer is large enough. File systems without extended attributes give
/// an empty result.
fn all(call: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; 256];
    loop {
        match call(&mut buffer) {
            Ok(n) => {
                buffer.truncate(n);
                return Ok(buffer);
            }
            // XATTR_SIZE_MAX and XATTR_LIST_MAX are 64 KiB (include/uapi/linux/limits.h).
            Err(Errno::RANGE) if buffer.len() < 64 << 10 => buffer.resize(64 << 10, 0),
            Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
            Err(e) => return Err(e.into()),
        }
    }
}

/// Returns a set of extended attributes without those that overlayfs and memfold set in layers.
pub fn without_overlay(mut xattrs: Xattrs) -> Xattrs {
    xattrs.retain(|key, _| !key.starts_with(OVERLAY_XATTRS) && key != TIMES.to_bytes());
    xattrs
}

/// Removes the extended attributes that overlayfs and memfold set in layers from a file, because
/// they would mislead a later overlay.
pub fn strip(directory: impl AsFd, name: &CStr) -> io::Result<()> {
    inside(directory.as_fd(), || {
        let list = all(|buffer| rustix::fs::llistxattr(name, buffer))?;
        for key in list.split(|b| *b == 0) {
            if key.starts_with(OVERLAY_XATTRS) || key == TIMES.to_bytes() {
                match rustix::fs::lremovexattr(name, key) {
                    Ok(()) | Err(Errno::NODATA) => {}
                    Err(e) => return Err(e.into()),
                }
            }
        }
        Ok(())
    })
}

/// Gives the directory `to` the owner, extended attributes, mode and times of `from`. If `times` is
/// given, it replaces the times of `from`.
pub fn copy_directory_facts(
    from: &OwnedFd,
    to: &OwnedFd,
    times: Option<Timestamps>,
) -> io::Result<()> {
    let stat = stat_of(from)?;
    let (uid, gid) = (Uid::from_raw(stat.stx_uid), Gid::from_raw(stat.stx_gid));
    let now = stat_of(to)?;
    if (now.stx_uid, now.stx_gid) != (stat.stx_uid, stat.stx_gid) {
        rustix::fs::fchown(to, Some(uid), Some(gid))?;
    }
    let wanted = without_overlay(xattrs(from, c".")?);
    let present = without_overlay(xattrs(to, c".")?);
    for key in present.keys().filter(|k| !wanted.contains_key(*k)) {
        rustix::fs::fremovexattr(to, &key[..])?;
    }
    for (key, value) in &wanted {
        if present.get(key) != Some(value) {
            rustix::fs::fsetxattr(to, &key[..], value, XattrFlags::empty())?;
        }
    }
    // The mode is set after the attributes, because an ACL among them changes it.
    let mode = u32::from(stat.stx_mode) & PERMISSIONS;
    rustix::fs::fchmod(to, Mode::from_raw_mode(mode))?;
    let times = times.unwrap_or(times_of(&stat));
    Ok(rustix::fs::futimens(to, &times)?)
}

/// Returns the modification time of a file, with an access time that means "unchanged".
pub fn times_of(stat: &Statx) -> Timestamps {
    Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        last_modification: Timespec {
            tv_sec: stat.stx_mtime.tv_sec,
            tv_nsec: stat.stx_mtime.tv_nsec.into(),
        },
    }
}

/// Extended attribute with the modification time that a directory of the upper layer had before the
/// merge began to empty it: seconds and nanoseconds in decimal, separated by a dot.
const TIMES: &CStr = c"trusted.memfold.mtime";

/// Records a directory's modification time in an extended attribute, and returns the recorded time.
/// A record of an interrupted run stays unchanged.
pub fn note_times(directory: &OwnedFd) -> io::Result<Timestamps> {
    let mut buffer = [0_u8; 64];
    let read = rustix::fs::fgetxattr(directory, TIMES, &mut buffer[..]);
    let noted = read.ok().and_then(|n| {
        let text = std::str::from_utf8(&buffer[..n]).ok()?;
        let (seconds, nanoseconds) = text.split_once('.')?;
        Some((seconds.parse().ok()?, nanoseconds.parse().ok()?))
    });
    let mut times = times_of(&stat_of(directory)?);
    if let Some((tv_sec, tv_nsec)) = noted {
        times.last_modification = Timespec { tv_sec, tv_nsec };
        return Ok(times);
    }
    let Timespec { tv_sec, tv_nsec } = times.last_modification;
    let text = format!("{tv_sec}.{tv_nsec}");
    rustix::fs::fsetxattr(directory, TIMES, text.as_bytes(), XattrFlags::empty())?;
    Ok(times)
}

/// Returns whether both directories are on one mount.
pub fn on_one_mount(a: &OwnedFd, b: &OwnedFd) -> io::Result<bool> {
    Ok(stat_of(a)?.stx_mnt_id == stat_of(b)?.stx_mnt_id)
}

/// Returns whether a directory of the upper layer is opaque: it hides the entries of lower layers.
pub fn is_opaque(directory: &OwnedFd) -> bool {
    let mut buffer = [0_u8; 8];
    rustix::fs::fgetxattr(directory, OPAQUE, &mut buffer[..]).is_ok_and(|n| &buffer[..n] == b"y")
}

/// Removes the entry `name` of `directory` and, if it is a directory, everything below it on the
/// same file system. A missing entry is no error.
pub fn remove(directory: impl AsFd, name: &CStr) -> io::Result<()> {
    let directory = directory.as_fd();
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::PERM) if unprotect(directory, name) => return remove(directory, name),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(e) => return Err(e.into()),
    }
    let inner = match open_in(directory, name) {
        // The name is no directory, so the first error counts (an immutable file).
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => return Err(Errno::PERM.into()),
        other => other?,
    };
    for child in names(&inner)? {
        remove(&inner, &child)?;
    }
    match rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Returns the size on disk, in bytes, of all regular files below a directory. Unreadable files
/// count as 0.
pub fn bytes_below(directory: &OwnedFd) -> u64 {
    let mut bytes = 0;
    for name in names(directory).unwrap_or_default() {
        let Ok(stat) = stat(directory, &name) else {
            continue;
        };
        match kind(&stat) {
            FileType::RegularFile => bytes += stat.stx_blocks * 512,
            FileType::Directory => {
                bytes += open_in(directory, &name).map_or(0, |inner| bytes_below(&inner));
            }
            _ => {}
        }
    }
    bytes
}

/// Returns the flags append-only (`a`) and immutable (`i`) that overlayfs keeps for a file in an
/// attribute of the upper layer (`ovl_set_protattr` in fs/overlayfs/inode.c).
pub fn protection(directory: impl AsFd, name: &CStr, stat: &Statx) -> IFlags {
    let mut flags = IFlags::empty();
    if kind(stat) == FileType::RegularFile {
        let mut buffer = [0_u8; 8];
        let key = c"trusted.overlay.protattr";
        let length = inside(directory.as_fd(), || {
            Ok(rustix::fs::lgetxattr(name, key, &mut buffer[..])?)
        });
        let letters = &buffer[..length.unwrap_or(0)];
        flags.set(IFlags::APPEND, letters.contains(&b'a'));
        flags.set(IFlags::IMMUTABLE, letters.contains(&b'i'));
    }
    flags
}

/// Adds `flags` (append-only, immutable) to the flags of the file `name` in `directory`. Empty
/// `flags` change nothing.
pub fn protect(directory: impl AsFd, name: &CStr, flags: IFlags) -> io::Result<()> {
    if flags.is_empty() {
        return Ok(());
    }
    let flags_of_open = OFlags::RDONLY | OFlags::NONBLOCK;
    let file = open_below(directory, name.to_bytes(), flags_of_open)?;
    let now = rustix::fs::ioctl_getflags(&file)?;
    Ok(rustix::fs::ioctl_setflags(&file, now | flags)?)
}

/// Clears the append-only and immutable flags of the regular file `name` in `directory`. Returns
/// true if flags were cleared.
pub fn unprotect(directory: impl AsFd, name: &CStr) -> bool {
    let directory = directory.as_fd();
    let flags = OFlags::RDONLY | OFlags::NONBLOCK;
    if !stat(directory, name).is_ok_and(|s| kind(&s) == FileType::RegularFile) {
        return false;
    }
    let Ok(file) = open_below(directory, name.to_bytes(), flags) else {
        return false;
    };
    let both = IFlags::APPEND | IFlags::IMMUTABLE;
    match rustix::fs::ioctl_getflags(&file) {
        Ok(now) if now.intersects(both) => {
            rustix::fs::ioctl_setflags(&file, now.difference(both)).is_ok()
        }
        _ => false,
    }
}

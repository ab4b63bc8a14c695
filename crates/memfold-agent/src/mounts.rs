//! Table of the mounted disk file systems, from `/proc/self/mountinfo`. The agent reports only the
//! page cache of files on these file systems.

use std::fs;
use std::io;

pub(crate) use memfold_wire::order::LAID_SOURCE;

/// Device number under which hints report the files of all overlays. The page cache of these files
/// belongs to a file system that may be mounted nowhere else. No real device number is that high
/// (20 bits of minor, 12 of major).
pub const OVERLAY_DEVICE: u32 = u32::MAX;

/// Kind of a file system: it decides how the agent finds a file by the inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// ext4, ext3, ext2, f2fs: a file handle is the inode number and generation 0.
    Plain,
    /// XFS: a file handle needs the generation.
    Xfs,
    /// btrfs: a file handle needs the subvolume.
    Btrfs,
    /// EROFS, squashfs: inode numbers in directories differ from `st_ino`.
    Packed,
    /// overlayfs: a file is found by its path only.
    Overlay,
}

/// A mounted disk file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// ID of the mount, as in `statx` (`stx_mnt_id`).
    pub id: u64,
    /// Device number of the file system in the kernel's internal form (`major << 20 | minor`), as
    /// in trace events.
    pub device: u32,
    /// Directory of the file system that this mount shows (`/` for the whole file system).
    pub root: Vec<u8>,
    /// Path of the mount point in the guest.
    pub point: Vec<u8>,
    /// Kind of the mounted file system.
    pub kind: Kind,
    /// Number of the mounted btrfs subvolume (`subvolid=`); `None` for other file systems.
    pub subvolume: Option<u64>,
    /// Whether this mount is a segment's image, or the overlay that shows a segment over a
    /// directory. Directory walks leave out both: the image's files need no page cache, and the
    /// files of the overlay's other layers are found on their own mounts. (A walk of the overlay
    /// would cost 15 MiB of slab in an idle guest, because the kernel looks up every name of every
    /// merged directory.)
    pub laid: bool,
    /// Whether a segment is mounted over a directory of this mount. Programs then read the files of
    /// that directory through an overlay.
    pub is_laid_over: bool,
}

impl Mount {
    /// Returns the device number under which hints report files of this mount: the file system's,
    /// or [`OVERLAY_DEVICE`].
    pub fn hint_device(&self) -> u32 {
        match self.kind {
            Kind::Overlay => OVERLAY_DEVICE,
            _ => self.device,
        }
    }
}

/// Table of the guest's mounted disk file systems.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mounts {
    /// Mounted disk file systems, in the order in which they were mounted.
    pub list: Vec<Mount>,
}

impl Mounts {
    /// Reads the table from `/proc/self/mountinfo`.
    pub fn read() -> io::Result<Self> {
        Ok(Self::parse(&fs::read("/proc/self/mountinfo")?))
    }

    /// Parses the text of a `mountinfo` file. Malformed lines and other file systems are skipped.
    pub fn parse(text: &[u8]) -> Self {
        let mut list: Vec<Mount> = text.split(|b| *b == b'\n').filter_map(line).collect();
        let laid: Vec<Vec<u8>> = list
            .iter()
            .filter(|m| m.laid && m.kind == Kind::Overlay)
            .map(|m| m.point.clone())
            .collect();
        for mount in &mut list {
            mount.is_laid_over = !mount.laid && laid.iter().any(|point| under(point, &mount.point));
        }
        Self { list }
    }

    /// Returns the device number under which hints report files of `event_device`, the device of a
    /// trace event. The result is `None` for devices without a disk file system (tmpfs, proc, block
    /// devices).
    pub fn hint_device(&self, event_device: u32) -> Option<u32> {
        if self
            .list
            .iter()
            .any(|m| m.kind != Kind::Overlay && m.device == event_device)
        {
            return Some(event_device);
        }
        // The device may be that of an overlay's layer that is mounted nowhere else. It is not an
        // anonymous device, whose major number is 0.
        let overlay = self.list.iter().any(|m| m.kind == Kind::Overlay);
        (overlay && event_device >> 20 != 0).then_some(OVERLAY_DEVICE)
    }

    /// Returns the mounts whose directories a walk has to read, without segments. Each part of a
    /// file system is walked once, through the mount that shows most of it.
    pub fn to_walk(&self) -> Vec<&Mount> {
        let mut chosen: Vec<&Mount> = Vec::new();
        let mut sorted: Vec<&Mount> = self.list.iter().filter(|m| !m.laid).collect();
        sorted.sort_by_key(|m| (m.root.len(), m.point.len()));
        for mount in sorted {
            let covered = |c: &&Mount| c.device == mount.device && under(&mount.root, &c.root);
            if !chosen.iter().any(covered) {
                chosen.push(mount);
            }
        }
        chosen
    }

    /// Returns the mounts through which files of `device` can be opened by handle; those that show
    /// most of the file system come first.
    pub fn by_device(&self, device: u32) -> Vec<&Mount> {
        let mut found: Vec<_> = self.list.iter().filter(|m| m.device == device).collect();
        found.sort_by_key(|m| (m.root.len(), m.point.len()));
        found
    }
}

fn under(path: &[u8], root: &[u8]) -> bool {
    match path.strip_prefix(root) {
        Some(rest) => rest.is_empty() || rest[0] == b'/' || root == b"/",
        None => false,
    }
}

/// Parses a line such as
/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
/// (`proc_pid_mountinfo(5)`).
fn line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|b| *b == b' ');
    let id = number(fields.next()?)?;
    let _parent = fields.next()?;
    let device = fields.next()?;
    let colon = device.iter().position(|b| *b == b':')?;
    let (major, minor) = (number(&device[..colon])?, number(&device[colon + 1..])?);
    let root = unescape(fields.next()?);
    let point = unescape(fields.next()?);
    let mut fields = fields.skip_while(|f| *f != b"-").skip(1);
    let kind = match fields.next()? {
        b"ext4" | b"ext3" | b"ext2" | b"f2fs" => Kind::Plain,
        b"xfs" => Kind::Xfs,
        b"btrfs" => Kind::Btrfs,
        b"erofs" | b"squashfs" => Kind::Packed,
        b"overlay" => Kind::Overlay,
        _ => return None,
    };
    let source = fields.next()?;
    let options = fields.next().unwrap_or_default();
    let subvolume = options
        .split(|b| *b == b',')
        .find_map(|o| number(o.strip_prefix(b"subvolid=")?));
    if major >= 1 << 12 || minor >= 1 << 20 {
        return None;
    }
    Some(Mount {
        id,
        device: u32::try_from(major << 20 | minor).ok()?,
        root,
        point,
        kind,
        subvolume,
        laid: match kind {
            Kind::Overlay => source.starts_with(LAID_SOURCE.as_bytes()),
            Kind::Packed => options.split(|b| *b == b',').any(|o| o == b"dax=always"),
            _ => false,
        },
        is_laid_over: false,
    })
}

fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Decodes `\ooo`: mountinfo writes space, tab, newline and backslash as a backslash and three
/// octal digits.
pub(crate) fn unescape(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, tail)) = rest.split_first() {
        match *tail {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] if byte == b'\\' => {
                out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = &tail[3..];
            }
            _ => {
                out.push(byte);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &[u8] = b"22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard\n\
        23 22 0:21 / /proc rw - proc proc rw\n\
        24 22 0:35 /sub /mnt\\040x rw - btrfs /dev/vdb rw,space_cache=v2,subvolid=256,subvol=/sub\n\
        25 22 254:0 /var/lib /srv/lib rw - ext4 /dev/vda rw\n\
        26 22 0:40 / /merged rw - overlay o rw,lowerdir=/a\n";

    #[test]
    fn of_the_mounts_in_mountinfo_only_those_of_disks_and_overlays_are_listed() {
        let mounts = Mounts::parse(TEXT);
        assert_eq!(mounts.list.len(), 4);
        assert_eq!(mounts.list[0].device, 254 << 20);
        assert_eq!(mounts.list[1].point, b"/mnt x");
        assert_eq!(mounts.list[1].subvolume, Some(256));
        assert_eq!(mounts.hint_device(254 << 20), Some(254 << 20));
        assert_eq!(mounts.hint_device(21), None);
        assert_eq!(mounts.hint_device(35), Some(35));
        assert_eq!(mounts.hint_device(7 << 20), Some(OVERLAY_DEVICE));
    }

    #[test]
    fn the_file_walk_does_not_enter_a_bind_mount_of_a_subdirectory_that_it_visits_anyway() {
        let mounts = Mounts::parse(TEXT);
        let points: Vec<_> = mounts.to_walk().iter().map(|m| m.point.clone()).collect();
        assert_eq!(points.len(), 3);
        assert!(!points.contains(&b"/srv/lib".to_vec()));
    }

    #[test]
    fn the_file_walk_does_not_enter_mounts_of_segments_and_their_overlays() {
        let mounts = Mounts::parse(
            b"22 1 254:0 / / rw - ext4 /dev/vda rw\n\
            27 22 259:0 / /run/memfold/segments/web@1 ro - erofs /dev/pmem0 ro,user_xattr,dax=always\n\
            28 22 0:41 / /usr rw - overlay memfold:web@1 rw,lowerdir=/a\n\
            29 22 259:1 / /mnt/erofs ro - erofs /dev/vdb ro,user_xattr\n\
            30 22 0:42 / /merged rw - overlay o rw,lowerdir=/a\n",
        );
        let points: Vec<_> = mounts
            .to_walk()
            .iter()
            .map(|m| str::from_utf8(&m.point).unwrap())
            .collect();
        assert_eq!(points, ["/", "/merged", "/mnt/erofs"]);
        let over: Vec<bool> = mounts.list.iter().map(|m| m.is_laid_over).collect();
        assert_eq!(over, [true, false, false, false, false]);
        // Events of an overlay's layer belong to the overlay, unless another mount has this device.
        assert_eq!(mounts.hint_device(259 << 20), Some(259 << 20));
    }

    proptest! {
        #[test]
        fn parsing_an_arbitrary_mountinfo_file_never_causes_a_panic(text in "([0-9]{1,12}[ :]|/[a-z\\\\0-9]{0,5} |- (ext4|overlay) |[ \n,=]){0,40}") {
            let mounts = Mounts::parse(text.as_bytes());
            mounts.to_walk();
        }
    }
}

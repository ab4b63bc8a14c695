//! Finds where a file's bytes are on the block device of its file system, with `FS_IOC_FIEMAP`.
//!
//! Sources: `Documentation/filesystems/fiemap.rst`, `include/uapi/linux/fiemap.h`.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::result::check;

/// Request number `_IOWR('f', 11, struct fiemap)`. The extents after the structure do not count in
/// its size.
const FS_IOC_FIEMAP: libc::c_ulong = 0xC020_660B;
const _: () = assert!(size_of::<Header>() == 0x20);

/// Maximum number of extents that one call of [`extents`] returns.
pub const AT_ONCE: u32 = 256;

/// An extent of a file: bytes that are consecutive in the file and on the device
/// (`struct fiemap_extent`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Offset of the extent's first byte in the file.
    pub logical: u64,
    /// Offset of the extent's first byte on the device.
    pub physical: u64,
    /// Length of the extent in bytes.
    pub length: u64,
    /// Fields that the kernel reserves; without meaning.
    pub reserved64: [u64; 2],
    /// Flags of the extent (`FIEMAP_EXTENT_*`).
    pub flags: u32,
    /// Fields that the kernel reserves; without meaning.
    pub reserved: [u32; 3],
}
const _: () = assert!(size_of::<Extent>() == 56);

impl Extent {
    /// Returns whether the device holds the file's bytes unchanged in this extent. If the extent
    /// has an unknown flag, the result is false.
    #[must_use]
    pub const fn is_plain(&self) -> bool {
        // The flags FIEMAP_EXTENT_LAST, _MERGED and _SHARED. Other flags mark extents without a
        // place, or whose bytes are packed, encrypted or unwritten.
        const HARMLESS: u32 = 0x1 | 0x1000 | 0x2000;
        self.flags & !HARMLESS == 0
    }

    /// Returns whether this is the last extent of the file.
    #[must_use]
    pub const fn is_last(&self) -> bool {
        self.flags & 0x1 != 0
    }
}

/// The structure `struct fiemap` without its extents.
#[repr(C)]
struct Header {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
}

#[repr(C)]
struct Request {
    header: Header,
    extents: [Extent; AT_ONCE as usize],
}
const _: () = assert!(std::mem::offset_of!(Request, extents) == 0x20);

/// Returns the extents of a file that end after byte `start`, in ascending order, at most
/// [`AT_ONCE`]. The call does not write back dirty pages; extents of dirty pages may have no
/// location on the device yet.
///
/// # Errors
///
/// `EOPNOTSUPP` on file systems without `FS_IOC_FIEMAP`; `EBADF` for an `O_PATH` descriptor.
pub fn extents(file: impl AsFd, start: u64) -> io::Result<Vec<Extent>> {
    let mut request = Request {
        header: Header {
            start,
            length: u64::MAX - start,
            flags: 0,
            mapped_extents: 0,
            extent_count: AT_ONCE,
            reserved: 0,
        },
        extents: [Extent::default(); AT_ONCE as usize],
    };
    // SAFETY: the kernel reads the header, and writes to it and to at most `extent_count` extents
    // behind it, which are there.
    check(unsafe {
        libc::ioctl(
            file.as_fd().as_raw_fd(),
            FS_IOC_FIEMAP as libc::Ioctl,
            &raw mut request,
        )
    })?;
    let found = request.header.mapped_extents.min(AT_ONCE) as usize;
    Ok(request.extents[..found].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn the_extents_of_a_written_file_cover_its_bytes() {
        let path = std::env::temp_dir().join(format!("memfold-extents-{}", std::process::id()));
        std::fs::write(&path, vec![7; 300 << 10]).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.sync_all().unwrap();
        let found = match extents(&file, 0) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                memfold_testkit::skip!("needs a temporary directory on a file system with FIEMAP");
            }
            found => found.unwrap(),
        };
        assert_eq!(found[0].logical, 0);
        assert!(found.iter().all(Extent::is_plain), "{found:?}");
        assert!(found.last().unwrap().is_last());
        assert_eq!(found.iter().map(|e| e.length).sum::<u64>(), 300 << 10);
        let behind = extents(&file, 300 << 10).unwrap();
        assert_eq!(behind, []);
        let refused = extents(std::io::pipe().unwrap().0, 0).unwrap_err();
        assert_ne!(refused.raw_os_error(), None);
    }
}

//! What the fold engine knows about the RAM image of the snapshot that a VM runs from. QEMU maps
//! this file privately as the VM's RAM.

use std::fs::File;
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use memfold_store::mapped::FileMapping;
use memfold_sys::pagemap::Region;
use memfold_units::{Hva, PAGE_SIZE};
use rustix::fs::SeekFrom;
use rustix::io::{Errno, ReadWriteFlags};
use rustix::process::Pid;

/// `TMPFS_MAGIC` of `linux/magic.h`, the file system type of tmpfs and of memfds.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Part of a view (a private mapping of a file in QEMU): address in QEMU, length in pages, and
/// first page in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub hva: Hva,
    pub pages: u64,
    pub file_page: u64,
}

/// RAM image of the snapshot that a VM runs from, opened by the daemon.
#[derive(Debug)]
pub(super) struct Image {
    /// Device (major, minor) and inode number of the image's file, as in `/proc/PID/maps`.
    pub identity: (u32, u32, u64),
    pub file: File,
    /// Number by which orders to the library name the image.
    pub number: u32,
    pub pages: u64,
    /// Whether the image is in memory (tmpfs or memfd), and not on a disk.
    pub in_memory: bool,
    /// Whether the kernel can write-protect the private mappings of the image: the image is in
    /// memory, and no other file is mapped as the VM's RAM.
    pub protectable: bool,
}

impl Image {
    pub fn open(pid: Pid, view: &FileMapping) -> std::io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let file = view.open(pid)?;
        let facts = file.metadata()?;
        let in_memory = rustix::fs::fstatfs(&file)?.f_type == TMPFS_MAGIC;
        if facts.ino() != view.file.2 {
            return Err(std::io::Error::other(
                "another file is mapped at that address now",
            ));
        }
        Ok(Self {
            identity: view.file,
            number: file_number(facts.dev(), facts.ino()),
            pages: facts.len() / PAGE_SIZE,
            in_memory,
            protectable: in_memory,
            file,
        })
    }

    /// Returns the page ranges for which the image holds data (all but holes), in ascending order.
    pub fn data(&self) -> std::io::Result<Vec<Range<u64>>> {
        let seek = |to| match rustix::fs::seek(&self.file, to) {
            Ok(offset) => Ok(Some(offset)),
            Err(Errno::NXIO) => Ok(None), // no data or hole follows
            Err(error) => Err(std::io::Error::from(error)),
        };
        let mut data = Vec::new();
        let mut at = 0;
        while let Some(start) = seek(SeekFrom::Data(at))? {
            at = seek(SeekFrom::Hole(start))?.unwrap_or(self.pages * PAGE_SIZE);
            data.push(start / PAGE_SIZE..at.div_ceil(PAGE_SIZE));
        }
        Ok(data)
    }

    /// Reads the image from page `page` on into `buffer`. Returns `None` if some of these pages are
    /// not in memory, because reading them from disk would cost more than folding them back saves.
    pub fn read(&self, page: u64, buffer: &mut [u8]) -> Option<()> {
        let offset = page * PAGE_SIZE;
        let parts = &mut [IoSliceMut::new(buffer)];
        match rustix::io::preadv2(&self.file, parts, offset, ReadWriteFlags::NOWAIT) {
            Ok(n) => (n == buffer.len()).then_some(()),
            // tmpfs supports no reads with NOWAIT, and needs none. Other file systems without
            // NOWAIT might wait for a network.
            Err(Errno::OPNOTSUPP) if self.in_memory => self.file.read_exact_at(buffer, offset).ok(),
            Err(_) => None,
        }
    }
}

impl Part {
    /// Returns the part of `self` that `region`, a range of addresses from the page map, covers.
    pub fn at(self, region: &Region) -> Self {
        Self {
            hva: region.start,
            pages: region.pages(),
            file_page: self.file_page + region.start.pages_since(self.hva),
        }
    }

    /// Returns the part without its first `pages` pages; `None` if nothing is left.
    pub fn after(self, pages: u64) -> Option<Self> {
        (pages < self.pages).then(|| Self {
            hva: self.hva.add_pages(pages),
            pages: self.pages - pages,
            file_page: self.file_page + pages,
        })
    }
}

/// Returns the number by which orders to the libraries name a file; every daemon computes the same
/// number. Files in tmpfs mounts of their own have equal inode numbers and different devices;
/// memfds have the same device and different inode numbers.
pub(super) fn file_number(dev: u64, inode: u64) -> u32 {
    #[allow(clippy::cast_possible_truncation)]
    // If two files have the same number, the library refuses the second.
    let inode = inode as u32;
    inode ^ rustix::fs::minor(dev).rotate_right(12)
}

//! The image of the snapshot that a VM runs from.

use std::fs::File;
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use memfold_store::mapped::FileMapping;
use memfold_units::{Hva, PAGE_SIZE};
use rustix::fs::SeekFrom;
use rustix::io::{Errno, ReadWriteFlags};
use rustix::process::Pid;

/// `TMPFS_MAGIC` of `linux/magic.h`, also of memfds.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Pages of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub hva: Hva,
    pub pages: u64,
    pub file_page: u64,
}

/// The image that a VM runs from.
#[derive(Debug)]
pub(super) struct Image {
    /// As `/proc/PID/maps` names it.
    pub identity: (u32, u32, u64),
    pub file: File,
    /// Number that fold orders name it by.
    pub number: u32,
    pub pages: u64,
    /// Whether it lies in memory, not in a file system.
    pub in_memory: bool,
    /// Whether the kernel can protect private views of it against writes: it lies in memory, and
    /// nothing else is mapped for the VM's RAM.
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

    /// Pages that hold something, ascending.
    pub fn data(&self) -> std::io::Result<Vec<Range<u64>>> {
        let seek = |to| match rustix::fs::seek(&self.file, to) {
            Ok(offset) => Ok(Some(offset)),
            Err(Errno::NXIO) => Ok(None), // nothing behind it
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

    /// Reads pages that are in memory. `None`: some are not, and reading them from a disk would
    /// cost more than they give.
    pub fn read(&self, page: u64, buffer: &mut [u8]) -> Option<()> {
        let offset = page * PAGE_SIZE;
        let parts = &mut [IoSliceMut::new(buffer)];
        match rustix::io::preadv2(&self.file, parts, offset, ReadWriteFlags::NOWAIT) {
            Ok(n) => (n == buffer.len()).then_some(()),
            // Memory files know no such reading, and need none. Other file systems that don't might
            // wait for a network.
            Err(Errno::OPNOTSUPP) if self.in_memory => self.file.read_exact_at(buffer, offset).ok(),
            Err(_) => None,
        }
    }
}

impl Part {
    /// What is left behind the first `pages` pages, if anything is.
    pub fn after(self, pages: u64) -> Option<Self> {
        (pages < self.pages).then(|| Self {
            hva: self.hva.add_pages(pages),
            pages: self.pages - pages,
            file_page: self.file_page + pages,
        })
    }
}

/// Number that fold orders name a file by: the same for every daemon. Files in a tmpfs of their own
/// all have the same inode number and differ in the device; memfds the other way round.
pub(super) fn file_number(dev: u64, inode: u64) -> u32 {
    #[allow(clippy::cast_possible_truncation)]
    // Should two numbers meet, the library refuses the second file.
    let inode = inode as u32;
    inode ^ rustix::fs::minor(dev).rotate_right(12)
}

//! Reads a list of paths that the host sends, and opens the regular files among these paths.

use std::fs::File;
use std::io::{self, BufRead, Read};
use std::os::fd::AsRawFd;

use rustix::fs::{FileType, Mode, OFlags, Stat};

use crate::mounts::unescape;

/// Most bytes of the list that are read.
pub const MAX_INPUT: u64 = 1 << 20;

/// Most paths of the list that are read.
pub const MAX_FILES: usize = 1 << 14;

/// Returns the paths in the input, one in each line. Any byte may be written as `\ooo` (octal), as
/// in `/proc/self/mountinfo`.
pub fn paths(input: &mut impl BufRead) -> impl Iterator<Item = io::Result<Vec<u8>>> {
    let lines = input.take(MAX_INPUT).split(b'\n').take(MAX_FILES);
    lines.map(|line| Ok(unescape(&line?)))
}

/// A regular file that is not opened yet.
pub struct Named {
    descriptor: rustix::fd::OwnedFd,
    /// Metadata of the file.
    pub facts: Stat,
}

/// Finds a regular file; returns `None` if the path is relative or leads to something else.
/// (Opening a device may have effects, and opening a pipe waits.)
pub fn find(path: &[u8]) -> io::Result<Option<Named>> {
    if !path.starts_with(b"/") {
        return Ok(None);
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let descriptor = rustix::fs::open(path, flags, Mode::empty())?;
    let facts = rustix::fs::fstat(&descriptor)?;
    let is_file = FileType::from_raw_mode(facts.st_mode) == FileType::RegularFile;
    Ok(is_file.then_some(Named { descriptor, facts }))
}

impl Named {
    /// Opens the file for reading. Does not wait for a process that holds a lease on the file.
    pub fn open(&self) -> io::Result<File> {
        let path = format!("/proc/self/fd/{}", self.descriptor.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
    }
}

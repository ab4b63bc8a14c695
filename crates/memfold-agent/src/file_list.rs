//! Reads a list of paths that the host sends, and opens the regular files among them.

use std::fs::File;
use std::io::{self, BufRead, Read};
use std::os::fd::AsRawFd;

use rustix::fs::{FileType, Mode, OFlags, Stat};

use crate::mounts::unescape;

/// Most bytes of input that are read.
pub const MAX_INPUT: u64 = 1 << 20;

/// Most paths that are read.
pub const MAX_FILES: usize = 1 << 14;

/// Returns the paths of the input, a line each; any byte may be `\ooo`, its octal number, as in
/// `/proc/self/mountinfo`.
pub fn paths(input: &mut impl BufRead) -> impl Iterator<Item = io::Result<Vec<u8>>> {
    let lines = input.take(MAX_INPUT).split(b'\n').take(MAX_FILES);
    lines.map(|line| Ok(unescape(&line?)))
}

/// A regular file that is not opened yet.
pub struct Named {
    descriptor: rustix::fd::OwnedFd,
    /// Its properties.
    pub facts: Stat,
}

/// Finds a regular file; `None`: the path is relative, or of something else. To open a device may
/// do something, and to open a pipe waits.
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
    /// Opens the file for reading, without waiting for somebody who holds a lease on it.
    pub fn open(&self) -> io::Result<File> {
        let path = format!("/proc/self/fd/{}", self.descriptor.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
    }
}

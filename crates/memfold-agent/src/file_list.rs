//! Reads a list of paths that the host sends to the agent, and opens those files in the guest that
//! are regular files.

use std::fs::File;
use std::io::{self, BufRead, Read};
use std::os::fd::AsRawFd;

use rustix::fs::{FileType, Mode, OFlags, Stat};

use crate::mounts::unescape;

/// Maximum number of bytes that are read of a list of paths. The rest of the list is ignored.
pub const MAX_INPUT: u64 = 1 << 20;

/// Maximum number of paths that are read of a list. The rest of the list is ignored.
pub const MAX_FILES: usize = 1 << 14;

/// Returns the paths in `input`, one in each line. Any byte of a path may be written as `\ooo`
/// (octal), as in `/proc/self/mountinfo`.
pub fn paths(input: &mut impl BufRead) -> impl Iterator<Item = io::Result<Vec<u8>>> {
    let lines = input.take(MAX_INPUT).split(b'\n').take(MAX_FILES);
    lines.map(|line| Ok(unescape(&line?)))
}

/// A regular file that was found by its path and is not open for reading yet.
pub struct Named {
    descriptor: rustix::fd::OwnedFd,
    /// Metadata of the file (`fstat(2)`).
    pub facts: Stat,
}

/// Finds a regular file by its absolute path. Returns `None` if the path is relative or leads to
/// something else. (Opening a device may have effects, and opening a pipe waits.)
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
    /// Opens the file for reading. If another process holds a lease on the file, this fails and
    /// does not wait.
    pub fn open(&self) -> io::Result<File> {
        let path = format!("/proc/self/fd/{}", self.descriptor.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
    }
}

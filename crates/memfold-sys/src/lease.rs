//! Finds out whether anybody has a file open for writing (`F_SETLEASE`, `fcntl(2)`).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::result::check;

/// Returns whether a process has the file open for writing, or a writable shared mapping of it.
/// `file` must be open for reading only, and its owner must be this process's user.
///
/// The kernel grants a read lease only if there is no open file description with write access. The
/// lease is given up at once.
///
/// # Errors
/// Fails on file systems without leases, such as NFS.
pub fn has_writers(file: impl AsFd) -> io::Result<bool> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: F_SETLEASE takes a number and reads no memory.
    match check(unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_RDLCK) }) {
        Ok(()) => {}
        Err(rustix::io::Errno::AGAIN) => return Ok(true),
        Err(error) => return Err(error.into()),
    }
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) })?;
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn a_writable_descriptor_of_a_file_is_found_until_it_is_closed() {
        let file = memfd_create("leased", MemfdFlags::CLOEXEC).unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let reader = File::open(&path).unwrap();
        // The kernel does not count the descriptor that made a memfd.
        drop(file);
        assert!(!has_writers(&reader).unwrap());
        // A descriptor that was duplicated before counts as well.
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let writer = File::options().write(true).open(path).unwrap();
        let copy = writer.try_clone().unwrap();
        drop(writer);
        assert!(has_writers(&reader).unwrap());
        drop(copy);
        assert!(!has_writers(&reader).unwrap());
    }
}

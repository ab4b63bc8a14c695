//! Converts what system calls return through the C library (0 or a descriptor, or -1 and `errno`)
//! into Rust's `Result`.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use rustix::io::Errno;

/// Returns the error of this thread's last failed system call.
pub(crate) fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Returns the error of a system call whose result is not 0.
pub(crate) fn check(result: impl Into<i64>) -> Result<(), Errno> {
    if result.into() == 0 {
        Ok(())
    } else {
        Err(last_error())
    }
}

/// Takes ownership of the descriptor that a system call has just made.
pub(crate) fn descriptor(result: impl Into<i64>) -> Result<OwnedFd, Errno> {
    match RawFd::try_from(result.into()) {
        // SAFETY: the kernel has just made this descriptor and nobody else knows it.
        Ok(raw) if raw >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(raw) }),
        _ => Err(last_error()),
    }
}

//! Shared mappings of a file.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

/// A writable shared mapping of part of a file, unmapped on drop. Used to fill the page store.
///
/// Bytes are reached only by copy, never by reference: other processes map the same pages.
#[derive(Debug)]
pub struct SharedMapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is reached through raw copies alone.
unsafe impl Send for SharedMapping {}

impl SharedMapping {
    /// Maps `length` bytes of `file` from `offset`, both multiples of the page size, for reading and writing.
    pub fn new(file: impl AsFd, offset: u64, length: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                offset,
            )
        }?;
        let start = NonNull::new(start.cast())
            .ok_or_else(|| io::Error::other("mmap gave a null address"))?;
        Ok(Self { start, length })
    }

    /// Start of the mapping, for system calls that write there.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.length
    }

    /// Whether the mapping is empty (it never is: the kernel refuses to make such a one).
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: start and length are of the mapping that `new` made, and no reference into it exists.
        // A failure would leave address space in use, nothing else.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

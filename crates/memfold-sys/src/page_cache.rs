//! Reports how many pages of a file are in the kernel's page cache (`cachestat(2)`).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, statx};

use crate::result::check;

/// Number of the system call `cachestat`, the same on all architectures
/// (`include/uapi/asm-generic/unistd.h`).
const CACHESTAT: libc::c_long = 451;

/// The structure `struct cachestat_range` of `linux/mman.h`, in bytes. A length of 0 means: to the
/// end of the file.
#[repr(C)]
#[derive(Default)]
struct Range {
    offset: u64,
    length: u64,
}

/// The structure `struct cachestat` of `linux/mman.h`, in pages.
#[repr(C)]
#[derive(Default)]
struct Counts {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Returns the number of a file's pages that the page cache holds (`cachestat(2)`). For a file that
/// is read in place (DAX), the result is 0.
///
/// A DAX file is never passed to the kernel: `filemap_cachestat` would take its DAX entries for
/// those of evicted pages and dereference a null pointer (seen in Linux 6.12.117).
///
/// # Errors
///
/// `ENOSYS` before Linux 6.5; `EPERM` for a file that the caller neither owns nor can write.
pub fn cached_pages(file: impl AsFd) -> io::Result<u64> {
    let facts = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::empty())?;
    if facts.stx_attributes.contains(StatxAttributes::DAX) {
        return Ok(0);
    }
    let (range, mut counts) = (Range::default(), Counts::default());
    let file = file.as_fd().as_raw_fd();
    // SAFETY: the kernel reads `range` and writes `counts`, which have its layouts.
    check(unsafe { libc::syscall(CACHESTAT, file, &raw const range, &raw mut counts, 0) })?;
    Ok(counts.cached)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newly_written_file_pages_are_counted_as_cached() {
        let path = std::env::temp_dir().join(format!("memfold-cached-{}", std::process::id()));
        std::fs::write(&path, [7; 3 * 4096]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        match cached_pages(&file) {
            Ok(pages) => assert_eq!(pages, 3),
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                memfold_testkit::skip!("the kernel has no cachestat(2)")
            }
            Err(error) => panic!("{error}"),
        }
    }
}

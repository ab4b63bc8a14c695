//! Starts writing a file's dirty pages from the page cache to its disk, without waiting for the end
//! (`sync_file_range(2)`).

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use crate::result::check;

/// Makes the kernel start writing dirty pages of a file to its disk, in the range `bytes`
/// (`sync_file_range(2)`, `SYNC_FILE_RANGE_WRITE`). This function does not wait for the writes to
/// end, but may wait for space in the disk's queue. A later `fsync(2)` reports failed writes.
pub fn begin(file: impl AsFd, bytes: Range<u64>) -> io::Result<()> {
    let offset = libc::off64_t::try_from(bytes.start).map_err(io::Error::other)?;
    let length = bytes.end.saturating_sub(bytes.start);
    // For the kernel, a length of 0 would mean the whole rest of the file.
    if length == 0 {
        return Ok(());
    }
    let length = libc::off64_t::try_from(length).map_err(io::Error::other)?;
    let file = file.as_fd().as_raw_fd();
    // SAFETY: the call touches no memory of this process.
    let done = unsafe { libc::sync_file_range(file, offset, length, libc::SYNC_FILE_RANGE_WRITE) };
    Ok(check(done)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writeback_starts_for_a_file_and_is_refused_for_a_pipe() {
        let path = std::env::temp_dir().join(format!("memfold-writeback-{}", std::process::id()));
        std::fs::write(&path, [7; 8192]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        begin(&file, 0..8192).unwrap();
        begin(&file, 5..5).unwrap();
        let (_reader, writer) = std::io::pipe().unwrap();
        let refused = begin(&writer, 0..4096).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ESPIPE));
    }
}

//! Makes memory that is locked in RAM and that other processes can read and write, because it
//! belongs to a memfd. memfold lends such memory by iSCSI.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use memfold_units::PAGE_SIZE;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;

use crate::region::Mapping;

/// A memfd whose pages are all allocated and locked in RAM (`mlock(2)`). A process that has the
/// memfd open may write to it and punch holes, but not change its length. The pages become free
/// when this value is dropped and no process has the memfd open.
#[derive(Debug)]
pub struct LockedFile {
    file: OwnedFd,
    #[allow(dead_code)] // it holds the pages
    mapping: Mapping,
}

impl LockedFile {
    /// Creates a memfd of `bytes` bytes, rounded up to pages, and allocates, clears and locks its
    /// pages. That takes some 0.3 s for each GiB.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if there is not enough memory, or if the limit on locked memory (`RLIMIT_MEMLOCK`)
    /// is lower and this process is not privileged.
    pub fn new(name: &str, bytes: u64) -> Result<Self, Errno> {
        let pages = bytes.div_ceil(PAGE_SIZE);
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, pages * PAGE_SIZE)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        let mapping = Mapping::shared(&file, pages)?;
        let length = usize::try_from(pages * PAGE_SIZE).map_err(|_| Errno::OVERFLOW)?;
        // SAFETY: the mapping is ours, that long, and stays as long as `mapping`; locking changes
        // nothing in it.
        unsafe { rustix::mm::mlock(mapping.area().pointer(), length) }?;
        Ok(Self { file, mapping })
    }
}

impl AsFd for LockedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_new_memory_file_for_lending_is_locked_and_full_of_zeroes_and_cannot_be_resized() {
        let lent = LockedFile::new("lent", 3 * PAGE_SIZE - 1).unwrap();
        let file = std::fs::File::from(lent.as_fd().try_clone_to_owned().unwrap());
        assert_eq!(file.metadata().unwrap().len(), 3 * PAGE_SIZE);
        let mut last = [1; 1];
        file.read_exact_at(&mut last, 3 * PAGE_SIZE - 1).unwrap();
        assert_eq!(last, [0]);
        file.set_len(0).unwrap_err();
        file.set_len(4 * PAGE_SIZE).unwrap_err();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|l| l.starts_with("VmLck:")).unwrap();
        let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!(kib >= 12, "{line}");
    }
}

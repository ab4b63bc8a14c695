//! Access to 32-bit words of a file that several processes map and change at the same time. The
//! daemon and memfold's library in QEMU use this for a live save.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicU32;

use memfold_units::PAGE_SIZE;
use rustix::fs::{SealFlags, fcntl_get_seals};
use rustix::io::Errno;

use crate::region::Mapping;

/// The first pages of a memfd, mapped as 32-bit words that several processes change atomically.
#[derive(Debug)]
pub struct SharedWords {
    mapping: Mapping,
    words: u64,
}

impl SharedWords {
    /// Maps the first `pages` pages of `file`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the file is shorter than `pages` pages, or is no memfd sealed against shrinking.
    /// (Access beyond the end of a file kills the process.)
    pub fn map(file: impl AsFd, pages: u64) -> Result<Self, Errno> {
        let length = u64::try_from(rustix::fs::fstat(&file)?.st_size).map_err(|_| Errno::INVAL)?;
        let sealed = fcntl_get_seals(&file)?.contains(SealFlags::SHRINK);
        if !sealed || length / PAGE_SIZE < pages {
            return Err(Errno::INVAL);
        }
        Ok(Self {
            mapping: Mapping::shared(file, pages)?,
            words: pages * PAGE_SIZE / 4,
        })
    }

    /// Returns the 32-bit word number `index`, from 0; `None` if the mapped pages have fewer words.
    #[must_use]
    pub fn get(&self, index: u64) -> Option<&AtomicU32> {
        if index >= self.words {
            return None;
        }
        let offset = usize::try_from(index).ok()?;
        let first = self.mapping.area().pointer().cast::<u32>();
        // SAFETY: the word lies inside the mapping, which lives as long as `self` and is aligned to
        // pages; whoever else maps the file changes its words atomically too.
        Some(unsafe { AtomicU32::from_ptr(first.add(offset)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
    use std::sync::atomic::Ordering;

    #[test]
    fn two_mappings_of_a_shared_file_show_the_same_words() {
        let file = memfd_create("words", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, 2 * PAGE_SIZE).unwrap();
        assert_eq!(SharedWords::map(&file, 2).unwrap_err(), Errno::INVAL);
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        assert_eq!(SharedWords::map(&file, 3).unwrap_err(), Errno::INVAL);
        let (a, b) = (
            SharedWords::map(&file, 2).unwrap(),
            SharedWords::map(&file, 2).unwrap(),
        );
        a.get(2047).unwrap().store(7, Ordering::Release);
        assert_eq!(b.get(2047).unwrap().load(Ordering::Acquire), 7);
        assert!(a.get(2048).is_none());
    }

    #[test]
    fn a_file_that_cannot_be_sealed_is_refused_as_shared_memory() {
        let file = tempfile();
        assert!(SharedWords::map(&file, 1).is_err());
    }

    fn tempfile() -> std::fs::File {
        let path = std::env::temp_dir().join(format!("memfold-words-{}", std::process::id()));
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len(PAGE_SIZE).unwrap();
        file
    }
}

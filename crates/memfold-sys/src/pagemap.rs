//! Reads the state of each page of a process: by the `PAGEMAP_SCAN` ioctl (Linux >= 6.7) and from
//! plain `/proc/PID/pagemap`.
//!
//! Sources: `Documentation/admin-guide/mm/pagemap.rst`, `include/uapi/linux/fs.h`.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use memfold_units::{Hva, PAGE_SIZE};
use rustix::process::Pid;

/// The structure `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// Request number `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
const _: () = assert!(size_of::<ScanArgument>() == 0x60);

/// Categories of pages in the arguments and results of `PAGEMAP_SCAN`, as bits (`PAGE_IS_*`).
pub mod category {
    /// The page is in a range whose writes are tracked (`Userfaultfd::open_async`).
    pub const WRITES_TOLD: u64 = 1 << 0;
    /// The page is not protected by a userfaultfd. With [`WRITES_TOLD`]: the page was written to
    /// since it was protected.
    pub const WRITTEN: u64 = 1 << 1;
    /// The page is in memory, and mapped from a file or shared memory. In a private file mapping:
    /// the page has no private copy.
    pub const FILE: u64 = 1 << 2;
    /// The page is in memory.
    pub const PRESENT: u64 = 1 << 3;
    /// The page is in swap.
    pub const SWAPPED: u64 = 1 << 4;
    /// The page maps the kernel's shared page of zeroes.
    pub const ZERO: u64 = 1 << 5;
    /// The page is mapped as a part of a huge page.
    pub const HUGE: u64 = 1 << 6;
}

/// Consecutive pages of a process that have the same categories.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Address of the region's first byte.
    pub start: Hva,
    /// Address after the region's last byte.
    pub end: Hva,
    /// Categories of the region's pages, as [`category`] bits. Categories that the scan does not
    /// report are 0.
    pub categories: u64,
}
const _: () = assert!(size_of::<Region>() == 24);

impl Filter {
    /// Condition for pages that a userfaultfd write-protects: pages in memory, pages in swap, and
    /// pages that have only a marker in the page table.
    pub const PROTECTED: Self = Self {
        all_of: 0,
        any_of: category::PRESENT | category::SWAPPED,
        none_of: category::WRITTEN,
    };

    /// Condition for pages in memory or in swap.
    pub const THERE: Self = Self {
        all_of: 0,
        any_of: category::PRESENT | category::SWAPPED,
        none_of: 0,
    };

    /// Condition for pages in memory, except the kernel's page of zeroes. These are the pages that
    /// `Rss` in `/proc/PID/smaps` counts.
    pub const RESIDENT: Self = Self {
        all_of: category::PRESENT,
        any_of: 0,
        none_of: category::ZERO,
    };

    /// Condition for a process's private pages in memory: pages that belong to no file and are not
    /// the kernel's page of zeroes.
    pub const COPIES: Self = Self {
        all_of: category::PRESENT,
        any_of: 0,
        none_of: category::FILE | category::ZERO,
    };
}

impl Region {
    /// Returns the length of the region in pages.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        (self.end.0 - self.start.0) / PAGE_SIZE
    }

    /// Returns whether the region's pages have every category in `mask` ([`category`] bits).
    #[must_use]
    pub const fn is(&self, mask: u64) -> bool {
        self.categories & mask == mask
    }
}

/// Condition on a page's categories, by which a scan chooses the pages that it returns.
#[derive(Clone, Copy, Debug, Default)]
pub struct Filter {
    /// Categories ([`category`] bits) of which a page must have all.
    pub all_of: u64,
    /// Categories ([`category`] bits) of which a page must have at least one; 0: no such condition.
    pub any_of: u64,
    /// Categories ([`category`] bits) of which a page must have none.
    pub none_of: u64,
}

/// An open `/proc/PID/pagemap`, the page map of one process.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    /// Opens the page map of process `pid`. The kernel shows frame numbers only to root
    /// (`CAP_SYS_ADMIN`).
    pub fn open(pid: Pid) -> io::Result<Self> {
        File::open(format!("/proc/{}/pagemap", pid.as_raw_nonzero())).map(Self)
    }

    /// Returns all regions in `[start, end)` whose pages pass `filter`, sorted by address. The scan
    /// reports the categories `FILE`, `PRESENT`, `SWAPPED`, `ZERO` and `HUGE`.
    pub fn scan(&self, start: Hva, end: Hva, filter: Filter) -> io::Result<Vec<Region>> {
        let mut found = Vec::new();
        let mut buffer = [Region::default(); 512];
        let mut next = start;
        while next < end {
            let (n, walked) = self.scan_into(next, end, filter, &mut buffer)?;
            found.extend_from_slice(&buffer[..n]);
            next = walked;
        }
        Ok(found)
    }

    /// Returns whether all pages of `[start, end)` pass `filter`. This function allocates no
    /// memory.
    pub fn all_pass(&self, start: Hva, end: Hva, filter: Filter) -> io::Result<bool> {
        let mut next = start;
        while next < end {
            let mut found = [Region::default()];
            let (count, walked) = self.scan_into(next, end, filter, &mut found)?;
            if count == 0 || found[0].start != next {
                return Ok(false);
            }
            next = found[0].end.min(walked);
        }
        Ok(true)
    }

    /// Fills `found` with regions, beginning at `start`. Returns the number of regions, and the
    /// address at which the scan ended.
    fn scan_into(
        &self,
        start: Hva,
        end: Hva,
        filter: Filter,
        found: &mut [Region],
    ) -> io::Result<(usize, Hva)> {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            start: start.0,
            end: end.0,
            vec: found.as_mut_ptr().expose_provenance() as u64,
            vec_len: found.len() as u64,
            category_inverted: filter.none_of,
            category_mask: filter.all_of | filter.none_of,
            category_anyof_mask: filter.any_of,
            return_mask: category::FILE
                | category::PRESENT
                | category::SWAPPED
                | category::ZERO
                | category::HUGE,
            ..ScanArgument::default()
        };
        // SAFETY: the argument has the layout that the kernel expects and its `vec` points to
        // `vec_len` regions that live through the call.
        let n = unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                PAGEMAP_SCAN as libc::Ioctl,
                &raw mut argument,
            )
        };
        let n = usize::try_from(n).map_err(|_| io::Error::last_os_error())?;
        if argument.walk_end <= start.0 {
            return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
        }
        Ok((n, Hva(argument.walk_end)))
    }

    /// Returns the 64-bit page map entries of `count` pages from address `start` on (`pagemap.rst`:
    /// bits 0-54 frame number, 61 file, 62 swapped, 63 present).
    pub fn entries(&self, start: Hva, count: usize) -> io::Result<Vec<u64>> {
        let mut bytes = vec![0; count * 8];
        self.0.read_exact_at(&mut bytes, start.0 / PAGE_SIZE * 8)?;
        Ok(bytes
            .chunks_exact(8)
            .map(|c| u64::from_ne_bytes(c.try_into().unwrap_or_default()))
            .collect())
    }

    /// Returns the frame numbers of `count` pages from address `start` on. A frame number is `None`
    /// if the page is not in memory, or if this process may not see frame numbers.
    pub fn frames(&self, start: Hva, count: usize) -> io::Result<Vec<Option<u64>>> {
        const PRESENT: u64 = 1 << 63;
        const FRAME: u64 = (1 << 55) - 1;
        Ok(self
            .entries(start, count)?
            .into_iter()
            .map(|e| (e & PRESENT != 0 && e & FRAME != 0).then_some(e & FRAME))
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pagemap_reports_written_pages_as_present_and_untouched_pages_as_missing() {
        let pages = 64;
        // SAFETY: a new private mapping at a place the kernel chooses.
        let memory = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                pages * 4096,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::PRIVATE,
            )
        }
        .unwrap();
        for page in 8..16 {
            // SAFETY: inside the mapping above.
            unsafe { memory.cast::<u8>().add(page * 4096).write(1) };
        }
        let start = Hva(memory.expose_provenance() as u64);
        let map = Pagemap::open(rustix::process::getpid()).unwrap();
        let present = Filter {
            all_of: category::PRESENT,
            none_of: category::ZERO,
            ..Filter::default()
        };
        let regions = map
            .scan(start, start.add_pages(pages as u64), present)
            .unwrap();
        assert_eq!(regions.iter().map(Region::pages).sum::<u64>(), 8);
        assert_eq!(regions[0].start, start.add_pages(8));
        // SAFETY: the mapping is ours and nothing refers to it any more.
        unsafe { rustix::mm::munmap(memory, pages * 4096) }.unwrap();
    }
}

//! Replaces the *mappings* in ranges of this process's address space: `mmap`, `mremap`, `madvise`.
//!
//! An [`Area`] is a promise, made once in `unsafe`: no Rust reference points into the range, and
//! the owner of the memory agrees that mappings and pages in it are replaced. The methods of `Area`
//! need no further promise. System calls do not go through the C library's `madvise`, because
//! `memfold-qemu` interposes that function.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr;

use memfold_units::{HUGE_PAGE_PAGES, Hva, PAGE_BYTES, PAGE_SIZE};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};

use crate::result::{check, last_error};

/// End of the user's half of an `x86_64` address space.
const USER_END: u64 = 1 << 47;

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

static ZERO_PAGE: [u64; PAGE_BYTES / 8] = [0; PAGE_BYTES / 8];

/// A page-aligned range of addresses of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    start: u64,
    pages: u64,
}

impl Area {
    /// Creates the range of `pages` pages at `start`; `None` if the range is empty, not
    /// page-aligned or not in the user's address space.
    ///
    /// # Safety
    /// While this area or a part of it is used, no Rust reference points into the range, and the
    /// owner of the memory agrees that its pages and mappings are replaced.
    #[must_use]
    pub const unsafe fn new(start: Hva, pages: u64) -> Option<Self> {
        let Some(bytes) = pages.checked_mul(PAGE_SIZE) else {
            return None;
        };
        let Some(end) = start.0.checked_add(bytes) else {
            return None;
        };
        if pages == 0 || start.0 == 0 || !start.is_page_aligned() || end > USER_END {
            return None;
        }
        Some(Self {
            start: start.0,
            pages,
        })
    }

    /// Returns the first address of the area.
    #[must_use]
    pub const fn start(self) -> Hva {
        Hva(self.start)
    }

    /// Returns the address after the last byte of the area.
    #[must_use]
    pub const fn end(self) -> Hva {
        Hva(self.start + self.bytes())
    }

    /// Returns the length of the area in pages.
    #[must_use]
    pub const fn pages(self) -> u64 {
        self.pages
    }

    /// Returns the length of the area in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.pages * PAGE_SIZE
    }

    /// Returns whether the area has no pages. Operations on such an area do nothing.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.pages == 0
    }

    /// Returns the part of `pages` pages from page `first` of this area on, cut at the end of the
    /// area. Never fails, because a panic here could leave a guest without its memory.
    #[must_use]
    pub fn part(self, first: u64, pages: u64) -> Self {
        let first = first.min(self.pages);
        Self {
            start: self.start + first * PAGE_SIZE,
            pages: pages.min(self.pages - first),
        }
    }

    /// Returns the part of the area after the first `pages` pages.
    #[must_use]
    pub fn after(self, pages: u64) -> Self {
        self.part(pages, self.pages)
    }

    pub(crate) fn pointer(self) -> *mut libc::c_void {
        ptr::with_exposed_provenance_mut(usize::try_from(self.start).unwrap_or(0))
    }

    pub(crate) fn length(self) -> usize {
        usize::try_from(self.bytes()).unwrap_or(0)
    }

    /// Maps a private, writable view of `file`, from page `first` of the file on, over the area.
    /// The view replaces any mapping there.
    pub fn map_file(self, file: BorrowedFd<'_>, first: u64) -> Result<(), Errno> {
        if self.is_empty() {
            return Ok(());
        }
        // SAFETY: the maker of the area agreed to its mappings being replaced.
        unsafe {
            rustix::mm::mmap(
                self.pointer(),
                self.length(),
                READ_WRITE,
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
                file,
                first.checked_mul(PAGE_SIZE).ok_or(Errno::OVERFLOW)?,
            )
        }
        .map(drop)
    }

    /// Maps fresh anonymous memory over the area, with `MAP_NORESERVE` if `noreserve` is true. The
    /// memory replaces any mapping there.
    pub fn map_anonymous(self, noreserve: bool) -> Result<(), Errno> {
        if self.is_empty() {
            return Ok(());
        }
        let flags = private(noreserve) | MapFlags::FIXED;
        // SAFETY: the maker of the area agreed to its mappings being replaced.
        unsafe { rustix::mm::mmap_anonymous(self.pointer(), self.length(), READ_WRITE, flags) }
            .map(drop)
    }

    /// Calls `madvise(2)` for the area.
    pub fn advise(self, advice: Advice) -> Result<(), Errno> {
        if self.is_empty() {
            return Ok(());
        }
        // SAFETY: the maker of the area agreed to its pages being exchanged, dropped included.
        unsafe { rustix::mm::madvise(self.pointer(), self.length(), advice) }
    }

    /// Compares both areas page by page, and returns the number of pages before the first page that
    /// differs. The result is reliable only if neither area changes meanwhile.
    #[must_use]
    pub fn equal_pages(self, other: Self) -> u64 {
        let pages = self.pages.min(other.pages);
        // All pages are compared by one call first, which is the most common case and the fastest.
        if equal(self.part(0, pages), other.part(0, pages)) {
            return pages;
        }
        (0..pages)
            .find(|&page| !equal(self.part(page, 1), other.part(page, 1)))
            .unwrap_or(pages)
    }

    /// Returns the number of zero pages at the start of the area: pages before the first page that
    /// does not hold only zeroes. If other threads write to the memory, the result is only a guess.
    #[must_use]
    pub fn zero_pages(self) -> u64 {
        (0..self.pages)
            .find(|&page| !self.part(page, 1).is_zero())
            .unwrap_or(self.pages)
    }

    /// Returns whether the first page of the area holds only zeroes; false if the area is empty.
    /// Reads the page's first word before the rest.
    #[must_use]
    pub fn is_zero(self) -> bool {
        if self.is_empty() {
            return false;
        }
        // SAFETY: the page is mapped (areas are); a volatile read, because a guest may write it
        // meanwhile.
        let word = unsafe { ptr::read_volatile(self.pointer().cast::<u64>()) };
        // SAFETY: as above, and both sides are one page long. `memcmp` gives some answer even while
        // bytes change.
        word == 0
            && unsafe { libc::memcmp(self.pointer(), ZERO_PAGE.as_ptr().cast(), PAGE_BYTES) == 0 }
    }

    /// Copies each page that does not hold only zeroes to the page with the same index in `target`.
    pub fn copy_nonzero(self, target: Self) {
        for page in 0..self.pages.min(target.pages) {
            let from = self.part(page, 1);
            if !from.is_zero() {
                // SAFETY: two mapped pages of different areas; `target` is writable and nobody
                // reads it yet.
                unsafe {
                    ptr::copy_nonoverlapping(
                        from.pointer().cast::<u8>(),
                        target.part(page, 1).pointer().cast::<u8>(),
                        PAGE_BYTES,
                    );
                }
            }
        }
    }

    /// Writes the area's bytes to `file`, from byte `offset` of the file on. The bytes are of one
    /// moment only if no thread writes to the area meanwhile.
    pub fn save(self, file: impl AsFd, offset: u64) -> Result<(), Errno> {
        let mut done = 0;
        while done < self.length() {
            let at = i64::try_from(offset + done as u64).map_err(|_| Errno::OVERFLOW)?;
            // SAFETY: the kernel reads at most what is left of the area, and answers EFAULT where
            // nothing is mapped.
            let written = unsafe {
                libc::pwrite(
                    file.as_fd().as_raw_fd(),
                    self.pointer().byte_add(done),
                    self.length() - done,
                    at,
                )
            };
            match usize::try_from(written) {
                Ok(0) => return Err(Errno::NOSPC),
                Ok(written) => done += written,
                Err(_) => match last_error() {
                    Errno::INTR => {}
                    errno => return Err(errno),
                },
            }
        }
        Ok(())
    }

    /// Copies `words` to the start of the area; words beyond the area's end are dropped. For tests
    /// and measurements that use memory of their own.
    pub fn write(self, words: &[u64]) {
        let count = words.len().min(self.length() / 8);
        // SAFETY: the area is mapped and at least `count` words long; no reference points into it.
        unsafe { ptr::copy_nonoverlapping(words.as_ptr(), self.pointer().cast::<u64>(), count) };
    }
}

fn private(noreserve: bool) -> MapFlags {
    let mut flags = MapFlags::PRIVATE;
    flags.set(MapFlags::NORESERVE, noreserve);
    flags
}

fn equal(a: Area, b: Area) -> bool {
    // SAFETY: both areas are mapped and have the same length (callers cut them so).
    unsafe { libc::memcmp(a.pointer(), b.pointer(), a.length()) == 0 }
}

/// Calls `madvise(2)` with any address and any advice, for the function by which memfold-qemu
/// replaces C's `madvise`.
///
/// # Safety
/// As for `madvise(2)`: the caller owns the range.
pub unsafe fn madvise(address: usize, length: usize, advice: i32) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    check(unsafe { libc::syscall(libc::SYS_madvise, address, length, advice) })
}

/// Calls `munmap(2)` with any address, for the function by which memfold-qemu replaces C's
/// `munmap`.
///
/// # Safety
/// As for `munmap(2)`: the caller owns the range and uses it no more.
pub unsafe fn munmap(address: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    check(unsafe { libc::syscall(libc::SYS_munmap, address, length) })
}

/// Memory that was mapped at an address that the kernel chose. Dropping the value unmaps the
/// memory.
#[derive(Debug)]
pub struct Mapping {
    whole: Area,
    area: Area,
}

impl Mapping {
    /// Maps `pages` pages of anonymous private memory, with `MAP_NORESERVE` if `noreserve` is true.
    /// The address is aligned to 2 MiB if the memory is at least that long.
    pub fn anonymous(pages: u64, noreserve: bool) -> Result<Self, Errno> {
        let slack = if pages >= HUGE_PAGE_PAGES {
            HUGE_PAGE_PAGES
        } else {
            0
        };
        let total = pages.checked_add(slack).ok_or(Errno::OVERFLOW)?;
        // SAFETY: a new mapping at a place that the kernel chooses replaces nothing.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                bytes(total)?,
                READ_WRITE,
                private(noreserve),
            )
        }?;
        let whole = new_area(start, total)?;
        let skip = if slack == 0 {
            0
        } else {
            let unit = HUGE_PAGE_PAGES * PAGE_SIZE;
            (whole.start.next_multiple_of(unit) - whole.start) / PAGE_SIZE
        };
        Ok(Self {
            whole,
            area: whole.part(skip, pages),
        })
    }

    /// Maps a read-only shared view of the first `pages` pages of `file`, which no core dump
    /// contains. The file may be shorter; pages beyond its end must not be accessed.
    pub fn window(file: impl AsFd, pages: u64) -> Result<Self, Errno> {
        Self::of_file(file, pages, ProtFlags::READ, MapFlags::NORESERVE)
    }

    /// Maps a shared, writable view of the first `pages` pages of `file`, which no core dump
    /// contains, and allocates all of these pages.
    pub(crate) fn shared(file: impl AsFd, pages: u64) -> Result<Self, Errno> {
        Self::of_file(file, pages, READ_WRITE, MapFlags::POPULATE)
    }

    fn of_file(
        file: impl AsFd,
        pages: u64,
        rights: ProtFlags,
        flags: MapFlags,
    ) -> Result<Self, Errno> {
        let (length, flags) = (bytes(pages)?, flags | MapFlags::SHARED);
        // SAFETY: a new mapping at a place that the kernel chooses replaces nothing.
        let start = unsafe { rustix::mm::mmap(ptr::null_mut(), length, rights, flags, file, 0) }?;
        let area = new_area(start, pages)?;
        let mapping = Self { whole: area, area };
        // Files that are mapped here hold bytes of guests.
        area.advise(Advice::LinuxDontDump)?;
        Ok(mapping)
    }

    /// Returns the address range of the mapping.
    #[must_use]
    pub const fn area(&self) -> Area {
        self.area
    }

    /// Moves the first pages of the mapping, as many as `target` has, over `target`, and unmaps the
    /// rest. The move replaces the mapping at `target` in one step (`mremap(2)`).
    pub fn move_over(self, target: Area) -> Result<(), Errno> {
        let from = self.area.part(0, target.pages);
        // SAFETY: the mapping is ours and is given up here; the maker of `target` agreed to its
        // mappings being replaced. Where it lay nothing is mapped afterwards, so dropping `self`
        // must not unmap that part again: another thread may have got the addresses. Hence `whole`
        // is what is left.
        unsafe {
            rustix::mm::mremap_fixed(
                from.pointer(),
                from.length(),
                target.length(),
                MremapFlags::MAYMOVE,
                target.pointer(),
            )
        }?;
        let this = std::mem::ManuallyDrop::new(self);
        let before = (this.area.start - this.whole.start) / PAGE_SIZE;
        unmap(this.whole.part(0, before));
        unmap(this.whole.after(before + from.pages));
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        unmap(self.whole);
    }
}

fn unmap(area: Area) {
    if !area.is_empty() {
        // SAFETY: only called on parts of a `Mapping` that is given up. A failure leaves address
        // space in use, nothing else.
        let _ = unsafe { rustix::mm::munmap(area.pointer(), area.length()) };
    }
}

fn new_area(start: *mut libc::c_void, pages: u64) -> Result<Area, Errno> {
    // SAFETY: the mapping was made a moment ago, and its only owner is the `Mapping` in the making.
    unsafe { Area::new(Hva(start.expose_provenance() as u64), pages) }.ok_or(Errno::INVAL)
}

fn bytes(pages: u64) -> Result<usize, Errno> {
    pages
        .checked_mul(PAGE_SIZE)
        .and_then(|bytes| usize::try_from(bytes).ok())
        .ok_or(Errno::OVERFLOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn if_a_part_of_a_memory_area_would_exceed_the_area_it_is_cut_off_at_its_end() {
        let mapping = Mapping::anonymous(8, false).unwrap();
        let area = mapping.area();
        assert_eq!(area.part(6, 10).pages(), 2);
        assert!(area.part(9, 1).is_empty());
        assert_eq!(area.after(3).start(), area.start().add_pages(3));
    }

    #[test]
    fn a_memory_area_outside_the_address_space_is_refused() {
        for (start, pages) in [(0, 1), (4097, 1), (4096, 0), (4096, u64::MAX), (1 << 47, 1)] {
            // SAFETY: nothing is done with the area.
            assert_eq!(unsafe { Area::new(Hva(start), pages) }, None);
        }
    }

    #[test]
    fn no_core_dump_contains_a_mapped_page_store_or_shared_memory_of_a_guest() {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::empty()).unwrap();
        rustix::fs::ftruncate(&file, 4 * PAGE_SIZE).unwrap();
        let views = [Mapping::window(&file, 4), Mapping::shared(&file, 4)];
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        for view in views {
            let start = format!("{:x}-", view.as_ref().unwrap().area().start().0);
            let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
            let flags = lines
                .find_map(|line| line.strip_prefix("VmFlags:"))
                .unwrap();
            assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
        }
    }

    #[test]
    fn a_memory_mapping_that_is_moved_over_another_one_keeps_its_bytes() {
        let target = Mapping::anonymous(4, false).unwrap();
        target.area().write(&[1; 2048]);
        let source = Mapping::anonymous(4, false).unwrap();
        source.area().part(1, 3).write(&[7; 1536]);
        source.move_over(target.area()).unwrap();
        assert!(target.area().is_zero());
        let expected = Mapping::anonymous(3, false).unwrap();
        expected.area().write(&[7; 1536]);
        assert_eq!(target.area().part(1, 3).equal_pages(expected.area()), 3);
        assert_eq!(target.area().zero_pages(), 1);
    }
}

//! Reads a VM's memory as it was at the instant of the snapshot, although the VM continues to run
//! and write. memfold's library in QEMU write-protects the memory, and copies a page before the VM
//! changes it. The daemon and the library share a table with one entry for each page:
//!
//! ```text
//!   VM is stopped     the wanted pages are listed, and the library write-protects them (KeepPast)
//!   VM runs           memfold reads a chunk, then settles each page by its table entry:
//!                       changed from 0 to DONE, page still protected: the page was read unchanged
//!                       the entry names a slot: the library kept the old bytes there
//!                       neither: the age of the bytes read is unknown, and the snapshot fails
//! ```
//! KSM would make this fail, because it replaces a protected page by a merged page that is not
//! protected (`replace_page` in `mm/ksm.c` creates the new page table entry without the userfaultfd
//! mark). So KSM is stopped during the save, and a page that has lost its protection makes the save
//! fail.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};

use memfold_sys::pagemap::{Filter, Pagemap};
use memfold_sys::shared::SharedWords;
use memfold_units::{HUGE_PAGE_PAGES, Hva, PAGE_BYTES, PAGE_SIZE};
use memfold_wire::library::{MAX_RUNS, Range};
use memfold_wire::past::{DONE, ERRNO_WORD, Layout, USED_WORD};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::process::Pid;

/// Error message for a page that lost its protection.
const UNPROTECTED: &str = "a page of the VM lost its write protection without a reported write: the kernel has put another page in its \
                           place (KSM does, if something starts it meanwhile); save the VM again, or without --live";

type Span = std::ops::Range<Hva>;

/// Pages of a running VM that will be read as they were at one instant, and the file in which the
/// library keeps their old contents.
#[derive(Debug)]
pub struct Past {
    pagemap: Pagemap,
    file: File,
    words: SharedWords,
    layout: Layout,
    /// Ranges of pages by ascending address, each with the index of its first page.
    ranges: Vec<(Range, u64)>,
}

impl Past {
    /// Creates the file in which the library keeps old contents of the pages in `wanted`: ascending
    /// address ranges, each within one of `blocks`. Returns `None` if `wanted` has no pages. `room`
    /// is the maximum number of pages whose old contents are kept; if the VM writes to more pages
    /// before they are read, the snapshot fails.
    pub fn new(pid: Pid, blocks: &[Span], wanted: &[Span], room: u64) -> io::Result<Option<Self>> {
        let mut pages = 0;
        let mut ranges = Vec::new();
        for range in chunks(blocks, wanted, MAX_RUNS) {
            ranges.push((range, pages));
            pages += range.pages;
        }
        let Some(layout) = Layout::new(pages) else {
            return Ok(None);
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("memfold-past", flags)?);
        let length = layout.file_pages().min(layout.front_pages() + room);
        file.set_len(length * PAGE_SIZE)?;
        // The table is allocated now, so that neither process runs out of memory when it touches
        // the table.
        let front = layout.front_pages() * PAGE_SIZE;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, front)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        let past = Self {
            pagemap: Pagemap::open(pid)?,
            words: SharedWords::map(&file, layout.front_pages())?,
            file,
            layout,
            ranges,
        };
        for index in 0..pages {
            past.entry(index)?.store(DONE, Ordering::Relaxed);
        }
        for range in wanted {
            let first = past.index(range.start)?;
            for index in first..first + range.end.pages_since(range.start) {
                past.entry(index)?.store(0, Ordering::Release);
            }
        }
        Ok(Some(past))
    }

    /// Returns the address ranges that the library must write-protect.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range> {
        self.ranges.iter().map(|&(range, _)| range).collect()
    }

    /// Returns a descriptor of the file with the old contents, for the library.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.file.as_fd().try_clone_to_owned()
    }

    /// Returns the number of pages that the VM wrote before they were read, and whose old contents
    /// the library therefore copied.
    #[must_use]
    pub fn kept_pages(&self) -> u64 {
        self.word(USED_WORD)
            .map_or(0, |word| word.load(Ordering::Acquire).into())
    }

    fn word(&self, at: u64) -> io::Result<&AtomicU32> {
        self.words.get(at).ok_or_else(|| other("no such entry"))
    }

    fn entry(&self, index: u64) -> io::Result<&AtomicU32> {
        self.word(self.layout.entry_word(index))
    }

    fn index(&self, page: Hva) -> io::Result<u64> {
        let end = |range: &Range| Hva(range.hva).add_pages(range.pages);
        let at = self.ranges.partition_point(|(range, _)| end(range) <= page);
        let found = self.ranges.get(at);
        let found = found.filter(|(range, _)| Hva(range.hva) <= page);
        let (range, first) = found.ok_or_else(|| other("a page that is not kept"))?;
        Ok(first + page.pages_since(Hva(range.hva)))
    }

    /// Makes `bytes`, which were just read from the VM's pages at address `start`, the contents at
    /// the snapshot's instant: replaces pages that the VM has changed by their old contents. Fails
    /// if old contents could not be kept.
    pub fn settle(&self, start: Hva, bytes: &mut [u8]) -> io::Result<()> {
        let pages = (bytes.len() / PAGE_BYTES) as u64;
        let end = start.add_pages(pages);
        let protected = self.pagemap.scan(start, end, Filter::PROTECTED)?;
        let mut protected = protected.iter().peekable();
        for (number, page) in bytes.chunks_exact_mut(PAGE_BYTES).enumerate() {
            let at = start.add_pages(number as u64);
            while protected.next_if(|region| region.end <= at).is_some() {}
            let was_read = protected.peek().is_some_and(|region| region.start <= at);
            let entry = self.entry(self.index(at)?)?;
            match entry.compare_exchange(0, DONE, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) if was_read => {}
                Ok(_) => {
                    self.check()?;
                    return Err(other(UNPROTECTED));
                }
                Err(DONE) => return Err(other("a page was read twice")),
                Err(slot) => {
                    let place = self.layout.slot_page(slot - 1) * PAGE_SIZE;
                    self.file.read_exact_at(page, place)?;
                }
            }
        }
        self.check()
    }

    /// Fails if any old contents could not be kept so far.
    fn check(&self) -> io::Result<()> {
        let errno = self.word(ERRNO_WORD)?.load(Ordering::Acquire);
        if errno == 0 {
            return Ok(());
        }
        let errno = i32::try_from(errno).unwrap_or(Errno::IO.raw_os_error());
        let is = |kind: Errno| errno == kind.raw_os_error();
        if is(Errno::STALE) {
            return Err(other(UNPROTECTED));
        }
        if is(Errno::CANCELED) {
            return Err(other(
                "the library in QEMU stopped copying before writes: the connection to it has ended",
            ));
        }
        // This error means that the file has no free slot.
        if is(Errno::PERM) {
            return Err(other(
                "the VM writes to more pages than half of the host's available memory can hold; save the VM without --live",
            ));
        }
        let why = io::Error::from_raw_os_error(errno);
        let words = format!("cannot copy pages before the VM writes to them: {why}");
        Err(io::Error::new(why.kind(), words))
    }
}

fn other(why: &str) -> io::Error {
    io::Error::other(why)
}

/// Returns the huge pages that contain wanted pages, as at most `most` ranges. If there would be
/// more ranges, the nearest ones are joined.
fn chunks(blocks: &[Span], wanted: &[Span], most: usize) -> Vec<Range> {
    let mut found: Vec<Span> = Vec::new();
    for range in wanted {
        let holds = |block: &&Span| block.start <= range.start && range.end <= block.end;
        let Some(block) = blocks.iter().find(holds) else {
            continue;
        };
        let unit = HUGE_PAGE_PAGES * PAGE_SIZE;
        let start = Hva(range.start.0 - range.start.0 % unit).max(block.start);
        let end = Hva(range.end.0.next_multiple_of(unit)).min(block.end);
        match found.last_mut() {
            Some(last) if start <= last.end && last.start >= block.start => {
                last.end = last.end.max(end);
            }
            _ => found.push(start..end),
        }
    }
    // Each gap is given by its length, and by the index of the range after it.
    let same_block = |a: Hva, b: Hva| blocks.iter().any(|of| of.start <= a && b <= of.end);
    let mut gaps: Vec<(u64, usize)> = (1..)
        .zip(found.windows(2))
        .filter(|(_, two)| same_block(two[0].start, two[1].end))
        .map(|(at, two)| (two[1].start.pages_since(two[0].end), at))
        .collect();
    gaps.sort_unstable();
    gaps.truncate(found.len().saturating_sub(most));
    let closed: BTreeSet<usize> = gaps.into_iter().map(|(_, at)| at).collect();
    let mut ranges: Vec<Range> = Vec::new();
    for (at, range) in found.into_iter().enumerate() {
        match ranges.last_mut() {
            Some(last) if closed.contains(&at) => {
                last.pages = range.end.pages_since(Hva(last.hva));
            }
            _ => ranges.push(Range {
                hva: range.start.0,
                pages: range.end.pages_since(range.start),
            }),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = HUGE_PAGE_PAGES;

    fn pages(from: u64, to: u64) -> std::ops::Range<Hva> {
        let base = Hva(0x7000_0000_0000);
        base.add_pages(from)..base.add_pages(to)
    }

    fn range(from: u64, to: u64) -> Range {
        Range {
            hva: pages(from, to).start.0,
            pages: to - from,
        }
    }

    #[test]
    fn a_live_save_write_protects_whole_huge_pages_within_their_ram_block() {
        let blocks = [pages(100, 10 * UNIT), pages(10 * UNIT, 20 * UNIT)];
        let wanted = [
            pages(101, 102),
            pages(UNIT - 1, UNIT + 1),
            pages(5 * UNIT, 5 * UNIT + 1),
            pages(10 * UNIT - 1, 10 * UNIT),
            pages(10 * UNIT, 10 * UNIT + 1),
        ];
        assert_eq!(
            chunks(&blocks, &wanted, 100),
            [
                range(100, 2 * UNIT),
                range(5 * UNIT, 6 * UNIT),
                range(9 * UNIT, 10 * UNIT),
                range(10 * UNIT, 11 * UNIT)
            ]
        );
        assert_eq!(
            chunks(&blocks, &wanted, 2),
            [range(100, 10 * UNIT), range(10 * UNIT, 11 * UNIT)]
        );
        assert_eq!(chunks(&blocks, &[], 2), []);
    }

    #[test]
    fn during_a_live_save_reading_an_unprotected_page_without_a_saved_copy_fails() {
        let me = rustix::process::getpid();
        let memory = memfold_sys::region::Mapping::anonymous(UNIT, true).unwrap();
        memory.area().write(&vec![7; 512 * 8]);
        let area = memory.area();
        let block = area.start()..area.end();
        let wanted = [area.start()..area.start().add_pages(2)];
        assert!(
            Past::new(me, std::slice::from_ref(&block), &[], 9)
                .unwrap()
                .is_none()
        );
        let past = Past::new(me, std::slice::from_ref(&block), &wanted, 9)
            .unwrap()
            .unwrap();
        assert_eq!(past.kept_pages(), 0);
        // No page is protected here, so even a page that was only read must not be accepted.
        let mut bytes = vec![1; PAGE_BYTES];
        let error = past.settle(area.start(), &mut bytes).unwrap_err();
        assert!(error.to_string().contains("KSM"), "{error}");
        // The old contents of a kept page come from its slot.
        let place = past.layout.slot_page(0) * PAGE_SIZE;
        past.file.write_all_at(&[9; PAGE_BYTES], place).unwrap();
        let second = area.start().add_pages(1);
        past.entry(1).unwrap().store(1, Ordering::Release);
        past.settle(second, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 9));
        // If one page could not be kept, all reads fail.
        past.word(ERRNO_WORD).unwrap().store(28, Ordering::Release);
        let error = past.settle(second, &mut bytes).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
    }
}

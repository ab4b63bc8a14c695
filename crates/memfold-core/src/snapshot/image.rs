//! The RAM image: a sparse file that can be mapped as it is.
//!
//! ```text
//!   ram        | block 0: page 0, 1, 2 ...  | block 1 ...     each block at its offset, a whole number of chunks
//!              |##..####....................|                 . = hole: reads as zeroes, takes no space
//!   ram.sums   | chunk 0 | chunk 1 | ...                      XXH3-128 of each 2 MiB of `ram`, holes as zeroes
//! ```
//!
//! What is saved is decided by the kernel's page tables of the QEMU process: pages in memory, *in swap*, and views of files (the
//! page store, a template), whose pages may never have been touched through this process. Never touched and discarded pages,
//! and those that are the kernel's zero page, are holes. So are pages that turn out to hold only zeroes.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use memfold_sys::memory;
use memfold_sys::pagemap::{Filter, Pagemap, category};
use memfold_units::{HUGE_PAGE_PAGES, Hva, PAGE_BYTES, PAGE_SIZE};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::past::Past;
use crate::progress::Progress;

/// Pages that one checksum covers: a huge page.
pub const CHUNK_PAGES: u64 = HUGE_PAGE_PAGES;

/// Bytes of a chunk.
pub const CHUNK_BYTES: usize = 2 << 20;
const _: () = assert!(CHUNK_BYTES as u64 == CHUNK_PAGES * PAGE_SIZE);

/// Bytes of one checksum in `ram.sums`, little endian.
pub const SUM_BYTES: usize = 16;

/// More threads than this only compete for the host's memory.
const MAX_THREADS: usize = 8;

/// One RAM block in an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageBlock {
    /// QEMU's name of it.
    pub name: String,
    /// Where it begins in `ram`, in pages; a multiple of [`CHUNK_PAGES`].
    pub first_page: u64,
    /// Its length in pages.
    pub pages: u64,
}

/// A block of a running VM that is to be saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// QEMU's name of it.
    pub name: String,
    /// Address in the process.
    pub hva: Hva,
    /// Its length in pages.
    pub pages: u64,
}

/// What became of the pages of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageCounts {
    /// Pages of all blocks.
    pub pages: u64,
    /// Pages that are in the file.
    pub saved_pages: u64,
    /// Pages that were there and held only zeroes.
    pub zero_pages: u64,
    /// Pages that were there, and that the guest had free: they read as zeroes.
    #[serde(default)]
    pub free_pages: u64,
}

/// Where blocks of these lengths lie in an image.
#[must_use]
pub fn place(blocks: &[Source]) -> Vec<ImageBlock> {
    let mut first_page = 0;
    let mut placed = Vec::new();
    for block in blocks {
        placed.push(ImageBlock {
            name: block.name.clone(),
            first_page,
            pages: block.pages,
        });
        first_page += block.pages.next_multiple_of(CHUNK_PAGES);
    }
    placed
}

/// Where a process maps files: their pages need not be in its page tables.
fn mapped_files(pid: Pid) -> io::Result<Vec<Range<Hva>>> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero()))?;
    let file = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (from, to) = fields.next()?.split_once('-')?;
        let is_file = fields.nth(3)? != "0";
        let at = |text| u64::from_str_radix(text, 16).ok().map(Hva);
        is_file.then_some(at(from)?..at(to)?)
    };
    Ok(maps.lines().filter_map(file).collect())
}

/// Pages of `block` that have to be saved, as ranges of page numbers in it, ascending.
fn present(pagemap: &Pagemap, files: &[Range<Hva>], block: &Source) -> io::Result<Vec<(u64, u64)>> {
    let end = block.hva.add_pages(block.pages);
    let filter = Filter {
        any_of: category::PRESENT | category::SWAPPED,
        none_of: category::ZERO,
        ..Filter::default()
    };
    let inside = |start: Hva, stop: Hva| {
        let first = start.max(block.hva).pages_since(block.hva);
        let last = stop.min(end).pages_since(block.hva);
        (first, last)
    };
    let mut ranges: Vec<(u64, u64)> = pagemap
        .scan(block.hva, end, filter)?
        .iter()
        .map(|region| inside(region.start, region.end))
        .collect();
    ranges.extend(
        files
            .iter()
            .filter(|file| file.start < end && file.end > block.hva)
            .map(|file| inside(file.start, file.end)),
    );
    ranges.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (first, last) in ranges {
        match joined.last_mut() {
            Some(before) if first <= before.1 => before.1 = before.1.max(last),
            _ => joined.push((first, last)),
        }
    }
    Ok(joined)
}

/// Parts of `ranges`, which are page numbers in `block`, that are not in `out`, which are addresses. Both ascend.
fn without(block: &Source, ranges: &[(u64, u64)], out: &[Range<Hva>]) -> Vec<(u64, u64)> {
    let page = |hva: Hva| hva.max(block.hva).pages_since(block.hva);
    let mut left = Vec::new();
    let mut next = 0;
    for &(mut first, last) in ranges {
        while out.get(next).is_some_and(|range| page(range.end) <= first) {
            next += 1;
        }
        for range in out[next..]
            .iter()
            .take_while(|range| page(range.start) < last)
        {
            if first < page(range.start) {
                left.push((first, page(range.start)));
            }
            first = first.max(page(range.end));
        }
        if first < last {
            left.push((first, last));
        }
    }
    left
}

/// What of a process's memory is to be saved, as its page tables say at one instant.
#[derive(Debug)]
pub struct Plan {
    pid: Pid,
    blocks: Vec<Source>,
    /// Of each block, page numbers in it, ascending.
    ranges: Vec<Vec<(u64, u64)>>,
    counts: ImageCounts,
}

impl Plan {
    /// Looks at a process that stands still. What is in `free` (ascending) becomes holes.
    pub fn new(pid: Pid, blocks: Vec<Source>, free: &[Range<Hva>]) -> io::Result<Self> {
        let mut plan = Self {
            pid,
            blocks,
            ranges: Vec::new(),
            counts: ImageCounts::default(),
        };
        let pages = |ranges: &[(u64, u64)]| ranges.iter().map(|(a, b)| b - a).sum::<u64>();
        let (pagemap, files) = (Pagemap::open(pid)?, mapped_files(pid)?);
        for block in &plan.blocks {
            let all = present(&pagemap, &files, block)?;
            let ranges = without(block, &all, free);
            plan.counts.pages += block.pages;
            plan.counts.free_pages += pages(&all) - pages(&ranges);
            plan.ranges.push(ranges);
        }
        Ok(plan)
    }

    /// The blocks, numbered from 0.
    #[must_use]
    pub fn blocks(&self) -> &[Source] {
        &self.blocks
    }

    /// What is to be saved of block `number`.
    pub fn wanted(&self, number: usize) -> impl Iterator<Item = Range<Hva>> + '_ {
        let block = self.blocks.get(number).zip(self.ranges.get(number));
        block.into_iter().flat_map(|(block, ranges)| {
            let at = |page| block.hva.add_pages(page);
            ranges.iter().map(move |&(from, to)| at(from)..at(to))
        })
    }
}

/// An image that is being written, block by block.
#[derive(Debug)]
pub struct Writer<'a> {
    ram: &'a File,
    placed: Vec<ImageBlock>,
    sums: Vec<u8>,
    buffer: Vec<u8>,
    counts: ImageCounts,
}

impl<'a> Writer<'a> {
    /// Begins an image in `ram`, which is empty.
    pub fn new(plan: &Plan, ram: &'a File) -> io::Result<Self> {
        let chunks = plan.blocks.iter().map(|b| b.pages.div_ceil(CHUNK_PAGES));
        let chunks: u64 = chunks.sum();
        ram.set_len(chunks * CHUNK_PAGES * PAGE_SIZE)?;
        let buffer = vec![0; CHUNK_BYTES];
        let empty = xxh3_128(&buffer).to_le_bytes();
        Ok(Self {
            ram,
            placed: place(&plan.blocks),
            sums: empty.repeat(usize::try_from(chunks).map_err(io::Error::other)?),
            buffer,
            counts: plan.counts,
        })
    }

    /// Copies block `number` of the plan, of a process that stands still, or whose `past` is kept.
    pub fn block(
        &mut self,
        plan: &Plan,
        number: usize,
        past: Option<&Past>,
        progress: &Progress,
    ) -> io::Result<()> {
        let (block, ranges) = (&plan.blocks[number], &plan.ranges[number]);
        let place = self.placed[number].first_page;
        let mut next = 0;
        for chunk in 0..block.pages.div_ceil(CHUNK_PAGES) {
            let first = chunk * CHUNK_PAGES;
            let end = (first + CHUNK_PAGES).min(block.pages);
            while ranges.get(next).is_some_and(|range| range.1 <= first) {
                next += 1;
            }
            let here = ranges[next..]
                .iter()
                .take_while(|range| range.0 < end)
                .map(|range| (range.0.max(first), range.1.min(end)));
            let here: Vec<(u64, u64)> = here.collect();
            if !here.is_empty() {
                self.buffer.fill(0);
                read(plan.pid, block, first, &here, &mut self.buffer)?;
                if let Some(past) = past {
                    for &(from, to) in &here {
                        let part = &mut self.buffer[bytes(from - first)..bytes(to - first)];
                        past.settle(block.hva.add_pages(from), part)?;
                    }
                }
                self.chunk(place, first, &here)?;
            }
            progress.add((end - first) * PAGE_SIZE);
        }
        Ok(())
    }

    /// Writes what is in the buffer: `ranges` of the chunk that begins at page `first` of the block at `place`.
    fn chunk(&mut self, place: u64, first: u64, ranges: &[(u64, u64)]) -> io::Result<()> {
        let at = (place + first) * PAGE_SIZE;
        save(&self.buffer, at, first, ranges, self.ram, &mut self.counts)?;
        let sum = xxh3_128(&self.buffer).to_le_bytes();
        let number = usize::try_from((place + first) / CHUNK_PAGES).map_err(io::Error::other)?;
        self.sums[number * SUM_BYTES..][..SUM_BYTES].copy_from_slice(&sum);
        Ok(())
    }

    /// Ends the image with its checksums.
    pub fn finish(self, sums: &File) -> io::Result<(Vec<ImageBlock>, ImageCounts)> {
        sums.write_all_at(&self.sums, 0)?;
        Ok((self.placed, self.counts))
    }
}

/// Reads ranges of a chunk that begins at page `first` to their places in `buffer`.
fn read(
    pid: Pid,
    block: &Source,
    first: u64,
    ranges: &[(u64, u64)],
    buffer: &mut [u8],
) -> io::Result<()> {
    for &(from, to) in ranges {
        let part = &mut buffer[bytes(from - first)..bytes(to - first)];
        let length = part.len();
        if memory::read(pid, block.hva.add_pages(from), part)? != length {
            return Err(io::Error::other(format!(
                "RAM block '{}' ends before its page {to}",
                block.name
            )));
        }
    }
    Ok(())
}

/// Writes what isn't zero of the ranges of a chunk whose first byte belongs at `at`.
fn save(
    buffer: &[u8],
    at: u64,
    first: u64,
    ranges: &[(u64, u64)],
    ram: &File,
    counts: &mut ImageCounts,
) -> io::Result<()> {
    for &(from, to) in ranges {
        let start = bytes(from - first);
        let part = &buffer[start..bytes(to - first)];
        let written = write_nonzero(part, ram, at + start as u64)?;
        counts.saved_pages += written;
        counts.zero_pages += to - from - written;
    }
    Ok(())
}

/// Writes the pages of `buffer` that aren't zero to their places behind byte `at` of a file; how many.
pub(super) fn write_nonzero(buffer: &[u8], file: &File, at: u64) -> io::Result<u64> {
    let mut written = 0;
    let mut start = None;
    let ends = buffer.len() / PAGE_BYTES;
    for page in 0..=ends {
        let holds = page < ends && !is_zero(&buffer[page * PAGE_BYTES..][..PAGE_BYTES]);
        match (holds, start) {
            (true, None) => start = Some(page),
            (false, Some(begun)) => {
                let from = begun * PAGE_BYTES;
                file.write_all_at(&buffer[from..page * PAGE_BYTES], at + from as u64)?;
                written += (page - begun) as u64;
                start = None;
            }
            _ => {}
        }
    }
    Ok(written)
}

/// Parts of a file that are no holes, ascending.
pub(super) struct Data<'a> {
    file: &'a File,
    next: u64,
    length: u64,
}

impl<'a> Data<'a> {
    pub(super) fn of(file: &'a File) -> io::Result<impl Iterator<Item = Range<u64>> + 'a> {
        let length = file.metadata()?.len();
        let parts: io::Result<Vec<_>> = Data {
            file,
            next: 0,
            length,
        }
        .collect();
        Ok(parts?.into_iter())
    }
}

impl Iterator for Data<'_> {
    type Item = io::Result<Range<u64>>;

    fn next(&mut self) -> Option<Self::Item> {
        use rustix::fs::{SeekFrom, seek};
        if self.next >= self.length {
            return None;
        }
        let start = match seek(self.file, SeekFrom::Data(self.next)) {
            Err(rustix::io::Errno::NXIO) => return None,
            other => other,
        };
        let part = start.and_then(|start| Ok(start..seek(self.file, SeekFrom::Hole(start))?));
        self.next = part.as_ref().map_or(self.length, |part| part.end);
        Some(part.map_err(io::Error::from))
    }
}

/// Makes a hole.
pub(super) fn punch(file: &File, at: u64, length: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(fallocate(file, hole, at, length)?)
}

/// Does something for each chunk of so many, on as many cores as are worth it, each with a buffer of a chunk.
pub(super) fn each_chunk(
    chunks: u64,
    work: impl Fn(u64, &mut [u8]) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let next = AtomicU64::new(0);
    let run = || {
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            let chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= chunks {
                return Ok(());
            }
            if let Err(error) = work(chunk, &mut buffer) {
                // The others need not go on.
                next.store(chunks, Ordering::Relaxed);
                return Err(error);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads.min(MAX_THREADS))
            .map(|_| scope.spawn(run))
            .collect();
        let mine = run();
        let ended = |thread: std::thread::ScopedJoinHandle<'_, io::Result<()>>| {
            let panicked = |_| Err(io::Error::other("a thread panicked"));
            thread.join().unwrap_or_else(panicked)
        };
        others.into_iter().map(ended).fold(mine, Result::and)
    })
}

pub(super) fn is_zero(page: &[u8]) -> bool {
    const ZEROES: [u8; 256] = [0; 256];
    page.chunks_exact(ZEROES.len()).all(|part| part == ZEROES)
}

fn bytes(pages: u64) -> usize {
    usize::try_from(pages).unwrap_or(0) * PAGE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::stored::{Pages, Stored};
    use memfold_sys::region::Mapping;

    /// All blocks of a process that stands still.
    fn write(
        pid: Pid,
        blocks: &[Source],
        free: &[Range<Hva>],
        ram: &File,
        sums: &File,
        progress: &Progress,
    ) -> io::Result<(Vec<ImageBlock>, ImageCounts)> {
        let plan = Plan::new(pid, blocks.to_vec(), free)?;
        let mut writer = Writer::new(&plan, ram)?;
        for number in 0..blocks.len() {
            writer.block(&plan, number, None, progress)?;
        }
        writer.finish(sums)
    }

    /// Chunks that differ.
    fn verify(ram: &File, sums: &File) -> Vec<u64> {
        let bytes = ram.metadata().unwrap().len();
        let mut all = vec![0; usize::try_from(sums.metadata().unwrap().len()).unwrap()];
        sums.read_exact_at(&mut all, 0).unwrap();
        let stored = Stored {
            bytes,
            sums: all,
            pages: Pages::plain(ram.try_clone().unwrap()).unwrap(),
            references: Vec::new(),
            sources: Vec::new(),
        };
        stored.verify(&Progress::default()).unwrap()
    }

    fn me() -> Pid {
        rustix::process::getpid()
    }

    fn file() -> File {
        tempfile::tempfile().unwrap()
    }

    /// A block of this process with some pages of words, some of zeroes, and holes.
    fn block(pages: u64) -> (Mapping, Source) {
        let memory = Mapping::anonymous(pages, true).unwrap();
        for page in (0..pages).filter(|page| page % 7 < 3) {
            let words: Vec<u64> = (0..512).map(|word| page << 32 | word | 1 << 63).collect();
            memory.area().part(page, 1).write(&words);
        }
        for page in (0..pages).filter(|page| page % 7 == 3) {
            memory.area().part(page, 1).write(&[0; 512]);
        }
        let source = Source {
            name: format!("block of {pages}"),
            hva: memory.area().start(),
            pages,
        };
        (memory, source)
    }

    fn is_saved(page: u64) -> bool {
        page % 7 < 3
    }

    #[test]
    fn what_is_there_is_saved_and_zeroes_take_no_space() {
        let (a, b) = (block(700), block(10));
        let (ram, sums) = (file(), file());
        let told = Progress::default();
        told.begin("test", 1000 * PAGE_SIZE);
        let sources = [a.1, b.1];
        let (placed, counts) = write(me(), &sources, &[], &ram, &sums, &told).unwrap();
        assert_eq!(told.now().done_bytes, 710 * PAGE_SIZE);
        assert_eq!((placed[1].first_page, placed[1].pages), (1024, 10));
        let saved = (0..700).chain(0..10).filter(|&page| is_saved(page)).count();
        assert_eq!(counts.saved_pages, saved as u64);
        assert_eq!(
            counts.zero_pages,
            (0..700).chain(0..10).filter(|page| page % 7 == 3).count() as u64
        );
        let on_disk = std::os::unix::fs::MetadataExt::blocks(&ram.metadata().unwrap()) * 512;
        assert_eq!(on_disk, saved as u64 * PAGE_SIZE);
        let mut page = [0; PAGE_BYTES];
        for (place, source) in placed.iter().zip(&sources) {
            for at in 0..place.pages {
                ram.read_exact_at(&mut page, (place.first_page + at) * PAGE_SIZE)
                    .unwrap();
                let mut expected = [0; PAGE_BYTES];
                memory::read(me(), source.hva.add_pages(at), &mut expected).unwrap();
                assert!(page == expected, "page {at} of {}", place.name);
            }
        }
        assert!(verify(&ram, &sums).is_empty());
    }

    #[test]
    fn what_is_free_becomes_holes_and_the_rest_stays() {
        let (_memory, source) = block(700);
        let at = |from, to| source.hva.add_pages(from)..source.hva.add_pages(to);
        // Within a chunk, across two, before the block and behind it.
        let free = [
            Hva(0)..source.hva.add_pages(2),
            at(7, 9),
            at(500, 530),
            at(690, 900),
        ];
        let is_free = |page| free.iter().any(|f| f.contains(&source.hva.add_pages(page)));
        let (ram, sums) = (file(), file());
        let (_, counts) = write(
            me(),
            std::slice::from_ref(&source),
            &free,
            &ram,
            &sums,
            &Progress::default(),
        )
        .unwrap();
        let saved = (0..700).filter(|&p| is_saved(p) && !is_free(p)).count();
        assert_eq!(counts.saved_pages, saved as u64);
        let there = (0..700).filter(|&p| p % 7 < 4 && is_free(p)).count();
        assert_eq!(counts.free_pages, there as u64);
        let mut page = [0; PAGE_BYTES];
        for at in 0..700 {
            ram.read_exact_at(&mut page, at * PAGE_SIZE).unwrap();
            assert_eq!(is_zero(&page), !is_saved(at) || is_free(at), "page {at}");
        }
        assert!(verify(&ram, &sums).is_empty());
    }

    #[test]
    fn a_flipped_bit_is_found_wherever_it_is() {
        let (_memory, source) = block(2000);
        let (ram, sums) = (file(), file());
        write(me(), &[source], &[], &ram, &sums, &Progress::default()).unwrap();
        let mut byte = [0];
        // In a page, in a hole, in the last page.
        for at in [5, 100 * PAGE_SIZE + 7 * PAGE_SIZE / 2, 2000 * PAGE_SIZE - 1] {
            ram.read_exact_at(&mut byte, at).unwrap();
            ram.write_all_at(&[byte[0] ^ 1], at).unwrap();
            let chunk = at / CHUNK_BYTES as u64;
            assert_eq!(verify(&ram, &sums), [chunk]);
            ram.write_all_at(&byte, at).unwrap();
        }
        assert!(verify(&ram, &sums).is_empty());
    }

    /// Swap of this host's, as long as it lives.
    struct Swap(tempfile::NamedTempFile);

    impl Swap {
        fn on() -> Result<Self, String> {
            // Not on tmpfs, and without holes.
            let file = tempfile::NamedTempFile::new_in("/var/tmp").map_err(|e| e.to_string())?;
            let bytes = vec![0; 16 << 20];
            file.as_file().write_all_at(&bytes, 0).unwrap();
            for program in ["mkswap", "swapon"] {
                let said = std::process::Command::new(program)
                    .arg(file.path())
                    .output();
                let said = said.map_err(|error| format!("{program}: {error}"))?;
                if !said.status.success() {
                    return Err(String::from_utf8_lossy(&said.stderr).into_owned());
                }
            }
            Ok(Self(file))
        }
    }

    impl Drop for Swap {
        fn drop(&mut self) {
            let off = std::process::Command::new("swapoff")
                .arg(self.0.path())
                .status();
            assert!(std::thread::panicking() || off.unwrap().success());
        }
    }

    #[test]
    fn pages_in_swap_are_saved() {
        let _swap = match Swap::on() {
            Ok(swap) => swap,
            Err(why) => memfold_testkit::skip!("no swap: {why}"),
        };
        let (memory, source) = block(700);
        memory
            .area()
            .advise(rustix::mm::Advice::LinuxPageOut)
            .unwrap();
        let pagemap = memfold_sys::pagemap::Pagemap::open(me()).unwrap();
        let filter = Filter {
            all_of: category::SWAPPED,
            ..Filter::default()
        };
        let end = source.hva.add_pages(700);
        let swapped = pagemap.scan(source.hva, end, filter).unwrap();
        let swapped: u64 = swapped
            .iter()
            .map(memfold_sys::pagemap::Region::pages)
            .sum();
        assert!(swapped > 0, "no page is in swap");
        let (ram, sums) = (file(), file());
        let (_, counts) = write(me(), &[source], &[], &ram, &sums, &Progress::default()).unwrap();
        let saved = (0..700).filter(|&page| is_saved(page)).count();
        assert_eq!(counts.saved_pages, saved as u64);
        let mut page = [0; PAGE_BYTES];
        for at in 0..700 {
            ram.read_exact_at(&mut page, at * PAGE_SIZE).unwrap();
            let first = u64::from_ne_bytes(page[..8].try_into().unwrap());
            let expected = if is_saved(at) { at << 32 | 1 << 63 } else { 0 };
            assert_eq!(first, expected, "page {at}");
        }
    }

    #[test]
    fn pages_of_a_mapped_file_are_saved_though_nobody_touched_them() {
        let content = file();
        let bytes: Vec<u8> = (1..=250).cycle().take(4 * PAGE_BYTES).collect();
        content.write_all_at(&bytes, 0).unwrap();
        let memory = Mapping::anonymous(16, true).unwrap();
        memory
            .area()
            .part(3, 4)
            .map_file(std::os::fd::AsFd::as_fd(&content), 0)
            .unwrap();
        let source = Source {
            name: "ram0".into(),
            hva: memory.area().start(),
            pages: 16,
        };
        let (ram, sums) = (file(), file());
        let (_, counts) = write(me(), &[source], &[], &ram, &sums, &Progress::default()).unwrap();
        assert_eq!(counts.saved_pages, 4);
        let mut saved = vec![0; 4 * PAGE_BYTES];
        ram.read_exact_at(&mut saved, 3 * PAGE_SIZE).unwrap();
        assert!(saved == bytes);
    }
}

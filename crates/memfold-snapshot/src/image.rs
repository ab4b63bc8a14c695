//! The RAM image: a sparse file that QEMU's process can map directly.
//!
//! ```text
//!   ram        | block 0: page 0, 1, 2 ...  | block 1 ...     each block at its offset, a whole number of chunks
//!              |##..####....................|                 . = hole: reads as zeroes, takes no space
//!   ram.sums   | chunk 0 | chunk 1 | ...                      XXH3-128 of each 2 MiB of `ram`, holes as zeroes
//! ```
//!
//! The kernel's page tables of the QEMU process decide which pages are saved: pages in memory,
//! pages *in swap*, and mappings of files (the page store, a template), even if this process never
//! touched them. Pages that were never touched or were discarded, the kernel's zero page, and pages
//! that hold only zeroes become holes.

use std::fs::File;
use std::io;
use std::ops::Range;

use memfold_sys::pagemap::{Filter, Pagemap, category};
use memfold_units::{HUGE_PAGE_PAGES, Hva, PAGE_BYTES, PAGE_SIZE};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::pipeline;

/// Pages that one checksum covers: one huge page.
pub const CHUNK_PAGES: u64 = HUGE_PAGE_PAGES;

/// Bytes of a chunk.
pub const CHUNK_BYTES: usize = 2 << 20;
const _: () = assert!(CHUNK_BYTES as u64 == CHUNK_PAGES * PAGE_SIZE);

/// Bytes of one checksum in `ram.sums`, little endian.
pub const SUM_BYTES: usize = 16;

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

/// Parts of `ranges`, which are page numbers in `block`, that are not in `out`, which are
/// addresses. Both ascend.
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
    pub(super) pid: Pid,
    pub(super) blocks: Vec<Source>,
    /// Of each block, page numbers in it, ascending.
    pub(super) ranges: Vec<Vec<(u64, u64)>>,
    pub(super) counts: ImageCounts,
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

/// A chunk of a block in which something is to be saved.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Number of the block.
    pub(super) block: usize,
    /// Its first page, counted from the block's.
    pub(super) first: u64,
    /// Which of the block's ranges begin before its end, and end behind its first page.
    pub(super) ranges: Range<usize>,
}

impl Plan {
    /// Chunks of block `number` in which something is to be saved, ascending.
    pub(super) fn chunks(&self, number: usize) -> Vec<Chunk> {
        let (pages, ranges) = (self.blocks[number].pages, &self.ranges[number]);
        let mut chunks = Vec::new();
        let mut next = 0;
        for first in (0..pages).step_by(CHUNK_BYTES / PAGE_BYTES) {
            while ranges.get(next).is_some_and(|range| range.1 <= first) {
                next += 1;
            }
            let begins = |range: &&(u64, u64)| range.0 < first + CHUNK_PAGES;
            let here = ranges[next..].iter().take_while(begins).count();
            if here > 0 {
                chunks.push(Chunk {
                    block: number,
                    first,
                    ranges: next..next + here,
                });
            }
        }
        chunks
    }
}

/// Writes the pages of `buffer` that aren't zero to their places behind byte `at` of a file; how
/// many.
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
                let run = &buffer[from..page * PAGE_BYTES];
                pipeline::write_all_at(file, run, at + from as u64)?;
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

/// Numbers of the chunks of a file that aren't holes whole, ascending.
pub(super) fn chunks_with_data(file: &File) -> io::Result<Vec<u64>> {
    let chunk = CHUNK_BYTES as u64;
    let parts = Data::of(file)?;
    let mut chunks: Vec<u64> = parts
        .flat_map(|part| part.start / chunk..part.end.div_ceil(chunk))
        .collect();
    // Several parts may lie in one.
    chunks.dedup();
    Ok(chunks)
}

pub(super) fn is_zero(page: &[u8]) -> bool {
    const ZEROES: [u8; 256] = [0; 256];
    page.chunks_exact(ZEROES.len()).all(|part| part == ZEROES)
}

pub(super) fn bytes(pages: u64) -> usize {
    usize::try_from(pages).unwrap_or(0) * PAGE_BYTES
}

//! RAM image: a sparse file that QEMU's process can map directly.
//!
//! ```text
//!   ram        | block 0: page 0, 1, 2 ...  | block 1 ...     each block at its offset, a whole number of chunks
//!              |##..####....................|                 . = hole: reads as zeroes, takes no space
//!   ram.sums   | chunk 0 | chunk 1 | ...                      XXH3-128 of each 2 MiB of `ram`, holes as zeroes
//! ```
//!
//! The kernel's page tables of the QEMU process decide which pages are saved. Pages in memory and
//! pages *in swap* are saved. Pages of mapped files (a page store, a snapshot's image) are saved
//! even if this process never touched them. Anonymous pages that were never touched or were
//! discarded, the kernel's zero page, and pages that hold only zeroes become holes.

use std::fs::File;
use std::io;
use std::ops::Range;

use memfold_store::data_ranges;
use memfold_sys::pagemap::{Filter, Pagemap, category};
use memfold_units::{HUGE_PAGE_PAGES, Hva, PAGE_BYTES, PAGE_SIZE};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::pipeline;
use super::ranges::{joined, without};

/// Length in pages of a chunk of a RAM image: one huge page. Each chunk has one checksum.
pub const CHUNK_PAGES: u64 = HUGE_PAGE_PAGES;

/// Length in bytes of a chunk of a RAM image: 2 MiB.
pub const CHUNK_BYTES: usize = 2 << 20;
const _: () = assert!(CHUNK_BYTES as u64 == CHUNK_PAGES * PAGE_SIZE);

/// Pages of a process that hold bytes of their own.
pub(super) const HELD: Filter = Filter {
    none_of: category::ZERO,
    ..Filter::THERE
};

/// Length in bytes of a chunk's checksum in `ram.sums`, which is stored in little endian.
pub const SUM_BYTES: usize = 16;

/// Place of one of QEMU's RAM blocks in a RAM image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageBlock {
    /// Name of the RAM block in QEMU.
    pub name: String,
    /// Index of the block's first page in the image; a multiple of [`CHUNK_PAGES`].
    pub first_page: u64,
    /// Length of the RAM block in pages.
    pub pages: u64,
}

/// A RAM block of a running VM's QEMU that will be saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Name of the RAM block in QEMU.
    pub name: String,
    /// Address of the block's first byte in QEMU's process.
    pub hva: Hva,
    /// Length of the RAM block in pages.
    pub pages: u64,
}

/// Numbers of the pages of a VM's RAM, by how the RAM image holds them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageCounts {
    /// Number of pages in all RAM blocks of the image.
    pub pages: u64,
    /// Number of pages whose bytes are in the image, or which the image refers to on a disk.
    pub saved_pages: u64,
    /// Number of pages that were in memory and held only zeroes; they are holes of the image.
    pub zero_pages: u64,
    /// Number of pages that were in memory and free in the guest; they are holes of the image,
    /// whatever they held.
    #[serde(default)]
    pub free_pages: u64,
}

/// Returns the places of these RAM blocks in an image, one after the other. Each block begins at a
/// multiple of [`CHUNK_PAGES`].
#[must_use]
pub fn place(blocks: &[Source]) -> Vec<ImageBlock> {
    let mut next = 0;
    let place = |block: &Source| {
        let first_page = next;
        next += block.pages.next_multiple_of(CHUNK_PAGES);
        ImageBlock {
            name: block.name.clone(),
            first_page,
            pages: block.pages,
        }
    };
    blocks.iter().map(place).collect()
}

/// Returns the ranges where a process maps files. The pages there need not be in the process's page
/// tables.
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

/// Returns the addresses of the pages of `block` that must be saved, ascending.
fn present(pagemap: &Pagemap, files: &[Range<Hva>], block: &Source) -> io::Result<Vec<Range<Hva>>> {
    let (start, end) = (block.hva, block.hva.add_pages(block.pages));
    let regions = pagemap.scan(start, end, HELD)?;
    let regions = regions.iter().map(|region| region.start..region.end);
    let mut ranges: Vec<Range<Hva>> = regions
        .chain(files.iter().cloned())
        .map(|part| part.start.max(start)..part.end.min(end))
        .filter(|part| part.start < part.end)
        .collect();
    ranges.sort_unstable_by_key(|range| range.start);
    Ok(joined(ranges))
}

/// A chunk of a block that contains pages to save.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Number of the chunk's block in the plan.
    pub(super) block: usize,
    /// Page in the block at which the chunk begins.
    pub(super) first: u64,
    /// Indexes of the block's ranges that overlap the chunk.
    pub(super) ranges: Range<usize>,
}

/// The pages of a VM's RAM that must be saved, according to the page tables of QEMU's process at
/// one instant.
#[derive(Debug)]
pub struct Plan {
    pub(super) pid: Pid,
    pub(super) blocks: Vec<Source>,
    /// For each block, ascending ranges of page numbers in the block.
    pub(super) ranges: Vec<Vec<(u64, u64)>>,
    pub(super) counts: ImageCounts,
}

impl Plan {
    /// Reads the page tables of the stopped process `pid`. The address ranges in `free` (ascending)
    /// are not saved.
    pub fn new(pid: Pid, blocks: Vec<Source>, free: &[Range<Hva>]) -> io::Result<Self> {
        let mut plan = Self {
            pid,
            blocks,
            ranges: Vec::new(),
            counts: ImageCounts::default(),
        };
        let length = |range: &Range<Hva>| range.end.pages_since(range.start);
        let pages = |ranges: &[Range<Hva>]| ranges.iter().map(length).sum::<u64>();
        let (pagemap, files) = (Pagemap::open(pid)?, mapped_files(pid)?);
        for block in &plan.blocks {
            let all = present(&pagemap, &files, block)?;
            let left = without(&all, free);
            plan.counts.pages += block.pages;
            plan.counts.free_pages += pages(&all) - pages(&left);
            let page = |hva: Hva| hva.pages_since(block.hva);
            let ranges = left.iter().map(|r| (page(r.start), page(r.end)));
            plan.ranges.push(ranges.collect());
        }
        Ok(plan)
    }

    /// Returns the address ranges of RAM block `number` that must be saved, in ascending order.
    pub fn wanted(&self, number: usize) -> impl Iterator<Item = Range<Hva>> + '_ {
        let block = self.blocks.get(number).zip(self.ranges.get(number));
        block.into_iter().flat_map(|(block, ranges)| {
            let at = |page| block.hva.add_pages(page);
            ranges.iter().map(move |&(from, to)| at(from)..at(to))
        })
    }

    /// Returns the chunks of block `number` that contain pages to save, in ascending order.
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

/// Writes the pages of `buffer` that are not zero to a file, at their places after byte `at`.
/// Returns the number of written pages.
pub(super) fn write_nonzero(buffer: &[u8], file: &File, at: u64) -> io::Result<u64> {
    let pages = (0..).zip(buffer.chunks_exact(PAGE_BYTES));
    let held = pages.filter(|(_, bytes)| !is_zero(bytes));
    let mut written = 0;
    for run in joined(held.map(|(page, _)| page..page + 1)) {
        let part = &buffer[run.start * PAGE_BYTES..run.end * PAGE_BYTES];
        pipeline::write_all_at(file, part, at + (run.start * PAGE_BYTES) as u64)?;
        written += run.len() as u64;
    }
    Ok(written)
}

/// Returns the numbers of the chunks of a file that contain data, in ascending order.
pub(super) fn chunks_with_data(file: &File) -> io::Result<Vec<u64>> {
    let chunk = CHUNK_BYTES as u64;
    let of_part = |part: Range<u64>| part.start / chunk..part.end.div_ceil(chunk);
    let mut chunks: Vec<u64> = data_ranges(file)?.into_iter().flat_map(of_part).collect();
    // Several parts may be in the same chunk.
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

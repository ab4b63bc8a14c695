//! Plans a save: decides which pages of QEMU's process must be read for the snapshot, from the
//! process's page tables at one instant.
//!
//! A snapshot needs pages that are in memory or in swap, and all pages of files that QEMU maps as
//! guest RAM (the page store, or the RAM image of another snapshot), even if QEMU has never touched
//! them. It needs no anonymous pages that were never touched or were discarded, no zero page of the
//! kernel, and no pages that hold only zeroes.

use std::io;
use std::ops::Range;

use memfold_sys::pagemap::{Filter, Pagemap, Region, category};
use memfold_units::Hva;
use rustix::process::Pid;

use super::candidates::Run;
use super::image::{CHUNK_PAGES, ImageBlock, ImageCounts, Ranges, Source};
use super::page_copies::PageCopies;
use super::parent::{Parent, Unchanged};
use super::ranges::{joined, without};
use super::refer::Reference;

/// Pages of a process that hold bytes of their own.
pub(super) const HELD: Filter = Filter {
    none_of: category::ZERO,
    ..Filter::THERE
};

/// Reads `/proc/PID/maps` of a process.
pub(super) fn read_maps(pid: Pid) -> io::Result<String> {
    std::fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero()))
}

/// Returns the ranges where a process maps files, according to its `/proc/PID/maps`. The pages
/// there need not be in the process's page tables.
fn mapped_files(maps: &str) -> Vec<Range<Hva>> {
    let file = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (from, to) = fields.next()?.split_once('-')?;
        let is_file = fields.nth(3)? != "0";
        let at = |text| u64::from_str_radix(text, 16).ok().map(Hva);
        is_file.then_some(at(from)?..at(to)?)
    };
    maps.lines().filter_map(file).collect()
}

/// Returns the addresses of the pages of `block` that must be saved, ascending. `regions`: those of
/// its pages that are in memory or in swap.
fn present(regions: &[Region], files: &[Range<Hva>], block: &Source) -> Vec<Range<Hva>> {
    let (start, end) = (block.hva, block.hva.add_pages(block.pages));
    let held = regions
        .iter()
        .filter(|r| r.categories & category::ZERO == 0);
    let held = held.map(|region| region.start..region.end);
    let mut ranges: Vec<Range<Hva>> = held
        .chain(files.iter().cloned())
        .map(|part| part.start.max(start)..part.end.min(end))
        .filter(|part| part.start < part.end)
        .collect();
    ranges.sort_unstable_by_key(|range| range.start);
    joined(ranges)
}

/// A chunk of a block that contains pages to save.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Number of the chunk's block in the plan.
    pub(super) block: usize,
    /// Page in the block at which the chunk begins.
    pub(super) first: u64,
}

/// The memory of a process that must be saved, according to its page tables at one instant.
#[derive(Debug)]
pub struct Plan {
    pub(super) pid: Pid,
    pub(super) blocks: Vec<Source>,
    /// For each block, the pages to read.
    pub(super) ranges: Vec<Ranges>,
    /// For each block of a layer, the pages that may differ from the parent's: the pages to read,
    /// and pages that only the parent holds. Without a parent, the same as `ranges`.
    pub(super) differing: Vec<Ranges>,
    /// Pages of a layer that are referred to without being read, by ascending address. Files are
    /// numbered as the parent's.
    pub(super) kept: Vec<Run>,
    /// Copies of the pages to read, if they were copied while the process was stopped.
    pub(super) copied: Option<PageCopies>,
    pub(super) counts: ImageCounts,
}

impl Plan {
    /// Reads the page tables of a stopped process. The ranges in `free` (ascending) become holes.
    /// With a parent, the process's pages that are the parent's are not read.
    pub fn new(
        pid: Pid,
        blocks: Vec<Source>,
        free: &[Range<Hva>],
        parent: Option<&Parent>,
    ) -> io::Result<Self> {
        Self::with_maps(pid, &read_maps(pid)?, blocks, free, parent)
    }

    /// As [`Plan::new`], with the process's `/proc/PID/maps`, read since the process stopped.
    pub(super) fn with_maps(
        pid: Pid,
        maps: &str,
        blocks: Vec<Source>,
        free: &[Range<Hva>],
        parent: Option<&Parent>,
    ) -> io::Result<Self> {
        let mut plan = Self {
            pid,
            blocks,
            ranges: Vec::new(),
            differing: Vec::new(),
            kept: Vec::new(),
            copied: None,
            counts: ImageCounts::default(),
        };
        let pagemap = Pagemap::open(pid)?;
        let files = mapped_files(maps);
        let mapped = parent.map_or(Ok(Vec::new()), |parent| parent.mappings(maps))?;
        let mut unchanged = Unchanged::default();
        let mut there = Vec::new();
        for block in &plan.blocks {
            // One scan of each block, because the VM stands still meanwhile.
            let end = block.hva.add_pages(block.pages);
            let regions = pagemap.scan(block.hva, end, Filter::THERE)?;
            if let Some(of) = parent.and_then(|parent| parent.block(block)) {
                unchanged.add(of.unchanged(&regions, &mapped, block)?);
            }
            there.push(regions);
        }
        let (kept, same) = unchanged.limited();
        let length = |range: &Range<Hva>| range.end.pages_since(range.start);
        let pages = |ranges: &[Range<Hva>]| ranges.iter().map(length).sum::<u64>();
        for (block, regions) in plan.blocks.iter().zip(&there) {
            let all = without(&present(regions, &files, block), &same);
            let left = without(&all, free);
            plan.counts.pages += block.pages;
            plan.counts.free_pages += pages(&all) - pages(&left);
            let page = |hva: Hva| hva.pages_since(block.hva);
            let numbers = |ranges: &[Range<Hva>]| -> Ranges {
                ranges
                    .iter()
                    .map(|r| (page(r.start), page(r.end)))
                    .collect()
            };
            let mut differing = left.clone();
            if let Some(of) = parent.and_then(|parent| parent.block(block)) {
                let of_parent = of.runs(block.hva, 0..block.pages);
                let of_parent: Vec<_> = of_parent.map(|run| run.hva..run.end()).collect();
                differing.extend(without(&joined(of_parent), &same));
                differing.sort_unstable_by_key(|range| range.start);
                differing = joined(differing);
            }
            plan.ranges.push(numbers(&left));
            plan.differing.push(numbers(&differing));
        }
        plan.counts.saved_pages = kept.iter().map(|run| run.pages).sum();
        plan.kept = kept;
        Ok(plan)
    }

    /// Returns the number of pages to read.
    pub(super) fn pages(&self) -> u64 {
        let all = self.ranges.iter().flatten();
        all.map(|(from, to)| to - from).sum()
    }

    /// Returns the address ranges of block `number` that must be saved.
    pub fn wanted(&self, number: usize) -> impl Iterator<Item = Range<Hva>> + '_ {
        let block = self.blocks.get(number).zip(self.ranges.get(number));
        block.into_iter().flat_map(|(block, ranges)| {
            let at = |page| block.hva.add_pages(page);
            ranges.iter().map(move |&(from, to)| at(from)..at(to))
        })
    }

    /// Returns the chunks of block `number` that contain pages to read or to compare with the
    /// parent, in ascending order.
    pub(super) fn chunks(&self, number: usize) -> Vec<Chunk> {
        let mut chunks: Vec<Chunk> = Vec::new();
        for &(from, to) in &self.differing[number] {
            for chunk in from / CHUNK_PAGES..to.div_ceil(CHUNK_PAGES) {
                let first = chunk * CHUNK_PAGES;
                if chunks.last().is_none_or(|last| last.first < first) {
                    chunks.push(Chunk {
                        block: number,
                        first,
                    });
                }
            }
        }
        chunks
    }

    /// Returns the references to the kept pages, for an image whose blocks are at `placed`. The
    /// parent's first file has number `offset`.
    pub(super) fn references(&self, placed: &[ImageBlock], offset: u32) -> Vec<Reference> {
        let mut references = Vec::new();
        for (block, placed) in self.blocks.iter().zip(placed) {
            let end = block.hva.add_pages(block.pages);
            let first = self.kept.partition_point(|run| run.end() <= block.hva);
            for run in self.kept[first..].iter().take_while(|run| run.hva < end) {
                // A run may cover parts of blocks that are neighbours in memory, and not in the
                // image.
                let (from, to) = (run.hva.max(block.hva), run.end().min(end));
                let start = placed.first_page + from.pages_since(block.hva);
                let in_file = run.block + from.pages_since(run.hva);
                let stop = start + to.pages_since(from);
                let mut page = start;
                while page < stop {
                    let next = (page / CHUNK_PAGES + 1) * CHUNK_PAGES;
                    let pages = next.min(stop) - page;
                    references.push(Reference {
                        page,
                        pages: u32::try_from(pages).unwrap_or(0),
                        file: run.file + offset,
                        block: in_file + (page - start),
                    });
                    page += pages;
                }
            }
        }
        references
    }
}

/// Returns the parts of ascending ranges that are in `first..end`.
pub(super) fn within(ranges: &[(u64, u64)], first: u64, end: u64) -> Ranges {
    let from = ranges.partition_point(|range| range.1 <= first);
    let here = ranges[from..].iter().take_while(|range| range.0 < end);
    here.map(|&(from, to)| (from.max(first), to.min(end)))
        .collect()
}

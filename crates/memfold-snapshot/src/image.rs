//! The RAM image of a snapshot: a sparse file with the VM's memory, which QEMU can map directly.
//!
//! ```text
//!   ram        | block 0: page 0, 1, 2 ...  | block 1 ...     each block at its offset, a whole number of chunks
//!              |##..####....................|                 . = hole: reads as zeroes, takes no space
//!   ram.sums   | chunk 0 | chunk 1 | ...                      checksum of each 2 MiB of the image, holes as zeroes
//! ```

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::OnceLock;

use memfold_store::data_ranges;
use memfold_units::{HUGE_PAGE_PAGES, Hva, PAGE_BYTES, PAGE_SIZE};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::pipeline;
use super::ranges::joined;

/// Length in pages of a chunk of a RAM image: one huge page. Each chunk has one checksum.
pub const CHUNK_PAGES: u64 = HUGE_PAGE_PAGES;

/// Length in bytes of a chunk of a RAM image: 2 MiB.
pub const CHUNK_BYTES: usize = 2 << 20;
const _: () = assert!(CHUNK_BYTES as u64 == CHUNK_PAGES * PAGE_SIZE);

/// Length in bytes of a chunk's checksum in `ram.sums`, which is stored in little endian.
pub const SUM_BYTES: usize = 16;

/// File name of the RAM image's checksums in a snapshot's directory.
pub const SUMS: &str = "ram.sums";

/// Checksum of a page at place `page` (0 to 511) of its chunk: XXH3-128 with the place as seed. The
/// checksum of a chunk is the sum of those of its pages, modulo 2^128, so that the checksum of a
/// changed chunk follows from its changed pages.
pub(super) fn page_sum(page: u64, bytes: &[u8]) -> u128 {
    if is_zero(bytes) {
        return zero_sums()[usize::try_from(page).unwrap_or(0)];
    }
    xxh3_128_with_seed(bytes, page)
}

/// Checksums of pages of zeroes, by their place in the chunk.
fn zero_sums() -> &'static [u128] {
    static SUMS: OnceLock<Vec<u128>> = OnceLock::new();
    let sum = |page| xxh3_128_with_seed(&[0; PAGE_BYTES], page);
    SUMS.get_or_init(|| (0..CHUNK_PAGES).map(sum).collect())
}

/// Returns by what the checksum of a chunk changes if `new` replaces the page `old` (`None`:
/// zeroes) at place `page` of the chunk.
pub(super) fn page_change(page: u64, old: Option<&[u8]>, new: &[u8]) -> u128 {
    if old == Some(new) {
        return 0;
    }
    let zero = || zero_sums()[usize::try_from(page).unwrap_or(0)];
    let before = old.map_or_else(zero, |old| page_sum(page, old));
    page_sum(page, new).wrapping_sub(before)
}

/// Checksum of a chunk of zeroes.
pub(super) fn zero_chunk_sum() -> u128 {
    zero_sums()
        .iter()
        .fold(0, |sum, &page| sum.wrapping_add(page))
}

/// Checksum of pages that begin at place `first` of their chunk: what they add to the checksum of
/// the chunk.
pub(super) fn pages_sum(first: u64, bytes: &[u8]) -> u128 {
    let pages = (first..).zip(bytes.chunks_exact(PAGE_BYTES));
    pages.fold(0, |sum, (page, bytes)| {
        sum.wrapping_add(page_sum(page, bytes))
    })
}

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

/// How many pages of a VM's RAM an image has, stores, and leaves out as zero or free.
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

/// Ascending ranges of page numbers in a RAM block.
pub(super) type Ranges = Vec<(u64, u64)>;

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

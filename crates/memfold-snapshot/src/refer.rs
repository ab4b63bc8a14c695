//! Stores pages of a snapshot's memory as references to a disk that contains the same bytes. A
//! reference is a file and an offset in it. It replaces the bytes of the pages in the RAM image.
//!
//! ```text
//!   ram        ####....##..     pages that no disk contains
//!   ram.refs   pages 4 to 7 = file 0, blocks 900 to 903
//! ```
//! A guest's file systems align file contents to 4 KiB, and disk images preserve this alignment. So
//! a cached page of a file equals a block of the disk. The guest says which block
//! ([`super::candidates`]). memfold compares the bytes when it reads the memory
//! ([`super::writer`]).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use memfold_units::{PAGE_BYTES, PAGE_SIZE};

use super::image::{CHUNK_PAGES, bytes};

/// Consecutive pages of a RAM image, within one chunk, whose bytes are in a disk's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Index in the image of the reference's first page.
    pub page: u64,
    /// Number of pages in the reference.
    pub pages: u32,
    /// Index of the disk's file in the list `sources` of the snapshot's manifest.
    pub file: u32,
    /// Offset in the file of the reference's first page, in pages.
    pub block: u64,
}

impl Reference {
    /// Length in bytes of a reference in `ram.refs`, which stores `page` (8 bytes), `pages` (4),
    /// `file` (4) and `block` (8), little endian.
    pub const BYTES: usize = 24;

    fn encode(&self) -> impl Iterator<Item = u8> {
        let numbers = u64::from(self.pages) | u64::from(self.file) << 32;
        let parts = [self.page, numbers, self.block];
        parts.into_iter().flat_map(u64::to_le_bytes)
    }

    /// Decodes a reference from [`Self::BYTES`] bytes.
    fn decode(bytes: &[u8]) -> Self {
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let short = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        Self {
            page: long(0),
            pages: short(8),
            file: short(12),
            block: long(16),
        }
    }

    /// Returns whether `next` begins where this reference ends, both in the image and in the file.
    #[must_use]
    pub fn goes_on_with(&self, next: &Self) -> bool {
        let pages = u64::from(self.pages);
        self.page + pages == next.page && self.file == next.file && self.block + pages == next.block
    }

    /// Returns the total length of the reference's pages in bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        usize::try_from(self.pages).unwrap_or(0) * PAGE_BYTES
    }
}

/// Returns the references to pages in a buffer that holds pages of an image from page `first` on.
/// `references` are ascending.
fn within<'a>(references: &'a [Reference], first: u64, buffer: &[u8]) -> &'a [Reference] {
    let end = first + (buffer.len() / PAGE_BYTES) as u64;
    let from = references.partition_point(|r| r.page + u64::from(r.pages) <= first);
    let to = references.partition_point(|r| r.page < end);
    &references[from..to]
}

/// Returns whether any reference stands for a page in the buffer.
pub(super) fn touches(references: &[Reference], first: u64, buffer: &[u8]) -> bool {
    !within(references, first, buffer).is_empty()
}

/// Reads the pages in the buffer that references stand for from their files.
pub(super) fn fill(
    references: &[Reference],
    sources: &[&File],
    first: u64,
    buffer: &mut [u8],
) -> io::Result<()> {
    let end = first + (buffer.len() / PAGE_BYTES) as u64;
    for reference in within(references, first, buffer) {
        let from = reference.page.max(first);
        let to = (reference.page + u64::from(reference.pages)).min(end);
        let number = usize::try_from(reference.file).ok();
        let source = number.and_then(|number| sources.get(number));
        let source = source.ok_or_else(|| io::Error::other("a reference names no file"))?;
        let part = &mut buffer[bytes(from - first)..bytes(to - first)];
        let block = reference.block + (from - reference.page);
        source.read_exact_at(part, block * PAGE_SIZE)?;
    }
    Ok(())
}

/// Returns the number of mappings that `references` (sorted) need: one for consecutive references,
/// and one for each gap between references.
#[must_use]
pub fn mappings(references: &[Reference]) -> u64 {
    let mut end = None;
    let of_run = |run: &[Reference]| {
        let pages: u64 = run.iter().map(|part| u64::from(part.pages)).sum();
        let before = end.replace(run[0].page + pages);
        1 + u64::from(before != Some(run[0].page))
    };
    let runs = references.chunk_by(Reference::goes_on_with);
    runs.map(of_run).sum()
}

/// Encodes references as the contents of `ram.refs`.
#[must_use]
pub fn encode(references: &[Reference]) -> Vec<u8> {
    references.iter().flat_map(Reference::encode).collect()
}

/// Decodes and checks the contents of `ram.refs`. The image has `pages` pages, and its manifest
/// lists `sources` files. An error tells why the references are refused.
pub fn decode(bytes: &[u8], pages: u64, sources: usize) -> Result<Vec<Reference>, String> {
    let records = bytes.chunks_exact(Reference::BYTES);
    if !records.remainder().is_empty() {
        return Err("the file ends within a record".into());
    }
    let mut free = 0;
    let mut references = Vec::with_capacity(records.len());
    for record in records {
        let reference = Reference::decode(record);
        let Reference { page, pages: n, .. } = reference;
        let end = page.checked_add(u64::from(n)).filter(|&end| {
            end <= pages
                && n > 0
                && page >= free
                && page / CHUNK_PAGES == (end - 1) / CHUNK_PAGES
                && usize::try_from(reference.file).is_ok_and(|file| file < sources)
                && reference.block < u64::MAX / PAGE_SIZE
        });
        free = end.ok_or_else(|| format!("page {page}: not a reference of this image"))?;
        references.push(reference);
    }
    Ok(references)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_disk_references_that_does_not_match_its_ram_image_is_refused() {
        let good = Reference {
            page: 510,
            pages: 2,
            file: 0,
            block: 1,
        };
        let table = |references: &[Reference]| decode(&encode(references), 1024, 1);
        assert_eq!(table(&[good]).unwrap(), [good]);
        let with = |change: &dyn Fn(&mut Reference)| {
            let mut bad = good;
            change(&mut bad);
            table(&[bad])
        };
        assert!(with(&|r| r.pages = 0).is_err());
        assert!(with(&|r| r.pages = 3).is_err(), "over a chunk's end");
        assert!(with(&|r| r.page = 1023).is_err(), "over the image's end");
        assert!(with(&|r| (r.page, r.pages) = (1023, 1)).is_ok());
        assert!(with(&|r| r.page = u64::MAX).is_err());
        assert!(with(&|r| r.file = 1).is_err());
        assert!(with(&|r| r.block = u64::MAX).is_err());
        assert!(table(&[good, good]).is_err(), "one over the other");
        let bytes = encode(&[good]);
        for cut in 1..bytes.len() {
            assert!(decode(&bytes[..cut], 1024, 1).is_err(), "{cut} bytes");
        }
    }
}

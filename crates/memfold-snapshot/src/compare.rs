//! Compares a VM's memory with the contents of files, to find pages that a snapshot can store as
//! references to a file.
//!
//! A reference costs the restored VM memory mappings, so it is made only for at least
//! [`FEWEST_PAGES`] equal pages in sequence. Several threads compare pieces of memory in any order.
//! At the edge of its piece, a thread does not know whether the next pages are equal, too, and
//! assumes that they are.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use memfold_units::{Hva, PAGE_BYTES, PAGE_SIZE};

use super::candidates::{Candidates, FEWEST_PAGES, Run};
use super::image::{CHUNK_PAGES, Source, bytes};
use super::manifest::MOST_MAPPINGS;
use super::pipeline::PIECE_BYTES;
use super::ranges::joined;
use super::refer::Reference;

/// Number of pages that a worker reads, hashes and writes at a time.
pub(super) const PIECE_PAGES: u64 = PIECE_BYTES as u64 / PAGE_SIZE;
const _: () = assert!(CHUNK_PAGES % PIECE_PAGES == 0);

/// A piece of a chunk, read into memory.
pub(super) struct Piece<'a> {
    pub(super) block: &'a Source,
    /// Page in the image at which the RAM block begins.
    pub(super) place: u64,
    /// Page in the RAM block at which the piece begins.
    pub(super) first: u64,
    pub(super) bytes: &'a [u8],
    /// For a layer, the same pages of the parent.
    pub(super) of_parent: Option<&'a [u8]>,
}

/// Comparison of memory with files, which all workers share.
#[derive(Debug)]
pub(super) struct Comparison {
    pub(super) candidates: Candidates,
    /// Number of references that may still begin.
    beginnings: AtomicUsize,
}

impl Comparison {
    /// Creates a comparison with `candidates`, beside references that need `kept` mappings. A run
    /// splits where a page differs, and each split needs two more mappings, so the free mappings
    /// limit the number of splits.
    pub(super) fn new(candidates: Candidates, kept: usize) -> Self {
        let (runs, used) = candidates.counts();
        let used = used + kept;
        Self {
            candidates,
            beginnings: AtomicUsize::new(runs + MOST_MAPPINGS.saturating_sub(used) / 2),
        }
    }

    /// Finds the pages in ranges of a piece that files contain, and adds references to them.
    /// Returns the ranges that must be written.
    pub(super) fn refer(
        &self,
        piece: &Piece<'_>,
        ranges: &[(u64, u64)],
        other: &mut [u8],
        references: &mut Vec<Reference>,
    ) -> Vec<(u64, u64)> {
        let at = |page| piece.block.hva.add_pages(page);
        let mut left = Vec::new();
        for &(from, to) in ranges {
            let mut next = from;
            for run in self.candidates.within(at(from)..at(to)) {
                let page = |hva: Hva| hva.clamp(at(from), at(to)).pages_since(piece.block.hva);
                let here = (page(run.hva), page(run.hva.add_pages(run.pages)));
                for Range { start, end } in self.equal(piece, run, here, other) {
                    if self.note(piece, run, (start, end), references) {
                        left.extend((next < start).then_some((next, start)));
                        next = end;
                    }
                }
            }
            left.extend((next < to).then_some((next, to)));
        }
        left
    }

    /// Compares the pages `from` to `to` of a block with a file, and returns the equal pages as
    /// ranges.
    fn equal(
        &self,
        piece: &Piece<'_>,
        run: &Run,
        (from, to): (u64, u64),
        other: &mut [u8],
    ) -> Vec<Range<u64>> {
        let Some(source) = self.candidates.file(run) else {
            return Vec::new();
        };
        let here = bytes(from - piece.first)..bytes(to - piece.first);
        let part = &piece.bytes[here.clone()];
        // The parent's pages at this place are read already.
        if let Some(theirs) = piece.of_parent.filter(|_| source.in_parent) {
            return equal_pages(from, part, &theirs[here]);
        }
        let other = &mut other[..part.len()];
        let skipped = piece.block.hva.add_pages(from).pages_since(run.hva);
        let place = (run.block + skipped) * PAGE_SIZE;
        // If the file cannot be read, the pages are saved in the image.
        if source.file.read_exact_at(other, place).is_err() {
            return Vec::new();
        }
        equal_pages(from, part, other)
    }

    /// Adds a reference for pages `from` to `to` of a block, unless the run is too short for a
    /// mapping of its own. Returns whether a reference was added.
    fn note(
        &self,
        piece: &Piece<'_>,
        run: &Run,
        (from, to): (u64, u64),
        references: &mut Vec<Reference>,
    ) -> bool {
        let first = run.hva.max(piece.block.hva).pages_since(piece.block.hva);
        let skipped = piece.block.hva.add_pages(from).pages_since(run.hva);
        let Ok(pages) = u32::try_from(to - from) else {
            return false;
        };
        let found = Reference {
            page: piece.place + from,
            pages,
            file: run.file,
            block: run.block + skipped,
        };
        let last = references.last_mut();
        if let Some(last) = last.filter(|last| last.goes_on_with(&found)) {
            last.pages += pages;
            return true;
        }
        // Chunks and pieces are compared separately, whatever the neighbouring ones contain.
        let comes_from_before = from % CHUNK_PAGES == 0 && first < from;
        let goes_on =
            to % PIECE_PAGES == 0 && run.hva.add_pages(run.pages) > piece.block.hva.add_pages(to);
        let begins = || {
            let take = |left: usize| left.checked_sub(1);
            let (relaxed, left) = (Ordering::Relaxed, &self.beginnings);
            left.fetch_update(relaxed, relaxed, take).is_ok()
        };
        let is_wanted =
            comes_from_before || ((u64::from(pages) >= FEWEST_PAGES || goes_on) && begins());
        if is_wanted {
            references.push(found);
        }
        is_wanted
    }
}

/// Returns the equal pages of two buffers that begin with page `first`.
fn equal_pages(first: u64, own: &[u8], theirs: &[u8]) -> Vec<Range<u64>> {
    let pages = own
        .chunks_exact(PAGE_BYTES)
        .zip(theirs.chunks_exact(PAGE_BYTES));
    let equal = (first..)
        .zip(pages)
        .filter(|(_, (own, theirs))| own == theirs);
    joined(equal.map(|(page, _)| page..page + 1))
}

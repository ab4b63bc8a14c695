//! Table of the fold engine: which page of a VM's RAM caches each page of the guest's files.

use std::ops::Range;

use memfold_wire::agent::FileNumber;

use super::numbering::Index;
use super::packed::{Run, Unpacked, packed_value, unpack};
use super::packed_map::{Key, PackedMap};

/// Number of consecutive pages of a file in a *piece*, the unit in which the engine matches files
/// of VMs. A word of a bit set has as many bits.
pub const PIECE: u32 = 64;

/// One number for each of the 64 pages of a piece. Each number is stored plus one; 0 means that the
/// page has no number.
pub type Piece = [u32; PIECE as usize];

/// For each page of a file, the guest page that caches it, plus one; 0 for none.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// Packed pieces, by file and number of the piece. That of `open` is out of date.
    pieces: PackedMap,
    /// The piece that was changed last.
    open: Option<(Key, Unpacked<u32, { PIECE as usize }>)>,
}

impl Places {
    /// Returns whether the table may get an entry for page `page` of `file`: its piece has entries
    /// already, or at most `most` pieces have.
    pub fn has_room_for(&self, file: FileNumber, page: u32, most: u64) -> bool {
        let key = (file, page / PIECE);
        self.pieces.len() as u64 <= most || self.open(key).is_some() || self.pieces.has(key)
    }

    fn open(&self, key: Key) -> Option<&Unpacked<u32, { PIECE as usize }>> {
        let open = self.open.as_ref().filter(|(open, _)| *open == key);
        open.map(|(_, entries)| entries)
    }

    pub fn get(&self, file: FileNumber, page: u32) -> Option<Index> {
        let (key, within) = ((file, page / PIECE), page % PIECE);
        let place = match self.open(key) {
            Some(entries) => entries.get(within),
            None => packed_value(self.pieces.get(key)?, within),
        };
        place.checked_sub(1)
    }

    /// Sets the guest page that caches a page of a file, and returns the one before.
    pub fn set(&mut self, file: FileNumber, page: u32, place: Option<Index>) -> Option<Index> {
        let key = (file, page / PIECE);
        if self.open(key).is_none() {
            if place.is_none() && !self.pieces.has(key) {
                return None;
            }
            self.close();
            let entries = Unpacked::new(self.pieces.get(key).unwrap_or_default());
            self.open = Some((key, entries));
        }
        let (_, entries) = self.open.as_mut()?;
        let before = entries.set(page % PIECE, place.map_or(0, |at| at + 1));
        before.checked_sub(1)
    }

    /// Packs the piece that was changed last.
    pub fn close(&mut self) {
        if let Some((key, entries)) = self.open.take() {
            self.pieces.set(key, &entries.pack());
        }
    }

    /// Returns the runs of the packed pieces `pieces` of `file`, in ascending order. In each run,
    /// `at` is a page of the file, and `value` the guest page that caches it, plus one.
    fn runs(&self, file: FileNumber, pieces: Range<u32>) -> impl Iterator<Item = Run<u32>> + '_ {
        let is_wanted = |key: &Key| key.0 == file && pieces.contains(&key.1);
        let mut open = self.open.as_ref().filter(|(key, _)| is_wanted(key));
        let is_only = open.is_some() && pieces.len() == 1;
        let keys = (file, pieces.start)..=(file, pieces.end.max(1) - 1);
        let packed = (!is_only && !pieces.is_empty()).then(|| self.pieces.range(keys));
        let open_key = open.map(|(key, _)| *key);
        let packed = packed.into_iter().flatten();
        let mut packed = packed
            .filter(move |(key, _)| Some(*key) != open_key)
            .peekable();
        let parts = std::iter::from_fn(move || {
            let next = packed.peek().map(|(key, _)| *key);
            match open.take_if(|(key, _)| next.is_none_or(|next| next > *key)) {
                Some((key, entries)) => Some((*key, None, Some(entries))),
                None => packed.next().map(|(key, bytes)| (key, Some(bytes), None)),
            }
        });
        parts.flat_map(|((_, piece), bytes, open)| {
            let packed = bytes.into_iter().flat_map(unpack);
            let runs = packed.chain(open.into_iter().flat_map(Unpacked::runs));
            runs.map(move |run| Run {
                at: piece * PIECE + run.at,
                ..run
            })
        })
    }

    /// Returns the guest pages, each plus one, that cache the 64 pages of piece `piece` of `file`;
    /// `None` if no page of it is cached.
    pub fn piece(&self, file: FileNumber, piece: u32) -> Option<Piece> {
        let first = piece * PIECE;
        let (mut places, mut any) = ([0; PIECE as usize], false);
        for run in self.runs_in(file, first..first.saturating_add(PIECE)) {
            for (page, place) in (run.at..run.at + run.pages).zip(run.value..) {
                places[(page - first) as usize] = place;
                any = true;
            }
        }
        any.then_some(places)
    }

    /// Returns the runs of cached pages in a range of pages of `file`, in ascending order. In each
    /// run, `at` is a page of the file and `value` the guest page that caches it, plus one.
    pub fn runs_in(
        &self,
        file: FileNumber,
        pages: Range<u32>,
    ) -> impl Iterator<Item = Run<u32>> + '_ {
        let pieces = pages.start / PIECE..pages.end.div_ceil(PIECE);
        self.runs(file, pieces).filter_map(move |run| {
            let from = run.at.max(pages.start);
            let end = (run.at + run.pages).min(pages.end);
            Some(Run {
                at: from,
                pages: end.checked_sub(from).filter(|pages| *pages > 0)?,
                value: run.value + (from - run.at),
            })
        })
    }

    /// Returns the ranges of cached pages of `file`, in ascending order. No two ranges adjoin.
    pub fn ranges(&self, file: FileNumber) -> Vec<Range<u32>> {
        let mut ranges: Vec<Range<u32>> = Vec::new();
        for run in self.runs_in(file, 0..u32::MAX) {
            let end = run.at + run.pages;
            match ranges.last_mut().filter(|last| last.end == run.at) {
                Some(last) => last.end = end,
                None => ranges.push(run.at..end),
            }
        }
        ranges
    }

    /// Returns the numbers of the pieces (64 pages each) in a range of pages of `file` that have
    /// cached pages, in ascending order.
    pub fn pieces(&self, file: FileNumber, pages: Range<u32>) -> Vec<u32> {
        let mut found = Vec::new();
        for run in self.runs_in(file, pages) {
            for piece in run.at / PIECE..=(run.at + (run.pages - 1)) / PIECE {
                if found.last() != Some(&piece) {
                    found.push(piece);
                }
            }
        }
        found
    }

    /// Returns the memory use of the table in bytes.
    pub fn own_bytes(&self) -> usize {
        self.pieces.own_bytes() + PIECE as usize * 4
    }
}

#[cfg(test)]
impl Places {
    /// Returns the number of pieces that have entries.
    pub fn len(&mut self) -> usize {
        self.close();
        self.pieces.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::packed::tests::numbers;

    #[test]
    fn the_packed_table_of_places_agrees_with_a_map_after_random_changes() {
        let (mut random, mut places) = (numbers(), Places::default());
        let mut model: BTreeMap<(FileNumber, u32), Index> = BTreeMap::new();
        for _ in 0..20_000 {
            let (file, page) = (random(3), random(600));
            let first = random(1 << 20);
            for step in 0..=random(20) {
                let place = (random(8) > 0).then_some(first + step);
                let before = places.set(file, page + step, place);
                let expected = match place {
                    Some(at) => model.insert((file, page + step), at),
                    None => model.remove(&(file, page + step)),
                };
                assert_eq!(before, expected);
            }
        }
        for file in 0..3 {
            let mut pieces: Vec<u32> = Vec::new();
            for page in 0..700 {
                let expected = model.get(&(file, page)).copied();
                assert_eq!(places.get(file, page), expected);
                if expected.is_some() && pieces.last() != Some(&(page / PIECE)) {
                    pieces.push(page / PIECE);
                }
                let piece = places.piece(file, page / PIECE);
                let place = piece.map_or(0, |piece| piece[(page % PIECE) as usize]);
                assert_eq!(place.checked_sub(1), expected);
            }
            assert_eq!(places.pieces(file, 0..u32::MAX), pieces);
            let (from, to) = (100, 300);
            let runs = places.runs_in(file, from..to);
            let runs =
                runs.flat_map(|run| (0..run.pages).map(move |n| (run.at + n, run.value + n)));
            let wanted = (from..to).filter_map(|page| Some((page, model.get(&(file, page))? + 1)));
            assert!(runs.eq(wanted));
            let ranges = places.ranges(file);
            assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
            let cached = model.keys().filter(|key| key.0 == file).map(|key| key.1);
            assert!(ranges.into_iter().flatten().eq(cached));
            pieces.retain(|piece| (from / PIECE..=(to - 1) / PIECE).contains(piece));
            assert_eq!(places.pieces(file, from..to), pieces);
        }
        assert!(places.len() <= 30);
        let keys: Vec<_> = model.keys().copied().collect();
        for (file, page) in keys {
            assert!(places.set(file, page, None).is_some());
        }
        assert_eq!(places.len(), 0);
    }
}

//! Table of the fold engine: which page of a VM's RAM caches each page of the guest's files.

use std::collections::BTreeMap;
use std::ops::Range;

use memfold_wire::agent::FileNumber;

use super::numbering::Index;
use super::packed::{PACKED_PAGES, Run, Unpacked, packed_bytes, packed_value, unpack};

/// Number of consecutive pages of a file in a *piece*, the unit in which the engine matches files
/// of VMs. A word of a bit set has as many bits.
pub const PIECE: u32 = 64;

/// One number for each of the 64 pages of a piece. Each number is stored plus one; 0 means that the
/// page has no number.
pub type Piece = [u32; PIECE as usize];

/// File, and number of a packed piece of it.
type Key = (FileNumber, u32);

/// Memory of the table for each packed piece besides its bytes: its entry in the tree, whose nodes
/// are filled to two thirds on average.
const ENTRY_BYTES: usize = (size_of::<Key>() + size_of::<Box<[u8]>>()) * 3 / 2;

/// For each page of a file, the guest page that caches it, plus one; 0 for none.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// Packed pieces. That of `open` is out of date.
    pieces: BTreeMap<Key, Box<[u8]>>,
    /// The piece that was changed last.
    open: Option<(Key, Unpacked<u32>)>,
}

impl Places {
    /// Returns whether the table may get an entry for page `page` of `file`: its piece of
    /// [`PACKED_PAGES`] pages has entries already, or at most `most` pieces have.
    pub fn has_room_for(&self, file: FileNumber, page: u32, most: u64) -> bool {
        self.pieces.len() as u64 <= most || self.pieces.contains_key(&(file, page / PACKED_PAGES))
    }

    fn open(&self, key: Key) -> Option<&Unpacked<u32>> {
        let open = self.open.as_ref().filter(|(open, _)| *open == key);
        open.map(|(_, entries)| entries)
    }

    pub fn get(&self, file: FileNumber, page: u32) -> Option<Index> {
        let (key, within) = ((file, page / PACKED_PAGES), page % PACKED_PAGES);
        let place = match self.open(key) {
            Some(entries) => entries.get(within),
            None => packed_value(self.pieces.get(&key)?, within),
        };
        place.checked_sub(1)
    }

    /// Sets the guest page that caches a page of a file, and returns the one before.
    pub fn set(&mut self, file: FileNumber, page: u32, place: Option<Index>) -> Option<Index> {
        let key = (file, page / PACKED_PAGES);
        if self.open(key).is_none() {
            if place.is_none() && !self.pieces.contains_key(&key) {
                return None;
            }
            self.close();
            let entries = Unpacked::new(self.pieces.entry(key).or_default());
            self.open = Some((key, entries));
        }
        let (_, entries) = self.open.as_mut()?;
        let before = entries.set(page % PACKED_PAGES, place.map_or(0, |at| at + 1));
        before.checked_sub(1)
    }

    /// Packs the piece that was changed last.
    pub fn close(&mut self) {
        if let Some((key, entries)) = self.open.take() {
            let bytes = entries.pack();
            if bytes.is_empty() {
                self.pieces.remove(&key);
            } else {
                self.pieces.insert(key, bytes.into());
            }
        }
    }

    /// Returns the runs of a piece; indexes are relative to the piece.
    fn runs(&self, key: Key) -> impl Iterator<Item = Run<u32>> + '_ {
        let open = self.open(key);
        let packed = self.pieces.get(&key).filter(|_| open.is_none());
        let packed = packed.into_iter().flat_map(|bytes| unpack(bytes));
        packed.chain(open.into_iter().flat_map(Unpacked::runs))
    }

    /// Returns the guest pages, each plus one, that cache the 64 pages of piece `piece` of `file`;
    /// `None` if no page of it is cached.
    pub fn piece(&self, file: FileNumber, piece: u32) -> Option<Piece> {
        let first = piece * PIECE % PACKED_PAGES;
        let (mut places, mut any) = ([0; PIECE as usize], false);
        for run in self.runs((file, piece * PIECE / PACKED_PAGES)) {
            let from = run.at.max(first);
            for at in from..(run.at + run.pages).min(first + PIECE) {
                places[(at - first) as usize] = run.value + (at - run.at);
                any = true;
            }
        }
        any.then_some(places)
    }

    /// Returns all pieces of 64 pages that have cached pages: file, number of the piece, and the
    /// guest pages (each plus one) that cache its pages; ascending by file and piece.
    pub fn all(&self) -> impl Iterator<Item = (FileNumber, u32, Piece)> + '_ {
        const PARTS: usize = (PACKED_PAGES / PIECE) as usize;
        self.pieces.keys().flat_map(move |&(file, packed)| {
            let mut parts = [[0; PIECE as usize]; PARTS];
            let places = parts.as_flattened_mut();
            for run in self.runs((file, packed)) {
                let of_run = places[run.at as usize..].iter_mut().zip(run.value..);
                of_run
                    .take(run.pages as usize)
                    .for_each(|(to, place)| *to = place);
            }
            let first = packed * (PACKED_PAGES / PIECE);
            let numbered = (first..).zip(parts);
            let is_cached = |(_, part): &(u32, Piece)| part.iter().any(|place| *place != 0);
            numbered
                .filter(is_cached)
                .map(move |(piece, part)| (file, piece, part))
        })
    }

    /// Returns the numbers of the pieces (64 pages each) in a range of pages of `file` that have
    /// cached pages, in ascending order.
    pub fn pieces(&self, file: FileNumber, pages: Range<u32>) -> Vec<u32> {
        let mut found = Vec::new();
        if pages.is_empty() {
            return found;
        }
        let keys = (file, pages.start / PACKED_PAGES)..=(file, (pages.end - 1) / PACKED_PAGES);
        let wanted = pages.start / PIECE..=(pages.end - 1) / PIECE;
        for (&key, _) in self.pieces.range(keys) {
            for run in self.runs(key) {
                let first = key.1 * PACKED_PAGES + run.at;
                for piece in first / PIECE..=(first + (run.pages - 1)) / PIECE {
                    if wanted.contains(&piece) && found.last() != Some(&piece) {
                        found.push(piece);
                    }
                }
            }
        }
        found
    }

    /// Returns the memory use of the table in bytes.
    pub fn own_bytes(&self) -> usize {
        let bytes = self
            .pieces
            .values()
            .map(|bytes| ENTRY_BYTES + packed_bytes(bytes));
        bytes.sum::<usize>() + PACKED_PAGES as usize * 4
    }
}

#[cfg(test)]
impl Places {
    /// Returns the number of pieces of [`PACKED_PAGES`] pages that have entries.
    pub fn len(&mut self) -> usize {
        self.close();
        self.pieces.len()
    }
}

#[cfg(test)]
mod tests {
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
                let listed = places
                    .all()
                    .find(|(f, n, _)| (*f, *n) == (file, page / PIECE));
                assert_eq!(listed.map(|(_, _, piece)| piece), piece);
                let place = piece.map_or(0, |piece| piece[(page % PIECE) as usize]);
                assert_eq!(place.checked_sub(1), expected);
            }
            assert_eq!(places.pieces(file, 0..u32::MAX), pieces);
            let (from, to) = (100, 300);
            pieces.retain(|piece| (from / PIECE..=(to - 1) / PIECE).contains(piece));
            assert_eq!(places.pieces(file, from..to), pieces);
        }
        assert!(places.len() <= 9);
        let keys: Vec<_> = model.keys().copied().collect();
        for (file, page) in keys {
            assert!(places.set(file, page, None).is_some());
        }
        assert_eq!(places.len(), 0);
    }
}

//! A table for the fold engine, indexed by page number, in which only entries that were set use
//! memory. A copy of the table is cheap, because it shares the entries until one of the two tables
//! changes.

use std::sync::Arc;

/// Number of entries in one piece of a table.
pub(super) const PIECE_ENTRIES: u32 = 512;

type Entries<T> = [T; PIECE_ENTRIES as usize];

/// A table that is divided into pieces. Entries that were never set are `T::default()`. A copy
/// shares the pieces; when one of the two tables changes a shared piece, it first copies the piece.
#[derive(Clone, Debug)]
pub(super) struct Sparse<T> {
    pieces: Vec<Option<Arc<Entries<T>>>>,
}

impl<T: Copy + Default + PartialEq> Sparse<T> {
    pub fn new(length: u32) -> Self {
        let mut pieces = Vec::new();
        pieces.resize_with(length.div_ceil(PIECE_ENTRIES) as usize, || None);
        Self { pieces }
    }

    pub fn get(&self, at: u32) -> T {
        self.pieces
            .get((at / PIECE_ENTRIES) as usize)
            .and_then(Option::as_ref)
            .map_or_else(T::default, |p| p[(at % PIECE_ENTRIES) as usize])
    }

    pub fn set(&mut self, at: u32, value: T) {
        let Some(piece) = self.pieces.get_mut((at / PIECE_ENTRIES) as usize) else {
            return;
        };
        if piece.is_none() && value == T::default() {
            return;
        }
        let piece = piece.get_or_insert_with(|| Arc::new([T::default(); PIECE_ENTRIES as usize]));
        Arc::make_mut(piece)[(at % PIECE_ENTRIES) as usize] = value;
    }

    /// Returns whether no entry was ever set in the piece (512 entries) that contains index `at`.
    pub fn is_empty_at(&self, at: u32) -> bool {
        let piece = self.pieces.get((at / PIECE_ENTRIES) as usize);
        piece.is_none_or(Option::is_none)
    }

    /// Returns the memory use of the table in bytes.
    pub fn own_bytes(&self) -> usize {
        self.pieces.len() * 8 + self.pieces.iter().flatten().count() * size_of::<Entries<T>>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_a_sparse_table_shares_unchanged_pieces_and_is_unaffected_by_later_writes() {
        let mut table = Sparse::new(2048);
        table.set(3, 7);
        table.set(600, 8);
        let copy = table.clone();
        table.set(3, 9);
        table.set(2047, 1);
        table.set(5000, 1);
        assert_eq!([copy.get(3), copy.get(600), copy.get(2047)], [7, 8, 0]);
        assert_eq!([table.get(3), table.get(600), table.get(2047)], [9, 8, 1]);
        let shared = |at: usize| {
            let pieces = table.pieces[at].as_ref().zip(copy.pieces[at].as_ref());
            pieces.is_some_and(|(a, b)| Arc::ptr_eq(a, b))
        };
        assert_eq!([shared(0), shared(1), shared(3)], [false, true, false]);
        assert!(table.is_empty_at(1024) && !table.is_empty_at(2047) && table.is_empty_at(5000));
    }
}

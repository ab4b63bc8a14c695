//! Tables of the fold engine, indexed by page number, that use little memory where consecutive
//! pages have consecutive values. Guests read files ahead, so a run of pages of RAM usually caches
//! a run of pages of a file.
//!
//! A table is divided into pieces of [`PACKED_PAGES`] (or fewer) entries. A piece is a sequence of
//! runs:
//!
//! ```text
//!   gap | pages - 1 | value      gap | pages - 1 | value      ...
//!   |     |           |
//!   |     |           value of the run's first page, relative to the value that the run before would
//!   |     |           have there; the value of page n of the run is `value.after(n)`
//!   |     length of the run
//!   entries without a value before the run
//! ```
//!
//! Each number is a varint: 7 bits a byte, lowest first; the highest bit says that more follow. The
//! piece that was changed last is kept unpacked, because changes come in the order of pages. A
//! piece with many short runs, which takes long to pack and to read, stays unpacked until no more
//! changes come ([`Table::pack_short_runs`]).

use std::sync::Arc;

/// Number of entries in one piece of a table.
pub(super) const PACKED_PAGES: u32 = 256;

const ENTRIES: usize = PACKED_PAGES as usize;

/// Number of runs up to which a piece is packed as soon as another piece is changed. A reader
/// decodes half of a piece's runs on average.
const FEW_RUNS: usize = 32;

/// Value of a table's entry. `Self::default()` means that the entry has no value.
pub(super) trait Value: Copy + Default + PartialEq {
    /// Returns the value that an entry `pages` entries later has in the same run; `None` if a run
    /// cannot be that long.
    fn after(self, pages: u32) -> Option<Self>;
    /// Appends the value to a piece. `expected`: value that the run before would have there.
    fn write(self, expected: Self, bytes: &mut Vec<u8>);
    /// Reads what [`Value::write`] wrote.
    fn read(expected: Self, bytes: &mut Bytes<'_>) -> Self;
}

impl Value for u32 {
    fn after(self, pages: u32) -> Option<Self> {
        self.checked_add(pages)
    }

    fn write(self, expected: Self, bytes: &mut Vec<u8>) {
        write_difference(self, expected, bytes);
    }

    fn read(expected: Self, bytes: &mut Bytes<'_>) -> Self {
        bytes.difference(expected)
    }
}

/// Appends `value - expected`, modulo 2^32: small differences of either sign as small numbers.
pub(super) fn write_difference(value: u32, expected: u32, bytes: &mut Vec<u8>) {
    let difference = value.wrapping_sub(expected);
    let is_negative = difference >> 31 == 1;
    let small = if is_negative { !difference } else { difference };
    write_number(small << 1 | u32::from(is_negative), bytes);
}

pub(super) fn write_number(mut number: u32, bytes: &mut Vec<u8>) {
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
}

/// Reads a number that [`write_number`] wrote. Returns it and its length in bytes.
pub(super) fn read_number(bytes: &[u8]) -> (u32, usize) {
    // Most numbers have one byte, and tables are read very often.
    if let Some(&byte) = bytes.first().filter(|byte| **byte < 0x80) {
        return (u32::from(byte), 1);
    }
    let (mut number, mut at) = (0, 0);
    while let Some(&byte) = bytes.get(at).filter(|_| at < 5) {
        number |= u32::from(byte & 0x7f) << (7 * at);
        at += 1;
        if byte < 0x80 {
            break;
        }
    }
    (number, at)
}

/// Reads numbers that [`write_number`] wrote one after the other. Missing numbers are 0.
pub(super) fn read_numbers<const N: usize>(bytes: &[u8]) -> [u32; N] {
    let mut rest = Bytes(bytes);
    std::array::from_fn(|_| rest.number())
}

/// Rest of a piece that is being read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn number(&mut self) -> u32 {
        let (number, length) = read_number(self.0);
        self.0 = &self.0[length..];
        number
    }

    /// Reads what [`write_difference`] wrote.
    pub fn difference(&mut self, expected: u32) -> u32 {
        let number = self.number();
        expected.wrapping_add(number >> 1 ^ (number & 1).wrapping_neg())
    }
}

/// Consecutive entries whose values are consecutive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run<T> {
    /// Index of the first entry.
    pub at: u32,
    /// Number of entries, at least 1.
    pub pages: u32,
    /// Value of the first entry.
    pub value: T,
}

/// Returns the runs of a packed piece; indexes are relative to the piece.
pub(super) fn unpack<T: Value>(bytes: &[u8]) -> impl Iterator<Item = Run<T>> + use<'_, T> {
    let (mut rest, mut at, mut expected) = (Bytes(bytes), 0, T::default());
    std::iter::from_fn(move || {
        if rest.0.is_empty() {
            return None;
        }
        at += rest.number();
        let pages = rest.number() + 1;
        let value = T::read(expected, &mut rest);
        let run = Run { at, pages, value };
        at += pages;
        expected = value.after(pages).unwrap_or_default();
        Some(run)
    })
}

/// Returns the runs of an unpacked piece; indexes are relative to the piece.
fn runs_of<T: Value>(entries: &[T]) -> impl Iterator<Item = Run<T>> + '_ {
    let mut next = 0;
    std::iter::from_fn(move || {
        let at = next + entries[next..].iter().position(|e| *e != T::default())?;
        let value = entries[at];
        let follows = |&(n, entry): &(u32, &T)| Some(*entry) == value.after(n);
        let pages = (0..).zip(&entries[at..]).take_while(follows).count();
        next = at + pages;
        let number = |n: usize| u32::try_from(n).unwrap_or(PACKED_PAGES);
        Some(Run {
            at: number(at),
            pages: number(pages),
            value,
        })
    })
}

/// Packs a piece. The result is empty if no entry has a value.
fn pack<T: Value>(entries: &[T]) -> Vec<u8> {
    let (mut bytes, mut end, mut expected) = (Vec::new(), 0, T::default());
    for run in runs_of(entries) {
        write_number(run.at - end, &mut bytes);
        write_number(run.pages - 1, &mut bytes);
        run.value.write(expected, &mut bytes);
        end = run.at + run.pages;
        expected = run.value.after(run.pages).unwrap_or_default();
    }
    bytes
}

/// A piece of `N` entries that can be changed quickly.
#[derive(Clone, Debug)]
pub(super) struct Unpacked<T, const N: usize>(Box<[T; N]>);

impl<T: Value, const N: usize> Unpacked<T, N> {
    pub fn new(bytes: &[u8]) -> Self {
        let mut entries = Box::new([T::default(); N]);
        for run in unpack::<T>(bytes) {
            let of_run = entries[run.at as usize..].iter_mut().zip(0..run.pages);
            of_run.for_each(|(entry, n)| *entry = run.value.after(n).unwrap_or_default());
        }
        Self(entries)
    }

    pub fn get(&self, at: u32) -> T {
        self.0.get(at as usize).copied().unwrap_or_default()
    }

    /// Sets an entry, and returns its value before.
    pub fn set(&mut self, at: u32, value: T) -> T {
        let entry = self.0.get_mut(at as usize);
        entry.map_or_else(T::default, |entry| std::mem::replace(entry, value))
    }

    pub fn runs(&self) -> impl Iterator<Item = Run<T>> + '_ {
        runs_of(&self.0[..])
    }

    /// Returns the packed piece, which is empty if no entry has a value.
    pub fn pack(&self) -> Vec<u8> {
        pack(&self.0[..])
    }
}

/// Returns the value of entry `at` of a packed piece.
pub(super) fn packed_value<T: Value>(bytes: &[u8], at: u32) -> T {
    let mut runs = unpack::<T>(bytes).skip_while(|run| run.at + run.pages <= at);
    let found = runs.next().filter(|run| run.at <= at);
    let value = found.and_then(|run| run.value.after(at - run.at));
    value.unwrap_or_default()
}

/// A piece of a table.
#[derive(Clone, Debug)]
enum Piece<T> {
    /// No bytes if no entry has a value.
    Packed(Arc<[u8]>),
    Short(Arc<ShortRuns<T>>),
}

/// A piece with many short runs, unpacked.
#[derive(Clone, Debug)]
struct ShortRuns<T> {
    entries: [T; ENTRIES],
    /// Whether the piece was changed since the last [`Table::pack_short_runs`].
    changed: bool,
}

impl<T: Value> Piece<T> {
    /// The empty piece, which takes no memory.
    fn empty() -> Self {
        Self::Packed(Arc::default())
    }

    fn pack(entries: &[T; ENTRIES]) -> Self {
        let bytes = pack(&entries[..]);
        if bytes.is_empty() {
            return Self::empty();
        }
        Self::Packed(bytes.into())
    }
}

fn has_few_runs<T: Value>(entries: &[T; ENTRIES]) -> bool {
    runs_of(&entries[..]).nth(FEW_RUNS).is_none()
}

/// A table of `length` entries. A copy shares the pieces.
#[derive(Clone, Debug)]
pub(super) struct Table<T> {
    length: u32,
    pieces: Vec<Piece<T>>,
    /// Number of pieces of [`Piece::Short`].
    short: u32,
    /// Number and entries of the piece that was changed last.
    open: Option<(u32, Unpacked<T, ENTRIES>)>,
}

impl<T: Value> Table<T> {
    pub fn new(length: u32) -> Self {
        Self {
            length,
            pieces: vec![Piece::empty(); length.div_ceil(PACKED_PAGES) as usize],
            short: 0,
            open: None,
        }
    }

    pub fn get(&self, at: u32) -> T {
        let (piece, within) = (at / PACKED_PAGES, at % PACKED_PAGES);
        if let Some((_, entries)) = self.open.as_ref().filter(|(open, _)| *open == piece) {
            return entries.get(within);
        }
        match self.pieces.get(piece as usize) {
            Some(Piece::Packed(bytes)) => packed_value(bytes, within),
            Some(Piece::Short(piece)) => piece.entries[within as usize],
            None => T::default(),
        }
    }

    /// Sets an entry, and returns its value before. Does nothing if the table has no such entry.
    pub fn set(&mut self, at: u32, value: T) -> T {
        let (number, within) = (at / PACKED_PAGES, at % PACKED_PAGES);
        let piece = self.pieces.get_mut(number as usize);
        let is_open = self.open.as_ref().is_some_and(|(open, _)| *open == number);
        match piece.filter(|_| at < self.length) {
            None => return T::default(),
            Some(Piece::Short(piece)) => {
                let piece = Arc::make_mut(piece);
                piece.changed = true;
                return std::mem::replace(&mut piece.entries[within as usize], value);
            }
            Some(Piece::Packed(_)) if is_open => {}
            Some(Piece::Packed(bytes)) if bytes.is_empty() && value == T::default() => {
                return value;
            }
            Some(Piece::Packed(bytes)) => {
                let entries = Unpacked::new(bytes);
                self.close();
                self.open = Some((number, entries));
            }
        }
        let open = self.open.as_mut();
        open.map_or_else(T::default, |(_, entries)| entries.set(within, value))
    }

    /// Packs the piece that was changed last, unless it has many short runs.
    fn close(&mut self) {
        let Some((number, entries)) = self.open.take() else {
            return;
        };
        let piece = &mut self.pieces[number as usize];
        if has_few_runs(&entries.0) {
            *piece = Piece::pack(&entries.0);
        } else {
            self.short += 1;
            *piece = Piece::Short(Arc::new(ShortRuns {
                entries: *entries.0,
                changed: true,
            }));
        }
    }

    /// Packs the pieces with many short runs that were not changed since the last call, and those
    /// that have few runs by now. `all`: also the others.
    pub fn pack_short_runs(&mut self, all: bool) {
        if self.short == 0 {
            return;
        }
        for place in &mut self.pieces {
            let Piece::Short(piece) = place else {
                continue;
            };
            if !all && piece.changed && !has_few_runs(&piece.entries) {
                Arc::make_mut(piece).changed = false;
            } else {
                *place = Piece::pack(&piece.entries);
                self.short -= 1;
            }
        }
    }

    /// Returns whether pieces with many short runs are unpacked.
    pub const fn has_unpacked(&self) -> bool {
        self.short > 0
    }

    /// Returns all runs, in ascending order. No run reaches beyond a piece.
    pub fn runs(&self) -> impl Iterator<Item = Run<T>> + '_ {
        (0..).zip(&self.pieces).flat_map(move |(number, piece)| {
            let open = self.open.as_ref().filter(|(open, _)| *open == number);
            let (packed, short) = match piece {
                Piece::Packed(bytes) => (Some(&bytes[..]).filter(|_| open.is_none()), None),
                Piece::Short(piece) => (None, Some(&piece.entries[..])),
            };
            let packed = packed.into_iter().flat_map(unpack::<T>);
            let short = short.into_iter().flat_map(runs_of::<T>);
            let open = open.into_iter().flat_map(|(_, entries)| entries.runs());
            packed.chain(short).chain(open).map(move |run| Run {
                at: number * PACKED_PAGES + run.at,
                ..run
            })
        })
    }

    /// Returns the memory use of the table in bytes.
    pub fn own_bytes(&self) -> usize {
        let of_piece = |piece: &Piece<T>| match piece {
            Piece::Packed(bytes) if bytes.is_empty() => 0,
            Piece::Packed(bytes) => packed_bytes(bytes),
            Piece::Short(_) => size_of::<ShortRuns<T>>() + 2 * size_of::<usize>(),
        };
        let open = self.open.as_ref().map_or(0, |_| size_of::<[T; ENTRIES]>());
        self.pieces.len() * size_of::<Piece<T>>()
            + self.pieces.iter().map(of_piece).sum::<usize>()
            + open
    }
}

/// Returns the memory use of a packed piece in bytes, with its two reference counts.
pub(super) const fn packed_bytes(bytes: &[u8]) -> usize {
    bytes.len() + 2 * size_of::<usize>()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns numbers that look random, the same in each run.
    pub fn numbers() -> impl FnMut(u32) -> u32 {
        let mut state = 7_u64;
        move |below| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            u32::try_from((state >> 33) % u64::from(below)).unwrap()
        }
    }

    #[test]
    fn a_packed_table_agrees_with_an_array_after_random_changes_and_so_does_its_copy() {
        let mut random = numbers();
        let (mut table, mut model) = (Table::new(2000), vec![0_u32; 2000]);
        let mut copy = (table.clone(), model.clone());
        let mut were_short = Vec::new();
        for round in 0..30_000 {
            // First long runs, then short ones, then long ones again.
            let longest = if (10_000..20_000).contains(&round) {
                3
            } else {
                200
            };
            if round % 1000 == 0 {
                table.pack_short_runs(false);
            }
            if round % 10_000 == 9_999 {
                were_short.push(table.has_unpacked());
            }
            let (at, value) = (random(2000), random(u32::MAX));
            for step in 0..random(longest) {
                let value = if random(longest) == 0 {
                    0
                } else {
                    value.wrapping_add(step)
                };
                table.set(at + step, value);
                if let Some(entry) = model.get_mut((at + step) as usize) {
                    *entry = value;
                }
            }
            if round == 15_000 {
                copy = (table.clone(), model.clone());
            }
        }
        for (table, model) in [(&table, &model), (&copy.0, &copy.1)] {
            assert!((0..2000).all(|at| table.get(at) == model[at as usize]));
            let mut listed = vec![0; 2000];
            for run in table.runs() {
                for step in 0..run.pages {
                    listed[(run.at + step) as usize] = run.value + step;
                }
            }
            assert_eq!(&listed, model);
        }
        assert_eq!((table.get(2000), table.get(u32::MAX)), (0, 0));
        assert_eq!(were_short, [false, true, false]);
        assert_eq!(size_of::<Piece<u32>>(), size_of::<Arc<[u8]>>());
    }

    #[test]
    fn a_run_of_a_packed_table_takes_a_few_bytes_and_a_table_without_values_takes_none() {
        let mut table = Table::new(1024);
        let empty = table.own_bytes();
        for at in 0..200 {
            table.set(at, 5_000_000 + at);
        }
        // Another piece is changed, so the first one is packed.
        table.set(1000, 1);
        table.set(1000, 0);
        let open = size_of::<[u32; ENTRIES]>();
        assert!(
            table.own_bytes() <= empty + open + 16 + 8,
            "{}",
            table.own_bytes()
        );
        for at in 0..200 {
            table.set(at, 0);
        }
        table.close();
        assert_eq!(table.own_bytes(), empty);
    }

    #[test]
    fn numbers_of_any_size_and_sign_are_packed_and_read_back() {
        let edges = [
            0,
            1,
            63,
            64,
            127,
            128,
            1 << 14,
            1 << 31,
            (1 << 31) - 1,
            u32::MAX - 1,
            u32::MAX,
        ];
        for (value, expected) in edges.iter().flat_map(|&v| edges.map(|e| (v, e))) {
            let mut bytes = Vec::new();
            write_difference(value, expected, &mut bytes);
            let mut rest = Bytes(&bytes);
            assert_eq!(rest.difference(expected), value);
            assert!(rest.0.is_empty());
        }
    }
}

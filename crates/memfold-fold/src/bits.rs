//! Sets of a VM's guest pages for the fold engine, such as the pages that the guest has written.

use std::ops::Range;

use super::numbering::Index;

/// Number of words of 64 pages that are stored together.
const WORDS: usize = 64;

/// 4,096 consecutive pages. Where all of them are in the set, or none is, no word is stored.
#[derive(Clone, Debug)]
enum Part {
    All(bool),
    Some(Box<[u64; WORDS]>),
}

/// A set of guest pages.
#[derive(Clone, Debug)]
pub(super) struct Bits {
    parts: Vec<Part>,
    words: usize,
}

impl Bits {
    /// Returns an empty set of pages below `length`.
    pub fn new(length: u32) -> Self {
        let words = length.div_ceil(64) as usize;
        Self {
            parts: vec![Part::All(false); words.div_ceil(WORDS)],
            words,
        }
    }

    /// Returns a set of pages below `length`: those in the ranges `set`.
    pub fn of(length: u32, set: impl Iterator<Item = Range<Index>>) -> Self {
        let mut bits = Self::new(length);
        set.flatten().for_each(|at| bits.set(at, true));
        bits
    }

    pub fn has(&self, at: Index) -> bool {
        self.word(at as usize / 64) >> (at % 64) & 1 == 1
    }

    pub fn set(&mut self, at: Index, value: bool) {
        let (number, bit) = (at as usize / 64, 1 << (at % 64));
        let word = self.word(number);
        let new = if value { word | bit } else { word & !bit };
        if new != word {
            self.set_word(number, new);
        }
    }

    /// Returns which of the 64 pages from page `64 * number` on are in the set. Pages beyond the
    /// end are in no set.
    pub fn word(&self, number: usize) -> u64 {
        if number >= self.words {
            return 0;
        }
        match &self.parts[number / WORDS] {
            Part::All(true) => u64::MAX,
            Part::All(false) => 0,
            Part::Some(words) => words[number % WORDS],
        }
    }

    /// Sets which of the 64 pages from page `64 * number` on are in the set. Pages beyond the end
    /// are ignored.
    pub fn set_word(&mut self, number: usize, word: u64) {
        if number >= self.words || self.word(number) == word {
            return;
        }
        let part = &mut self.parts[number / WORDS];
        if let Part::All(all) = part {
            *part = Part::Some(Box::new([if *all { u64::MAX } else { 0 }; WORDS]));
        }
        let Part::Some(words) = part else { return };
        words[number % WORDS] = word;
        let is_uniform = matches!(word, 0 | u64::MAX) && words.iter().all(|&other| other == word);
        if is_uniform {
            *part = Part::All(word == u64::MAX);
        }
    }

    /// Returns all words, in order.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.words).map(|number| self.word(number))
    }

    /// Returns the memory use of the set in bytes.
    pub fn own_bytes(&self) -> usize {
        let stored = |part: &&Part| matches!(part, Part::Some(_));
        self.parts.len() * size_of::<Part>() + self.parts.iter().filter(stored).count() * WORDS * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_pages_stores_no_words_where_all_pages_or_no_pages_are_in_it() {
        let mut bits = Bits::new(10_000);
        let empty = bits.own_bytes();
        (4096..8192).for_each(|at| bits.set(at, true));
        assert!((4096..8192).all(|at| bits.has(at)) && !bits.has(4095) && !bits.has(8192));
        assert_eq!(bits.own_bytes(), empty);
        bits.set(5000, false);
        assert!(!bits.has(5000) && bits.has(4999) && bits.own_bytes() > empty);
        bits.set(5000, true);
        assert_eq!(bits.own_bytes(), empty);
    }

    #[test]
    fn pages_beyond_the_end_of_ram_are_in_no_set_of_pages() {
        let mut bits = Bits::new(100);
        bits.set(99, true);
        bits.set(128, true);
        bits.set_word(2, u64::MAX);
        assert!(bits.has(99) && !bits.has(128));
        assert_eq!(bits.words().collect::<Vec<_>>(), [0, 1 << 35]);
    }
}

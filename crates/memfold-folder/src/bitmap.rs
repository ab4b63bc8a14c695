//! A bitmap with one bit for each page of a RAM block of QEMU, for example to mark folded pages.

/// Bitmap with a fixed number of bits, all clear at first. Bits beyond the end read as clear and
/// cannot be set.
#[derive(Debug, Clone)]
pub struct Bitmap {
    words: Vec<u64>,
    len: u64,
    set: u64,
}

impl Bitmap {
    /// Creates a bitmap of `len` clear bits.
    #[must_use]
    pub fn new(len: u64) -> Self {
        let words = usize::try_from(len.div_ceil(64)).unwrap_or(0);
        Self {
            words: vec![0; words],
            len,
            set: 0,
        }
    }

    /// Returns the number of set bits.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.set
    }

    /// Returns whether bit `index` is set.
    #[must_use]
    pub fn get(&self, index: u64) -> bool {
        self.word(index / 64) >> (index % 64) & 1 == 1
    }

    fn word(&self, number: u64) -> u64 {
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        self.words.get(number).copied().unwrap_or(0)
    }

    /// Sets `count` bits from bit `first` on to `value`.
    pub fn fill(&mut self, first: u64, count: u64, value: bool) {
        let end = first.saturating_add(count).min(self.len);
        let mut at = first;
        while at < end {
            let bits = (64 - at % 64).min(end - at);
            let mask = (u64::MAX >> (64 - bits)) << (at % 64);
            let number = usize::try_from(at / 64).unwrap_or(usize::MAX);
            if let Some(word) = self.words.get_mut(number) {
                self.set -= u64::from((*word & mask).count_ones());
                *word = if value { *word | mask } else { *word & !mask };
                self.set += u64::from((*word & mask).count_ones());
            }
            at += bits;
        }
    }

    /// Returns the index of the first bit in `from..to` that equals `value`; `to` if no bit does.
    #[must_use]
    pub fn find(&self, value: bool, from: u64, to: u64) -> u64 {
        let mut at = from;
        while at < to {
            let word = self.word(at / 64);
            let wanted = if value { word } else { !word } >> (at % 64);
            if wanted != 0 {
                return (at + u64::from(wanted.trailing_zeros())).min(to);
            }
            at += 64 - at % 64;
        }
        to
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn after_arbitrary_fills_a_bitmap_equals_an_array_of_booleans(
            len in 1u64..400,
            fills in proptest::collection::vec((0u64..420, 0u64..200, any::<bool>()), 0..40),
            from in 0u64..400, to in 0u64..400,
        ) {
            let mut model = vec![false; usize::try_from(len).unwrap()];
            let mut map = Bitmap::new(len);
            for (first, count, value) in fills {
                map.fill(first, count, value);
                for (i, bit) in model.iter_mut().enumerate() {
                    if (first..first + count).contains(&(i as u64)) { *bit = value; }
                }
            }
            for (i, bit) in model.iter().enumerate() {
                prop_assert_eq!(map.get(i as u64), *bit);
            }
            prop_assert_eq!(map.count(), model.iter().filter(|b| **b).count() as u64);
            let to = to.min(len);
            for value in [true, false] {
                let expected = (from..to)
                    .find(|i| model[usize::try_from(*i).unwrap()] == value)
                    .unwrap_or(to);
                prop_assert_eq!(map.find(value, from, to.max(from)), expected.max(from.min(to.max(from))));
            }
        }
    }
}

//! Random numbers that a test can draw again, from the number that it prints.

use xxhash_rust::xxh3::xxh3_64_with_seed;

#[derive(Clone, Debug)]
pub struct Random {
    seed: u64,
    drawn: u64,
}

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self { seed, drawn: 0 }
    }

    /// Returns a number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        self.drawn += 1;
        let drawn = xxh3_64_with_seed(&self.drawn.to_le_bytes(), self.seed);
        usize::try_from(drawn % end as u64).unwrap()
    }
}

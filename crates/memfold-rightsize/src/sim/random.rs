//! A small generator of random numbers, so that a seed means the same host on every machine.

/// `SplitMix64` (Steele, Lea, Flood, OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator. Equal seeds give equal numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number of the sequence, any value of 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number from `low` to `high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        let share = (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        low + (high - low) * share
    }

    /// Says yes with a probability of `share`.
    pub fn chance(&mut self, share: f64) -> bool {
        self.between(0.0, 1.0) < share
    }

    /// Chooses one of `choices`, which must not be empty.
    pub fn choose<T: Copy>(&mut self, choices: &[T]) -> T {
        let index = self.next_u64() % choices.len() as u64;
        choices[usize::try_from(index).unwrap_or(0)]
    }
}

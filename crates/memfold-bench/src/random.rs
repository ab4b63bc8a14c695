//! Generates pseudorandom test data for studies. The numbers are the same in each run.

use std::io::{self, BufWriter, Write};

/// Generator of pseudorandom numbers (xorshift64, Marsaglia).
#[derive(Debug)]
pub struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self(0x9E37_79B9_7F4A_7C15)
    }
}

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next pseudorandom number, which is not 0. No number occurs twice.
    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Writes `bytes` pseudorandom bytes, rounded down to a multiple of 8. No two pages of them are
    /// equal, and they cannot be compressed.
    pub fn write(&mut self, bytes: u64, into: impl Write) -> io::Result<()> {
        let mut into = BufWriter::with_capacity(1 << 20, into);
        for _ in 0..bytes / 8 {
            into.write_all(&self.number().to_ne_bytes())?;
        }
        into.flush()
    }

    /// Returns a pseudorandom number from 0 to `end - 1`.
    pub fn below(&mut self, end: u64) -> u64 {
        (self.number() >> 3) % end
    }
}

//! Pseudorandom numbers, the same in each run.

use std::io::{self, BufWriter, Write};

/// A generator (xorshift64, Marsaglia).
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

    /// Returns a number that is not 0. No number occurs twice.
    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Writes `bytes` bytes. No page of them repeats, and nothing compresses.
    pub fn write(&mut self, bytes: u64, into: impl Write) -> io::Result<()> {
        let mut into = BufWriter::with_capacity(1 << 20, into);
        for _ in 0..bytes / 8 {
            into.write_all(&self.number().to_ne_bytes())?;
        }
        into.flush()
    }

    /// Returns a number from 0 to `end - 1`.
    pub fn below(&mut self, end: u64) -> u64 {
        (self.number() >> 3) % end
    }
}

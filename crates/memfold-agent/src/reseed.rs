//! New random numbers for a guest that was restored: others may run from the same memory.
//!
//! Source: `random(4)`. What is written to `/dev/urandom` is mixed into the pool, which stays
//! secret; it only has to differ.

use std::fs::File;
use std::io::{self, Read, Write};

/// Bytes that are mixed in at most.
const MOST: u64 = 4096;

/// Mixes `seed` in, and begins the kernel's random numbers anew.
pub fn reseed(seed: &mut impl Read) -> io::Result<()> {
    let mut bytes = Vec::new();
    seed.take(MOST).read_to_end(&mut bytes)?;
    let mut random = File::options().write(true).open("/dev/urandom")?;
    random.write_all(&bytes)?;
    memfold_sys::guest::reseed_random(&random)
}

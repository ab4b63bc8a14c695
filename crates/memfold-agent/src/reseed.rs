//! Reseeds the kernel's random number generator. A restored guest needs this, because other VMs may
//! run from the same snapshot with the same state of the generator.
//!
//! Source: `random(4)`. Bytes written to `/dev/urandom` are mixed into the kernel's pool. The bytes
//! need not be secret, only different for each VM.

use std::fs::File;
use std::io::{self, Read, Write};

/// Most bytes that are mixed in.
const MOST: u64 = 4096;

/// Mixes up to 4,096 bytes of `seed` into the kernel's pool, and reseeds the kernel's random number
/// generator.
pub fn reseed(seed: &mut impl Read) -> io::Result<()> {
    let mut bytes = Vec::new();
    seed.take(MOST).read_to_end(&mut bytes)?;
    let mut random = File::options().write(true).open("/dev/urandom")?;
    random.write_all(&bytes)?;
    memfold_sys::guest::reseed_random(&random)
}

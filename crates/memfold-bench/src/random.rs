//! Generates pseudo-random words: no page repeats, and the data does not compress.

/// Passes `words` pseudo-random words to `each`. No word occurs twice.
pub fn random(words: u64, mut each: impl FnMut(u64) -> std::io::Result<()>) -> std::io::Result<()> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for _ in 0..words {
        // The generator is xorshift (Marsaglia).
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        each(state)?;
    }
    Ok(())
}

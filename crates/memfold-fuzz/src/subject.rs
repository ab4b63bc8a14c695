//! A fuzz target: a parser with its valid inputs.

/// A fuzz target: one parser under test.
#[derive(Clone, Copy, Debug)]
pub struct Subject {
    /// Name of the target; `fuzz/fuzz_targets` has one file for each.
    pub name: &'static str,
    /// Parses the bytes and asserts the parser's promises. Returns a number that identifies the
    /// kind of result, so that inputs with a new kind can be kept.
    pub run: fn(&[u8]) -> u64,
    /// Valid inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// `data` cut at its NUL bytes into `N` parts; parts that are missing are empty, the last takes the
/// rest.
pub(crate) fn parts<const N: usize>(data: &[u8]) -> [&[u8]; N] {
    let mut pieces = data.splitn(N, |b| *b == 0);
    std::array::from_fn(|_| pieces.next().unwrap_or_default())
}

//! Defines a fuzz target: a parser of memfold, together with valid inputs that fuzzing begins with.

/// A fuzz target: one parser under test.
#[derive(Clone, Copy, Debug)]
pub struct Subject {
    /// Name of the fuzz target; `fuzz/fuzz_targets` has one file for each target.
    pub name: &'static str,
    /// Function that parses the bytes and asserts the parser's promises. It returns a number that
    /// identifies the kind of result, so that inputs with a new kind of result can be kept.
    pub run: fn(&[u8]) -> u64,
    /// Function that returns valid inputs of the parser.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Code that the parser consists of, for `scripts/fuzz-coverage`: a file below `crates`, or
    /// `FILE:NAME,NAME,...` (functions, and types for their `impl` blocks) if the file has other
    /// code as well.
    pub parser: &'static [&'static str],
}

/// Cuts `data` at its NUL bytes into `N` parts. Missing parts are empty, and the last part takes
/// the rest.
pub(crate) fn parts<const N: usize>(data: &[u8]) -> [&[u8]; N] {
    let mut pieces = data.splitn(N, |b| *b == 0);
    std::array::from_fn(|_| pieces.next().unwrap_or_default())
}

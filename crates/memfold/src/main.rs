//! The `memfold` program.

fn main() {}

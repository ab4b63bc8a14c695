//! The command line of the program `memfold`, as a library: the program and its tests use it.

pub mod cli;

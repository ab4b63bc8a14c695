//! The memfold program: its command line.

pub mod cli;

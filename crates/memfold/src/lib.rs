//! The program: the command line.

pub mod cli;

//! The program: command line and studies.

pub mod bench;
pub mod cli;

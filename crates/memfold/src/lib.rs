//! Library of the program `memfold`: its command line.

pub mod cli;

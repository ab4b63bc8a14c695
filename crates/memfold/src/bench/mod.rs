//! The studies: one file each, JSON out, figures out.

pub mod fold;

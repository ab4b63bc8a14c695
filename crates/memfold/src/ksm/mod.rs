//! The kernel's own merging.

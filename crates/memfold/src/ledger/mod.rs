//! The account of physical bytes: every page counted once.

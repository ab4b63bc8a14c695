//! Tests that take minutes: `make soak` runs them.

mod network_faults;

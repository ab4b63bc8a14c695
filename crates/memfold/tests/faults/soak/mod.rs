//! Faults that take minutes: `make soak` injects them.

mod clocks;
mod layers;
mod lending;
mod memory;
mod stores;

//! Guests for tests and studies.
//!
//! [`Lab`] is a daemon of this process with VMs of its own, gone without a trace when it is dropped
//! or interrupted. [`Warm`] brings guests in a second: one of each shape boots, and later ones
//! begin where it stood.

mod lab;
mod warm;

pub use lab::{DiskMode, Lab, undo_at_interrupt};
pub use warm::{GUESTS_VARIABLE, WARM_VARIABLE, Warm};

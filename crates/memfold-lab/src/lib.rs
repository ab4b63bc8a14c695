//! Guests for tests and studies.
//!
//! [`Lab`] is a daemon within this process with its own VMs. When the lab is dropped or
//! interrupted, its VMs end and their files are removed. [`Warm`] starts guests in a second: of
//! guests with the same hardware, only the first one boots, and the others are restored from its
//! state after the boot.

mod http_store;
mod lab;
mod wait;
mod warm;

pub use http_store::{HttpStore, StoreMode};
pub use lab::{
    DiskMode, Lab, SNAPSHOT_KEY, at_once, clean_up_at_interrupt, guest_image, undo_at_interrupt,
};
pub use wait::{migrate, wait_for, wait_for_migration};
pub use warm::{GUESTS_VARIABLE, WARM_VARIABLE, Warm};

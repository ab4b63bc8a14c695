//! Snapshots: a VM's memory, devices and disks at one instant. A snapshot can be restored as the
//! saved VM, or run as any number of clones. The drawing names the modules of each operation in
//! parentheses.
//!
//! ```text
//!   save     guest drops caches, lists free pages -> stop -> device state, RAM image, disks frozen -> resume -> manifest (save)
//!            --keep hot: pages that the disks contain are kept by reference (candidates, refer); --compress: (pack)
//!   restore  QEMU -incoming; library maps the RAM image, and pages from the disks over it; device state -> cont     (restore)
//!   clone    a restore under another name; pages that a clone writes are private, and it gets new identities      (identity)
//! ```

mod beside;
mod block_job;
mod built_on;
mod candidates;
mod chain_check;
pub mod clock;
pub mod compact;
mod compare;
mod copy_budget;
pub mod cpu;
mod disk_chain;
mod disk_copy;
pub mod draft;
pub mod encryption;
mod error;
#[cfg(test)]
mod fake_monitor;
pub mod fetched_disks;
mod file_facts;
pub mod free;
mod freeze;
pub mod guest_extents;
mod hardware;
mod host_cache;
mod host_memory;
pub mod identity;
pub mod image;
pub mod keys;
mod links;
pub mod manifest;
mod merge_overlays;
mod own_disks;
mod own_overlay;
pub mod pack;
mod page_copies;
mod parent;
mod parts;
pub mod past;
pub mod pipeline;
pub mod plan;
pub mod portable;
mod ranges;
mod rebase;
pub mod refer;
pub mod rekey;
mod request;
pub mod restore;
mod room;
pub mod save;
mod saved_disks;
pub mod shelf;
mod sparse_copy;
mod still;
pub mod stored;
mod subject;
mod users;
pub mod working_set;
pub mod writer;
mod written_files;

pub use candidates::{Candidate, FEWEST_PAGES};
pub use clock::ClockStep;
pub use draft::Draft;
pub use error::SnapshotError;
pub use host_cache::cached_part;
pub use identity::{Renew, Renewal};
pub use keys::{KeyError, Keys, NamedKey};
pub use manifest::{Keep, Manifest, SnapshotInfo};
pub use memfold_host::progress::{Progress, Step};
pub use parent::Parent;
pub use room::free_above_reserve;
pub use shelf::{DEFAULT_SHELF, Shelf};

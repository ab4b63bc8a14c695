//! Folding replaces file pages that are equal in several VMs by one shared copy in a page store.
//! Guest agents send hints: which file page each guest page caches. This crate finds pages that
//! several VMs cache, copies them into the store, and orders memfold's library in each QEMU to map
//! the copy.
//!
//! The drawing follows a hint from left to right. The tables about a VM are corrected by the
//! results of orders and by the kernel's page tables.
//!
//! ```text
//!   agents         +----------+  settle   +------------+  newest   +---------+  longest  +-----------+
//!   --- hints ---> | VmTable  | --------> | HintStack  | --------> | match   | --------> | orders to |
//!   (per VM)       | pfn<->   |  1 s      | bounded,   |  first    | by      |  run      | libraries |
//!                  | file,page|           | one a VM   |           | Content |  first    +-----+-----+
//!                  +----------+           +------------+           +----+----+                 |
//!        ^                                                              | fill                 | outcomes
//!        |  sync: /proc/PID/maps, pagemap: mappings, and pages that     v                      |
//!        |  the guest has copied (from the kernel)                 page store <----------------+
//!        +---------------------------------------------------------------- reclaim: punch pages that no VM needs
//! ```
//!
//! One thread ([`Engine`]) owns all tables, so there are no locks. The thread works within a CPU
//! budget, which also covers the CPU time of memfold's libraries in QEMU. It sleeps when no work is
//! due.
//!
//! An error in these tables costs only time, and no guest ever gets wrong bytes. The library
//! freezes the guest's pages and compares their bytes with the copy before it maps the copy, and a
//! page of the store never changes.

mod alias;
mod batch;
mod bits;
mod budget;
mod cached_pages;
mod candidates;
mod command;
mod content;
mod debt;
mod domain;
mod due;
mod engine;
mod file_uses;
mod files;
mod fold_back;
mod fold_back_pass;
mod fold_onto;
mod guest;
mod hint_stack;
mod holders;
mod huge;
mod image;
mod intake;
mod matches;
mod member;
mod needed;
mod numbering;
mod outcome;
mod packed;
mod packed_map;
mod pause;
mod places;
mod qemu_guest;
#[cfg(test)]
mod random_changes;
mod reclaim;
mod report;
mod reuse;
mod runs;
mod schedule;
mod settings;
mod state;
mod stats;
mod task;
mod time_queue;
mod vm_map;
mod vm_table;
mod vms;
mod zero_pages;
mod zero_pass;

pub use budget::shortest_run;
pub use cached_pages::{CachedPages, PageRun};
pub use command::Command;
pub use debt::{Owed, VmOwed};
pub use file_uses::{CachedFiles, FileUse};
pub use fold_onto::FoldedOnto;
pub use guest::{Guest, GuestError, Refold, VmId};
pub use huge::HUGE_SPLIT_PAGES;
pub use qemu_guest::{LibraryState, NO_LIBRARY, QemuGuest, SharedLibraryState, Unfolded};
pub use settings::EngineSettings;
pub use state::Engine;
pub use stats::{DomainStats, EngineStats, VmStats};

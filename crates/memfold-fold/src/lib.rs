//! Folding: from what guests say of their page caches to orders for the libraries in their QEMUs.
//!
//! ```text
//!   agents         +----------+  settle   +------------+  newest   +---------+  longest  +-----------+
//!   --- hints ---> | VmTable  | --------> | HintStack  | --------> | match   | --------> | orders to |
//!   (per VM)       | pfn<->   |  1 s      | bounded,   |  first    | by      |  run      | libraries |
//!                  | file,page|           | one a VM   |           | Content |  first    +-----+-----+
//!                  +----------+           +------------+           +----+----+                 |
//!        ^                                                              | fill                 | outcomes
//!        |  sync: /proc/PID/maps, pagemap: what is mapped, what was     v                      |
//!        |  copied since (the kernel's truth)                      page store <----------------+
//!        +---------------------------------------------------------------- reclaim: punch what no VM can need
//! ```
//!
//! One thread ([`Engine`]) owns all of it, so nothing here is locked. It spends CPU only from a [`budget`], counts the
//! library threads' CPU as its own, and waits without a timeout when there is nothing to do.
//!
//! What makes it right is elsewhere: the library compares frozen bytes (DESIGN rule 1), and the store never changes a
//! page (rule 2). Everything here may be wrong about a guest and costs only time.

mod alias;
mod back;
pub mod budget;
mod content;
mod debt;
mod engine;
mod guest;
mod huge;
mod intake;
mod outcome;
mod pause;
mod reclaim;
mod report;
mod reuse;
mod runs;
mod stack;
pub mod stats;
mod table;
mod uses;
mod vms;
mod work;
mod zero;

pub use debt::{Owed, VmOwed};
pub use engine::{Command, Engine, EngineSettings};
pub use guest::{Guest, GuestError};
pub use huge::HUGE_SPLIT_PAGES;
pub use stats::{DomainStats, EngineStats, VmStats};
pub use uses::{CachedFiles, CachedRun, FileUse};

/// The daemon's number for a VM; never used twice while a daemon lives.
pub type VmId = u32;

//! The account of physical bytes: every page counted once.
//!
//! ```text
//!   guest RAM of one VM, each page in exactly one place:
//!
//!   | private | unfolded | folded: resident, untouched | file | zero | swapped | free |
//!   '-- backed (+ folded resident, file resident) = Rss of guest RAM --'
//!
//!   the host:  sum over VMs (PSS - its shares of store pages) + memfold (the same) + page stores (all they allocate)
//! ```
//!
//! A store page that k page tables map counts 1/k in each process's PSS and not at all when nobody
//! maps it, so the host's sum takes those shares out of every process and counts what the store
//! files allocate instead. The zero page counts nowhere. QEMU's shared libraries count by PSS.
//!
//! [`read`] reads the kernel's files, [`take`] makes the accounts of `account` from them, `agree`
//! holds the accounts against what the kernel says elsewhere, [`table`] prints them, `frames`
//! proves who shares which physical page. `debt` is what guests could call in by writing, and
//! `brake` says when that is too much. [`memory_map`] and [`sharing`] are views of it for persons:
//! one VM's RAM from end to end, and who has pages in common with whom. [`plan`] says what more VMs
//! would take.

mod account;
mod agree;
mod brake;
mod debt;
mod disagreement;
pub mod estimate;
mod frames;
pub mod history;
mod memory;
pub mod memory_map;
pub mod plan;
pub mod read;
pub mod sharing;
pub mod table;
pub mod take;

pub use account::{HostAccount, KsmAccount, OwnCost, Report, StoreAccount, VmAccount};
pub use agree::{check, check_change};
pub use brake::{Brake, BrakePolicy, Level, Look, Reserve};
pub use debt::{BrakeEvent, DebtReport, VmDebt};
pub use disagreement::Disagreement;
pub use frames::{frames, shared_frames};
pub use read::ReadError;

//! The ledger: accounts of physical memory in which every page is counted once. The drawing shows
//! the classes of a VM's pages, and the terms of the host's total.
//!
//! ```text
//!   guest RAM of one VM, each page in exactly one class:
//!
//!   | private | unfolded | folded: resident, untouched | file | zero | swapped | free |
//!   '-- backed (+ folded resident, file resident) = Rss of guest RAM --'
//!
//!   the host:  sum over VMs (PSS - its shares of store pages) + memfold (likewise) + page stores (allocated memory)
//! ```
//!
//! The host's total must count each page of a page store once, whether or not a process maps it. In
//! a process's PSS (proportional set size), a page that k processes map counts 1/k. Therefore the
//! ledger subtracts pages of the store from each process's PSS, and adds the memory of the store
//! files instead. The zero page is not counted. QEMU's shared libraries are counted by PSS.
//!
//! - [`read`] parses the kernel's files.
//! - [`take`] builds the accounts of `account` from these files.
//! - `agree` checks the accounts against other figures of the kernel.
//! - [`table`] prints the accounts.
//! - `frames` reads frame numbers, which prove what pages VMs share.
//! - `debt` describes the memory that guests could claim by writing to shared pages; `brake`
//!   decides when this debt is too large.
//! - `guest_memory` holds what a guest says of its own memory.
//! - [`memory_map`] shows one VM's RAM from end to end; [`sharing`] shows which VMs have pages in
//!   common.
//! - [`plan`] predicts how much memory more VMs would take.
//! - [`estimate`] predicts savings before anything is shared.
//! - [`history`] stores samples of the accounts over time.

mod account;
mod agree;
mod brake;
mod debt;
pub mod estimate;
mod frames;
mod guest_memory;
pub mod history;
mod memory;
pub mod memory_map;
pub mod plan;
pub mod read;
pub mod sharing;
pub mod table;
pub mod take;

pub use account::{
    Disagreement, HostAccount, ImageAccount, KsmAccount, OwnCost, Report, StoreAccount, VmAccount,
};
pub use agree::{check, check_change};
pub use brake::{Brake, BrakePolicy, Level, Look, Reserve};
pub use debt::{BrakeEvent, DebtReport, VmDebt};
pub use frames::{frames, shared_frames};
pub use guest_memory::{GuestLruGen, GuestMemory, GuestMemorySource, GuestPressure};
pub use read::ReadError;

//! Reads the figures of KSM (the kernel's same-page merging), runs KSM, controls its speed, and
//! explains its results.
//!
//! | | |
//! |---|---|
//! | [`controls`], [`Guard`] | settings in `/sys/kernel/mm/ksm`; saving and restoring them |
//! | [`files`] | the meaning of each file there |
//! | [`status`], [`processes`] | counters, ksmd's CPU time, and figures of each process |
//! | [`overview`] | all of these at one moment: `memfold ksm status` |
//! | [`run`] | a run of KSM, at the kernel's defaults or at a CPU budget |
//! | [`steer`], [`pressure`] | the scan rate of ksmd: `memfold ksm start` |
//! | [`Cause`], [`explain`], [`facts`], [`ranges`], [`zeroes`] | why a VM's memory merges or does not: `memfold ksm explain` |
//!
//! KSM merges all memory on the host that was advised mergeable, regardless of trust domains. So
//! KSM must run only while all mergeable memory belongs to one domain.

/// Directory in which memfold saves KSM's settings before it changes them, so that they can be
/// restored after a kill. There is only one such directory, so that only one process at a time
/// changes the settings.
pub const NOTES: &str = memfold_vm::DEFAULT_STATE;

mod cause;
pub mod controls;
mod error;
pub mod explain;
mod explain_words;
pub mod facts;
pub mod files;
mod guard;
pub mod overview;
mod passes;
pub mod pressure;
pub mod processes;
pub mod ranges;
pub mod run;
pub mod status;
pub mod steer;
pub mod zeroes;

pub use cause::Cause;
pub use controls::{Controls, Settings};
pub use error::KsmError;
pub use explain::{Explanation, Finding, weigh};
pub use facts::{Facts, Known};
pub use guard::{Guard, Merged, restore_leftover, restore_own};
pub use overview::{Names, Overview, Part, Steering};
pub use run::{EqualCpu, Paused, Run, Step, pause};
pub use status::{Ksmd, ProcessStatus, Status, merging_pages};

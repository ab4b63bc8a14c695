//! The kernel's own merging.
//!
//! | | |
//! |---|---|
//! | [`controls`], [`Guard`] | `/sys/kernel/mm/ksm`; kept, and put back |
//! | [`files`] | what each file there means |
//! | [`status`], [`processes`] | counters, ksmd's CPU, each process's part |
//! | [`overview`] | all of that at a moment: `memfold ksm status` |
//! | [`run`] | a run of KSM, at the kernel's defaults or at a CPU budget |
//! | [`steer`], [`pressure`] | how fast ksmd is to scan: `memfold ksm start` |
//! | [`Cause`], [`explain`], [`facts`], [`ranges`], [`zeroes`] | why a VM's memory merges or doesn't: `memfold ksm explain` |
//!
//! KSM merges everything on the host that was advised mergeable and knows no trust domains: run it
//! only while the mergeable memory is of one domain.

/// Where memfold notes the settings that it changes, for whoever comes after a kill: one place, so
/// that one at a time changes them.
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

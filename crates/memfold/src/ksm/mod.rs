//! The kernel's own merging.
//!
//! [`controls`]: `/sys/kernel/mm/ksm`, kept and put back. [`status`]: counters and ksmd's CPU. [`run`]: a run of KSM, at the
//! kernel's defaults or at a CPU budget.
//!
//! KSM merges everything on the host that was advised mergeable and knows no trust domains: run it only while the mergeable
//! memory is of one domain.

/// Where memfold notes the settings that it changes, for whoever comes after a kill: one place, so that one at a time changes them.
pub const NOTES: &str = crate::vm::DEFAULT_STATE;

pub mod controls;
pub mod run;
pub mod status;

pub use controls::{Controls, Guard, KsmError, Settings, restore_leftover, restore_own};
pub use run::{EqualCpu, Paused, Run, Step, pause};
pub use status::{Ksmd, ProcessStatus, Status, merging_pages};

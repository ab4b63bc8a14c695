//! The kernel's own merging.
//!
//! [`controls`]: `/sys/kernel/mm/ksm`, kept and put back. [`status`]: counters and ksmd's CPU. [`run`]: a run of KSM, at the
//! kernel's defaults or at a CPU budget.
//!
//! KSM merges everything on the host that was advised mergeable and knows no trust domains: run it only while the mergeable
//! memory is of one domain.

pub mod controls;
pub mod run;
pub mod status;

pub use controls::{Controls, Guard, KsmError, Settings, restore_leftover, restore_own};
pub use run::{EqualCpu, Run, Step};
pub use status::{Ksmd, ProcessStatus, Status, merging_pages};

//! Model hosts and guests for the controller: deterministic, and fast enough for thousands of
//! simulated days.
//!
//! ```text
//!   random, by hand, or a trace of a real guest          where phases come from
//!      v
//!   Workload: phases (idle, build, database, ...)        what a guest wants
//!      v
//!   ModelGuest: anonymous memory, page cache, swap       what the guest's kernel does with that
//!      | signals            ^ trim, balloon, plug
//!      v                    |
//!   Arm: fixed size | free page reporting | Proxmox's rule | memfold's controller
//!      v
//!   ModelHost: MemAvailable, lent RAM, swap, OOM killer  -->  Outcome
//! ```
//! What the model does not have: several processes in a guest, huge pages, NUMA, disks that differ
//! in speed, and the time that reclaim itself takes. Its costs are round figures (the
//! constants of `guest.rs`); they serve to compare arms, not to predict a machine.

mod fault;
mod guest;
mod host;
mod proxmox;
mod random;
mod spec;
mod trace;
mod workload;

pub use fault::{Fault, Lie};
pub use guest::{Counters, ModelGuest};
pub use host::{Arm, ModelHost, Outcome, simulate};
pub use proxmox::{BalloonedVm, autoballoon};
pub use random::Random;
pub use spec::{HostSpec, VmSpec};
pub use trace::TraceRow;
pub use workload::{FileSet, Phase, Workload};

//! Right-sized VMs: decides how much memory each VM should have.
//!
//! The [`Controller`] is pure. Signals of guests and of the host go in, orders and reasons come
//! out. It does no I/O, reads no clock and starts no thread. The caller reads the signals, calls
//! [`Controller::step`] every one to five seconds, and carries the orders out or only shows them
//! (`watch`).
//!
//! ```text
//!   Limits, Signals of each VM --> check     does the guest answer, and can its figures be true?
//!                                    v
//!                                  estimate  working set: what was missed when it was taken
//!                                    v
//!   HostState ------------------>  ladder    how short is the host: which rung, and why
//!                                    v
//!                                  control   give at once, take slowly, from the VM that is hurt least
//!                                    v
//!                                  Decision  for each VM: size, working set, target, order, reason
//! ```
//!
//! What always holds:
//!
//! - A VM that is pinned gets no order. A VM whose guest is silent or contradicts itself loses
//!   nothing; it gets back what its balloon holds when the host has had room for a while.
//! - No order takes memory from the working set, and none makes a VM smaller than its working set
//!   plus its buffer, or than its minimum.
//! - What one step gives never exceeds the host's available memory less a quarter of the reserve.
//!   Only a guest whose OOM killer could run soon gets more: the rest, and half of the free swap.
//! - No input makes the controller panic.
//!
//! [`advice`] says from recorded history what each VM should be given. With the feature `sim`,
//! [`sim`] has model guests and hosts for tests and studies. Model guests do random work, or what a
//! real guest did whose memory was recorded.

mod advise;
mod assessment;
mod check;
mod control;
mod decision;
mod estimate;
mod input;
mod ladder;
mod policy;
#[cfg(feature = "sim")]
pub mod sim;
mod sizes;
mod vm_state;

pub use advise::{Advice, HostAdvice, WorkingSetSample, advice, host_advice};
pub use check::Contradiction;
pub use control::Controller;
pub use decision::{Action, Basis, Decision, Order, Reason, VmDecision};
pub use input::{
    Balloon, BrakeLevel, GuestSignals, HostState, Limits, PressureTotals, Signals, Source,
    VirtioMem, VmId,
};
pub use ladder::{Rung, RungReason};
pub use policy::Policy;

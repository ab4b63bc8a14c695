//! The history of the host's memory use: samples of the ledger's figures, in a database of bounded
//! size. The dashboard's charts are drawn from it.
//!
//! ```text
//!   fine:    one sample every half minute (by default), kept for 24 h
//!   coarse:  means of the fine samples over half an hour, kept for 90 d
//!   events:  changes seen between two samples, the last 5,000
//! ```
//! All amounts are whole numbers, and the name of an amount contains its unit.

mod growth;
mod series;
mod store;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use growth::{Growth, growth};
pub use series::{HOST_SERIES, Lent, VM_SERIES, VmSize, host_values, vm_values};
pub use store::{History, HistoryError, KEEP_COARSE_S, KEEP_FINE_S};

/// A change on the host that the daemon saw between two samples of the history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Time when the change was noticed, in seconds since 1970.
    pub at_unix_s: i64,
    /// What the event concerns: `vm`, `agent`, `folding`, `ksm`, `store`, `ledger`, `brake`,
    /// `snapshot`, `lending` or `daemon`.
    pub kind: String,
    /// Whether the operator should look at the event.
    pub warning: bool,
    /// Name of the VM that the event concerns; null: the event concerns no single VM.
    pub vm: Option<String>,
    /// Text that describes the change.
    pub text: String,
}

/// Figures of the host or of one VM over time, averaged over steps of equal length.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Series {
    /// Length of each step in seconds. The value of a step is the mean of the samples in that time.
    pub step_s: i64,
    /// Start time of each step that has a sample, in seconds since 1970.
    pub t: Vec<i64>,
    /// Names of the figures, in the order of `values`.
    pub names: Vec<String>,
    /// For each figure in `names`, one value per step in `t`; null: the figure is unknown at that
    /// time.
    pub values: Vec<Vec<Option<i64>>>,
}

/// PSS of each VM's QEMU over time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Trends {
    /// Length of each step, over which samples are averaged, in seconds.
    pub step_s: i64,
    /// VMs that have a sample in the requested time, sorted by name.
    pub vms: Vec<Trend>,
}

/// PSS of one VM's QEMU over time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Trend {
    /// Name of the VM.
    pub name: String,
    /// Mean PSS of the VM's QEMU in each step of the requested time, in bytes, oldest first; null:
    /// no sample.
    pub pss_bytes: Vec<Option<i64>>,
}

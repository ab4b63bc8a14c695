//! The history of the ledger for charts: samples in a database of bounded size.
//!
//! ```text
//!   fine:    one sample every half minute (by default), kept for 24 h
//!   coarse:  means of the fine samples over half an hour, kept for 90 d
//!   events:  changes seen between two samples, the last 5,000
//! ```
//! All amounts are whole numbers; the units are in their names.

mod growth;
mod series;
mod store;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use growth::{Growth, growth};
pub use series::{HOST_SERIES, Lent, VM_SERIES, host_values, vm_values};
pub use store::{History, HistoryError, KEEP_COARSE_S, KEEP_FINE_S};

/// A change seen between two samples.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Time when the change was seen, in seconds since 1970.
    pub at_unix_s: i64,
    /// Subject of the event: `vm`, `agent`, `folding`, `ksm`, `store`, `ledger`, `brake`,
    /// `snapshot`, `lending`, `daemon`.
    pub kind: String,
    /// Whether the operator should look at the event.
    pub warning: bool,
    /// Name of the VM, if the event concerns one.
    pub vm: Option<String>,
    /// Description of the change.
    pub text: String,
}

/// Figures over time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Series {
    /// Seconds per point. The value of a point is the mean of the samples in that time.
    pub step_s: i64,
    /// Start time of each point, in seconds since 1970.
    pub t: Vec<i64>,
    /// Names of the figures, in the order of `values`.
    pub names: Vec<String>,
    /// For each name, one value per point; null: unknown at that time.
    pub values: Vec<Vec<Option<i64>>>,
}

/// PSS of each VM over time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Trends {
    /// Seconds per point.
    pub step_s: i64,
    /// VMs that were sampled in that time, by name.
    pub vms: Vec<Trend>,
}

/// PSS of one VM over time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Trend {
    /// Name of the VM.
    pub name: String,
    /// Mean PSS of each point, oldest first, for the whole requested time; null: no sample.
    pub pss_bytes: Vec<Option<i64>>,
}

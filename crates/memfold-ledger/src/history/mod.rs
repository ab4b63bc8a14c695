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

/// One of the changes that were seen between two samples.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// When it was seen, seconds since 1970.
    pub at_unix_s: i64,
    /// What it is about: `vm`, `agent`, `folding`, `ksm`, `store`, `ledger`, `brake`,
    /// `snapshot`, `lending`, `daemon`.
    pub kind: String,
    /// Whether somebody should look at it.
    pub warning: bool,
    /// The VM, if it is about one.
    pub vm: Option<String>,
    /// What happened.
    pub text: String,
}

/// Figures over time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Series {
    /// Seconds of each point: a point is the mean of what was sampled in them.
    pub step_s: i64,
    /// The points' beginnings, seconds since 1970.
    pub t: Vec<i64>,
    /// Names of the figures.
    pub names: Vec<String>,
    /// One list of points for each name; null: not known then.
    pub values: Vec<Vec<Option<i64>>>,
}

/// One figure of all VMs over time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Trends {
    /// Seconds of each point.
    pub step_s: i64,
    /// VMs that were sampled in that time, by name.
    pub vms: Vec<Trend>,
}

/// One VM's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Trend {
    /// The VM.
    pub name: String,
    /// Means of its PSS, oldest first, over all of the time that was asked for; null: no sample.
    pub pss_bytes: Vec<Option<i64>>,
}

//! Types of the daemon's API for advice: what memory each VM should be given, from its recorded
//! history.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Query parameters of `GET /v1/advice`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct AdviceQuery {
    /// Number of days to look back, 1 to 90; by default 7.
    pub days: Option<u32>,
}

/// What memory each running VM should be given, and what the host would save: the JSON of `memfold
/// advise`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AdviceReport {
    /// Number of days that were looked back.
    pub days: u32,
    /// RAM of all running VMs with their plugged memory, in bytes.
    pub given_bytes: u64,
    /// Memory that they should be given, in bytes. A VM without advice keeps what it has.
    pub advised_bytes: u64,
    /// Memory that the VMs would be given less, in bytes: `given_bytes` less `advised_bytes`;
    /// negative: they should be given more.
    pub saved_bytes: i64,
    /// VMs, by name.
    pub vms: Vec<VmAdvice>,
}

/// Advice for one VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmAdvice {
    /// Name of the VM.
    pub vm: String,
    /// RAM of the VM with its plugged memory, in bytes.
    pub given_bytes: u64,
    /// The advice; null: the history has too few working sets of the VM.
    pub advice: Option<SizeAdvice>,
}

/// What memory a VM should be given, from its recorded working sets.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SizeAdvice {
    /// Time that the recorded working sets cover, in seconds.
    pub covered_s: u64,
    /// Part of that time in which the working set was measured by taking page cache, in percent. In
    /// the rest it is an upper bound, so less memory may suffice.
    pub probed_percent: f64,
    /// The working set did not exceed this in 50 % of the time, in bytes.
    pub p50_bytes: u64,
    /// The same for 95 % of the time.
    pub p95_bytes: u64,
    /// The same for 99 % of the time.
    pub p99_bytes: u64,
    /// Largest recorded working set, in bytes.
    pub largest_bytes: u64,
    /// Memory that the VM should be given, in bytes: `p99_bytes` and the VM's buffer, rounded up to
    /// 128 MiB.
    pub advised_bytes: u64,
    /// Cost of giving one GiB less than advised: share of the time in which the working set would
    /// not have fitted (0 to 1).
    pub short_time_with_one_gib_less: f64,
    /// Memory that the working set would have lacked then, on average over that time, in bytes.
    pub lack_with_one_gib_less_bytes: u64,
}

//! Types of the daemon's API for the settings of folding, of KSM (the kernel's merging of equal
//! pages), and of the brake, which limits the memory that guests can claim at once by writing to
//! shared pages.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Request body of `PUT /v1/fold`. Absent fields keep their values.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FoldRequest {
    /// Whether folding is paused. Pages that are folded already stay folded.
    pub paused: Option<bool>,
    /// CPU time that folding may use on average, in percent of one core (0 to 100).
    pub cpu_percent: Option<f64>,
    /// Maximum number of pages that folding examines per second; 0: no limit.
    pub pages_per_second: Option<u64>,
}

/// Request body of `POST /v1/ksm/start`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KsmStartRequest {
    /// Trust domain whose VMs' memory KSM merges; null: the only domain whose VMs have mergeable
    /// memory.
    pub domain: Option<String>,
    /// CPU time that ksmd may use, in percent of one core (above 0, to 95).
    pub cpu_percent: f64,
    /// Target duration of a full scan by ksmd, in seconds (1 or more).
    pub target_s: f64,
    /// Whether the kernel's KSM advisor sets `pages_to_scan` (Linux 6.8 or newer).
    #[serde(default)]
    pub advisor: bool,
}

/// Request body of `POST /v1/ksm/stop`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KsmStopRequest {
    /// Whether KSM separates merged pages again. This needs as much memory at once as merging has
    /// saved.
    #[serde(default)]
    pub unmerge: bool,
}

/// Request body of `PUT /v1/debt`. Absent fields keep their values.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DebtRequest {
    /// Memory that the host keeps for itself: a size (`2G`), or a part of the host's RAM (`5%`).
    pub reserve: Option<String>,
    /// Percentage of the copy-on-write debt for which memory must be available, in case guests
    /// claim the debt at once (0 to 100; 0: no brake).
    pub cover_percent: Option<f64>,
}

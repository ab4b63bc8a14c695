//! Requests that start and stop KSM, the kernel's merging of equal pages.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `POST /v1/ksm/start`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KsmStartRequest {
    /// For the VMs of this trust domain; null: the only one whose VMs have mergeable memory.
    #[serde(default)]
    pub domain: Option<String>,
    /// CPU that ksmd may use, in percent of one (above 0, to 95).
    pub cpu_percent: f64,
    /// Time that a full scan is to take, in seconds (1 or more).
    pub target_s: f64,
    /// Have the kernel's advisor set `pages_to_scan` (Linux 6.8).
    #[serde(default)]
    pub advisor: bool,
}

/// `POST /v1/ksm/stop`
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KsmStopRequest {
    /// Give each merged page its own copy again, which takes as much memory at once as merging
    /// saves.
    #[serde(default)]
    pub unmerge: bool,
}

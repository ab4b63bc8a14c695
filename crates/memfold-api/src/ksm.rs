//! Requests that start and stop KSM, the kernel's merging of equal pages.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `POST /v1/ksm/start`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KsmStartRequest {
    /// Trust domain whose VMs' memory is merged; null: the only domain whose VMs have mergeable
    /// memory.
    #[serde(default)]
    pub domain: Option<String>,
    /// CPU that ksmd may use, in percent of one core (above 0, to 95).
    pub cpu_percent: f64,
    /// Target duration of a full scan by ksmd, in seconds (1 or more).
    pub target_s: f64,
    /// Whether the kernel's advisor sets `pages_to_scan` (Linux 6.8 or newer).
    #[serde(default)]
    pub advisor: bool,
}

/// `POST /v1/ksm/stop`
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KsmStopRequest {
    /// Whether merged pages are separated again. This needs as much memory at once as merging has
    /// saved.
    #[serde(default)]
    pub unmerge: bool,
}

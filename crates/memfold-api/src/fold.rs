//! Settings of folding: its CPU budget and rate.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `PUT /v1/fold`: fields that are absent stay as they are.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FoldRequest {
    /// Stop folding, or go on. What is folded stays folded.
    pub paused: Option<bool>,
    /// CPU that folding may use over time, in percent of one core (0 to 100).
    pub cpu_percent: Option<f64>,
    /// Pages looked at in a second at most; 0 for no limit.
    pub pages_per_second: Option<u64>,
}

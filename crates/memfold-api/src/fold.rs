//! Settings of folding: its CPU budget and rate.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `PUT /v1/fold`: absent fields keep their values.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FoldRequest {
    /// Whether folding pauses. Pages that are folded already stay folded.
    pub paused: Option<bool>,
    /// Average CPU that folding may use, in percent of one core (0 to 100).
    pub cpu_percent: Option<f64>,
    /// Most pages that folding examines per second; 0: no limit.
    pub pages_per_second: Option<u64>,
}

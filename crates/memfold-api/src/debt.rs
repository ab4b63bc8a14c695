//! Settings of copy-on-write debt (memory that guests can claim at once by writing to shared
//! pages), and of the brake that limits it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `PUT /v1/debt`: absent fields keep their values.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DebtRequest {
    /// Memory that the host keeps for itself: a size (`2G`), or a part of the host's RAM (`5%`).
    pub reserve: Option<String>,
    /// Percentage of the debt for which memory must be available, in case guests claim it at once
    /// (0 to 100; 0: no brake).
    pub cover_percent: Option<f64>,
}

//! Settings of debt, the memory that guests can demand back at once, and of the brake that limits
//! it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `PUT /v1/debt`: absent fields keep their values.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DebtRequest {
    /// Memory that the host keeps for itself: a size (`2G`), or a part of its RAM (`5%`).
    pub reserve: Option<String>,
    /// Part of the debt that free memory must cover, in case guests demand it at once, in percent
    /// (0 to 100; 0: no brake).
    pub cover_percent: Option<f64>,
}

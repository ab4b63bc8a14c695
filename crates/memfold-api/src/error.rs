//! The body of an error response.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The body of a response with an HTTP status of 400 and above.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// Message that names the failed condition.
    pub error: String,
    /// Action that would fix the failed condition, if known.
    pub hint: Option<String>,
    /// Whether the request is impossible on this host (the command line exits with 3).
    #[serde(default)]
    pub impossible_here: bool,
}

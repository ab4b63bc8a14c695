//! The body of an error response.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The body of a response with an HTTP status of 400 and above.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// Which condition failed.
    pub error: String,
    /// What would change it, if known.
    pub hint: Option<String>,
    /// Whether this host can't do it at all (the command line exits with 3).
    #[serde(default)]
    pub impossible_here: bool,
}

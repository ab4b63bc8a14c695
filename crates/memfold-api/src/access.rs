//! Logging in over TCP.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::role::Role;

/// `POST /v1/session`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LoginRequest {
    /// A token, or a code for one login.
    pub secret: String,
}

/// `GET /v1/session`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SessionInfo {
    /// What one may.
    pub role: Role,
    /// Who one is, as the audit log says it.
    pub who: String,
    /// By what way: `socket` or `tcp`.
    pub via: String,
}

/// `POST /v1/session/codes`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CodeRequest {
    /// The role of the session that it begins; not more than one's own.
    pub role: Role,
}

/// A code for one login.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct LoginCode {
    /// Addresses of the dashboard with the code behind `#`, which no browser sends to any server.
    pub urls: Vec<String>,
    /// The role of the session.
    pub role: Role,
    /// How long it is good, in seconds.
    pub valid_s: u64,
}

//! Paths that the guard knows by name.

pub(crate) const SESSION_PATH: &str = "/v1/session";

/// Codes for one login.
pub(crate) const CODES_PATH: &str = "/v1/session/codes";

/// Where fingerprints are sent.
pub(crate) const PLACE_PATH: &str = "/v1/plan/place";

/// The audit log.
pub(crate) const AUDIT_PATH: &str = "/v1/audit";

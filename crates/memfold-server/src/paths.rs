//! Names of those API paths for which access control has special rules, such as login.

pub(crate) const SESSION_PATH: &str = "/v1/session";

/// Path at which operators get codes that are valid for one login.
pub(crate) const CODES_PATH: &str = "/v1/session/codes";

/// Path that takes fingerprints of several hosts, to propose where to place VMs.
pub(crate) const PLACE_PATH: &str = "/v1/plan/place";

/// Path of the audit log.
pub(crate) const AUDIT_PATH: &str = "/v1/audit";

//! Hosts that may ask a daemon's registry of leases over TCP.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `POST /v1/hosts`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostRequest {
    /// Its name among those that lend and borrow (`memfold serve --host` there).
    pub host: String,
}

/// What lets a host ask.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct HostToken {
    /// The name under which this host lends and borrows.
    pub host: String,
    /// Its token. It is not kept, and so not shown again.
    pub token: String,
    /// Addresses of this daemon, one of which the host is given as `--registry`.
    pub urls: Vec<String>,
}

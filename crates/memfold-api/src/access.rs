//! Types of the daemon's API for access control: roles of users, login sessions over TCP, and other
//! hosts that may use this daemon's lease registry.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Role of a client, which determines the requests that the client may make.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    ToSchema,
    clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// May only call the registry of leases, in the name of one host.
    #[value(skip)]
    Host,
    /// May see everything that memfold shows, except the audit log.
    Read,
    /// May see everything and change everything.
    Operate,
}

impl Role {
    /// Returns the role's name in JSON and on the command line: `host`, `read` or `operate`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Read => "read",
            Self::Operate => "operate",
        }
    }

    /// Returns whether a client of this role may make requests that need the role `other`.
    #[must_use]
    pub const fn may(self, other: Self) -> bool {
        match other {
            Self::Host => matches!(self, Self::Host | Self::Operate),
            Self::Read => matches!(self, Self::Read | Self::Operate),
            Self::Operate => matches!(self, Self::Operate),
        }
    }
}

/// Request body of `POST /v1/session`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LoginRequest {
    /// The client's token, or a login code. A login code is valid once.
    pub secret: String,
}

/// Response of `GET /v1/session`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SessionInfo {
    /// Role of the session, which determines the requests that its client may make.
    pub role: Role,
    /// Name of the client in the audit log.
    pub who: String,
    /// Endpoint to which the client is connected: `socket` (the daemon's Unix socket) or `tcp`.
    pub via: String,
}

/// Request body of `POST /v1/session/codes`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CodeRequest {
    /// Role of the session that a client opens with the new login code. It cannot exceed the
    /// caller's own role.
    pub role: Role,
}

/// A code with which a browser opens a session of the dashboard. The code is valid once.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct LoginCode {
    /// URLs of the dashboard, each with the login code after `#`. Browsers do not send this part of
    /// a URL to any server.
    pub urls: Vec<String>,
    /// Role of the session that a client opens with this login code.
    pub role: Role,
    /// Time for which the login code is valid, in seconds.
    pub valid_s: u64,
}

/// Request body of `POST /v1/hosts`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostRequest {
    /// Name under which the host that gets the token lends and borrows (`memfold serve --host` on
    /// that host).
    pub host: String,
}

/// Credentials with which another host calls this daemon's registry of leases.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct HostToken {
    /// Name under which the host that uses the token lends and borrows.
    pub host: String,
    /// Token of the host. The daemon does not store the token and cannot show it again.
    pub token: String,
    /// URLs of this daemon. The daemon of the host that uses the token gets one of them as
    /// `--registry`.
    pub urls: Vec<String>,
}

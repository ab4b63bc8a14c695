//! Access control: roles, sessions over TCP, and hosts that use the registry of leases.

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
    /// Returns the role's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Read => "read",
            Self::Operate => "operate",
        }
    }

    /// Returns whether this role permits requests that need `other`.
    #[must_use]
    pub const fn may(self, other: Self) -> bool {
        match other {
            Self::Host => matches!(self, Self::Host | Self::Operate),
            Self::Read => matches!(self, Self::Read | Self::Operate),
            Self::Operate => matches!(self, Self::Operate),
        }
    }
}

/// `POST /v1/session`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LoginRequest {
    /// A token, or a login code, which is valid once.
    pub secret: String,
}

/// `GET /v1/session`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SessionInfo {
    /// Role of the session.
    pub role: Role,
    /// Name of the client in the audit log.
    pub who: String,
    /// Endpoint of the client's connection: `socket` or `tcp`.
    pub via: String,
}

/// `POST /v1/session/codes`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CodeRequest {
    /// Role of the session that is opened with this login code; it cannot exceed the caller's own
    /// role.
    pub role: Role,
}

/// A login code, which is valid once.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct LoginCode {
    /// URLs of the dashboard with the code after `#`. Browsers do not send this part to any server.
    pub urls: Vec<String>,
    /// Role of the session that is opened with this code.
    pub role: Role,
    /// Time for which the code is valid, in seconds.
    pub valid_s: u64,
}

/// `POST /v1/hosts`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostRequest {
    /// Name under which the host lends and borrows (`memfold serve --host` on that host).
    pub host: String,
}

/// Credentials with which a host calls the registry.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct HostToken {
    /// Name under which this host lends and borrows.
    pub host: String,
    /// The host's token. The daemon does not store it and cannot show it again.
    pub token: String,
    /// URLs of this daemon; pass one of them to the host as `--registry`.
    pub urls: Vec<String>,
}

//! Access control: roles, sessions over TCP, and hosts that use the registry of leases.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What somebody may do.
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
    /// Ask the registry of leases, in the name of one host.
    #[value(skip)]
    Host,
    /// See everything that memfold shows, but not the audit log.
    Read,
    /// Change everything, too.
    Operate,
}

impl Role {
    /// In words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Read => "read",
            Self::Operate => "operate",
        }
    }

    /// Whether it may do what needs `other`.
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

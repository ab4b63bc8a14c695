//! What somebody who asks may do.

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

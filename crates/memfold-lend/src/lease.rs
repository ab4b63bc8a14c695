//! A lease: RAM lent by one host to one VM of another.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Longest time until a deadline.
pub const MAX_TTL: Duration = Duration::from_secs(3600);

/// How long a borrower has to give memory back that its lender needs.
pub const GIVE_BACK: Duration = Duration::from_secs(10);

/// What a borrower copies of a disk in a second at least, while its guest swaps.
pub const COPIED_A_SECOND: u64 = 20 << 20;

/// A lease's number. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Which run of a lender's daemon: exports of an older one have ended with it. Later ones are
/// greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub u64);

/// A lender's daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderId {
    /// Name of its host.
    pub host: String,
    /// Its run.
    pub incarnation: Incarnation,
}

/// What keeps the bytes of a swap disk on lent RAM if its lender dies.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    clap::ValueEnum,
    utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// A copy on the borrower's disk, written with each write; reads come from lent RAM.
    #[default]
    Disk,
    /// A copy in the RAM of another lender.
    Replica,
    /// Nothing: what lies there is lost, and with it programs of the guest.
    None,
}

impl Durability {
    /// In one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Replica => "replica",
            Self::None => "none",
        }
    }

    /// How long a borrower has to give back. Where the lent bytes are the only ones, or one of two,
    /// it has to copy them first.
    #[must_use]
    pub fn time_to_give_back(self, bytes: u64) -> Duration {
        let copying = self.time_to_copy(bytes);
        GIVE_BACK.saturating_add(copying).min(MAX_TTL)
    }

    /// How long it takes to copy what lies there to the borrower's disk, before it can be given
    /// back.
    #[must_use]
    pub const fn time_to_copy(self, bytes: u64) -> Duration {
        match self {
            Self::Disk => Duration::ZERO,
            Self::Replica | Self::None => Duration::from_secs(bytes / COPIED_A_SECOND),
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Disk, Self::Replica, Self::None]
            .into_iter()
            .find(|durability| durability.name() == name)
    }
}

/// What a lease is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseState {
    /// Its bytes are set aside; the lender is to export them.
    Taken,
    /// They can be reached.
    Exported,
    /// The borrower needs them no more; the lender is to end the export.
    Released,
}

impl LeaseState {
    /// In one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::Exported => "exported",
            Self::Released => "released",
        }
    }

    /// The state of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Taken, Self::Exported, Self::Released]
            .into_iter()
            .find(|state| state.name() == name)
    }
}

impl fmt::Display for LeaseState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// RAM lent by one host to one VM of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Number by which lender and borrower name it; the registry never gives it again.
    pub id: LeaseId,
    /// Who lends.
    pub lender: LenderId,
    /// Host that borrows.
    pub borrower: String,
    /// Its VM.
    pub vm: String,
    /// Bytes.
    pub bytes: u64,
    /// What keeps them if the lender dies.
    pub durability: Durability,
    /// What it is.
    pub state: LeaseState,
    /// Time left until the lender ends it, unless the borrower renews it; 0: it is over.
    pub left_ms: u64,
    /// Time left until the lender takes it back, if it needs it; 0: it does now.
    pub recall_ms: Option<u64>,
}

impl Lease {
    /// What a lender that needs it back within a time can have: who has to copy it first has the
    /// time for that.
    pub(super) fn within(&self, within: Duration) -> Duration {
        within.max(self.durability.time_to_copy(self.bytes).min(MAX_TTL))
    }
}

/// A lender as others see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderView {
    /// Who lends.
    pub lender: LenderId,
    /// Bytes that it has for others, lent or not.
    pub offered_bytes: u64,
    /// Bytes of all its leases that haven't ended.
    pub lent_bytes: u64,
    /// Time since it was last heard of.
    pub silent_ms: u64,
    /// Time left until nothing more is taken from it, unless it is heard of again; 0: that is so
    /// now.
    pub left_ms: u64,
}

/// All of it, at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Picture {
    /// Lenders by name.
    pub lenders: Vec<LenderView>,
    /// Leases by number.
    pub leases: Vec<Lease>,
}

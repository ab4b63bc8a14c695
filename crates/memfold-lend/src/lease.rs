//! The records in the lease registry: leases (RAM that one host lends to one VM of another host),
//! the lending hosts, and where a copy of the lent data is (durability).

use std::time::Duration;
use std::{fmt, io};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::files;

/// Longest time until a deadline that a registry accepts in a request.
pub const MAX_TTL: Duration = Duration::from_secs(3600);

/// Time without a report after which a registry forgets a lender, and those of its leases that
/// nobody renews.
pub(super) const FORGOTTEN: Duration = Duration::from_secs(30 * 24 * 3600);

/// Time that a borrower has to give back memory that its lender needs, without the time to copy
/// bytes.
pub const GIVE_BACK: Duration = Duration::from_secs(10);

/// Duration of a lease without renewal, without the time to copy bytes: a borrower's daemon may be
/// away this long.
const HOLDS: Duration = Duration::from_secs(60);

/// Speed that memfold assumes for a borrower that copies lent RAM to its disk while the guest
/// swaps, in bytes per second.
pub const COPIED_A_SECOND: u64 = 20 << 20;

/// Returns a time in milliseconds.
pub(super) fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Number of a lease. The registry never uses a number again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

impl LeaseId {
    /// Returns the number for the next lease of a registry whose last lease has number `last`.
    ///
    /// A registry that was restored from a backup counts from an old `last` again, while lenders
    /// may still export leases that are newer than the backup. The step from one number to the next
    /// is therefore random, 1 to 2^24: a number occurs again with a chance of about one in eight
    /// million for each new lease. Numbers stay below 2^53, which JSON numbers can hold exactly,
    /// for a thousand million leases.
    ///
    /// # Errors
    /// Fails if the kernel gives no random bytes.
    pub(super) fn after(last: u64) -> io::Result<Self> {
        let step = u32::from_le_bytes(files::random()?) >> 8;
        Ok(Self(last.saturating_add(u64::from(step) + 1)))
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of a lender's start. A later start on the same host has a greater number. When a lender
/// starts, the exports of its earlier starts have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub u64);

/// A lender: its host, and which start of the lender on this host is meant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderId {
    /// Name of the lender's host.
    pub host: String,
    /// Number of the lender's start; greater than that of earlier starts on the same host.
    pub incarnation: Incarnation,
}

/// Place where the bytes of a swap disk on lent RAM survive if its lender dies.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// A copy on the borrower's disk, written with each write; reads come from lent RAM.
    #[default]
    Disk,
    /// A copy in the RAM of another lender.
    Replica,
    /// No place: the bytes are lost, and with them programs of the guest.
    None,
}

impl Durability {
    /// Returns the name of this durability, as it is written in the registry and in options.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Replica => "replica",
            Self::None => "none",
        }
    }

    /// Returns the time that a borrower has to give `bytes` bytes back, at most an hour. Unless the
    /// borrower has a copy on its disk, this includes the time to copy the bytes.
    #[must_use]
    pub fn time_to_give_back(self, bytes: u64) -> Duration {
        let copying = self.time_to_copy(bytes);
        GIVE_BACK.saturating_add(copying).min(MAX_TTL)
    }

    /// Returns the duration of a lease without renewal, for a disk of `bytes` bytes, at most an
    /// hour. If the lender holds the only copy, the duration includes the time to copy the disk
    /// twice: the borrower moves the disk when half of the duration has passed.
    #[must_use]
    pub fn lease_time(self, bytes: u64) -> Duration {
        let copying = self.time_to_copy(bytes.saturating_mul(2));
        HOLDS.saturating_add(copying).min(MAX_TTL)
    }

    /// Returns the time that a borrower needs to copy `bytes` lent bytes to its disk; zero with
    /// durability `disk`.
    #[must_use]
    pub const fn time_to_copy(self, bytes: u64) -> Duration {
        match self {
            Self::Disk => Duration::ZERO,
            Self::Replica | Self::None => Duration::from_secs(bytes / COPIED_A_SECOND),
        }
    }
}

/// How far a lease has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseState {
    /// The lender's bytes are reserved for the borrower; the lender does not serve them yet.
    Taken,
    /// The lender serves the bytes, and the borrower can reach them.
    Exported,
    /// The borrower no longer needs the bytes; the lender may still serve them.
    Released,
}

impl fmt::Display for LeaseState {
    /// Writes the name of this state in the registry.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Taken => "taken",
            Self::Exported => "exported",
            Self::Released => "released",
        })
    }
}

/// A lease: RAM lent by one host to one VM of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Number of the lease. The registry never uses a number again.
    pub id: LeaseId,
    /// The lender that serves the lease's bytes.
    pub lender: LenderId,
    /// Name of the host that borrows the RAM.
    pub borrower: String,
    /// Name of the VM whose swap disk uses the lent RAM.
    pub vm: String,
    /// Size of the lent RAM, in bytes.
    pub bytes: u64,
    /// Size of the VM's whole swap disk, in bytes: larger than `bytes` if several lenders hold a
    /// part of the disk each. 0 in records of older versions.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Place where the lease's bytes survive if the lender dies.
    pub durability: Durability,
    /// How far the lease has come.
    pub state: LeaseState,
    /// Milliseconds until the lender ends the lease, unless the borrower renews it; 0 if the lease
    /// has expired.
    pub left_ms: u64,
    /// Milliseconds until the lender takes the lease's memory back, which it has asked for; 0 if
    /// the time is over. `None` if the lender does not need the memory.
    pub recall_ms: Option<u64>,
}

impl Lease {
    /// Returns the number of bytes that the borrower copies before it can give the lease back. A
    /// borrower copies its whole swap disk, even if the lease holds only a part of the disk.
    #[must_use]
    pub fn bytes_to_copy(&self) -> u64 {
        self.disk_bytes.max(self.bytes)
    }

    /// Returns the time that the borrower has to give the lease back, at most an hour.
    #[must_use]
    pub fn time_to_give_back(&self) -> Duration {
        self.durability.time_to_give_back(self.bytes_to_copy())
    }

    /// Returns the time that the borrower gets when the lender wants the lease back `within` a
    /// time. A borrower that must copy the bytes first gets at least the time to copy them.
    pub(super) fn within(&self, within: Duration) -> Duration {
        let copying = self.durability.time_to_copy(self.bytes_to_copy());
        within.max(copying.min(MAX_TTL))
    }
}

/// A lender as the registry shows it to other hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderView {
    /// The lender's host and the number of its last start.
    pub lender: LenderId,
    /// Bytes that the lender offers, including those that are lent already.
    pub offered_bytes: u64,
    /// Bytes of all leases of the lender that have not ended.
    pub lent_bytes: u64,
    /// Milliseconds since the registry last received an offer from the lender.
    pub silent_ms: u64,
    /// Milliseconds until the lender's offer expires, unless the lender repeats it; 0 if the offer
    /// has expired and nobody can borrow from the lender.
    pub left_ms: u64,
}

/// All lenders and leases that a registry knows at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Picture {
    /// Lenders that the registry knows, sorted by host name.
    pub lenders: Vec<LenderView>,
    /// Leases that have not ended, sorted by number.
    pub leases: Vec<Lease>,
}

//! The registry interface: records who lends RAM to whom, and its guarantees.
//!
//! ```text
//!   lender     offer ----------.                        .-- publish ---- ended
//!                               v                       |                 ^
//!   borrower                  take ---> [taken] ---> [exported] ---> [released]
//!                                          `------------release-----------^
//! ```
//! A lease's bytes count as lent from [`take`](Registry::take) until its *lender* calls
//! [`ended`](Registry::ended), because only the lender knows that nobody can reach them any more.
//! An expired deadline frees nothing by itself; it tells the lender to end the export. So no byte
//! is lent twice, whichever process dies or is cut off.
//!
//! Each method is one transaction that compares and changes one lender's record and one lease. An
//! etcd server can carry it out as well.

use std::fmt;
use std::time::Duration;

use super::endpoint::Endpoint;
pub use super::lease::MAX_TTL;
use super::lease::{Lease, LeaseId, LenderId, Picture};
use super::offer::{Offer, Want};
use super::registry_error::RegistryError;
pub use super::registry_error::{check_bytes, check_name};

/// A registry of offers and leases. Every implementation must pass `registry_tests::suite`.
pub trait Registry: Send + Sync {
    /// Publishes a lender's offer for `ttl`. A later incarnation replaces an earlier one under the
    /// same name, and the earlier one's leases have ended.
    fn offer(&self, offer: &Offer, ttl: Duration) -> Result<(), RegistryError>;

    /// Withdraws a lender's offer. Its leases stay until they are ended.
    fn withdraw(&self, lender: &LenderId) -> Result<(), RegistryError>;

    /// Reserves bytes for a lease, at the lender with the most free bytes.
    fn take(&self, want: &Want, ttl: Duration) -> Result<Lease, RegistryError>;

    /// Records that the lender has exported a taken lease, and at which endpoint.
    fn publish(
        &self,
        id: LeaseId,
        lender: &LenderId,
        endpoint: &Endpoint,
    ) -> Result<(), RegistryError>;

    /// The endpoint of a lease; `None` until it is exported.
    fn endpoint(&self, id: LeaseId, borrower: &str) -> Result<Option<Endpoint>, RegistryError>;

    /// Extends the borrower's need of a lease to `ttl` from now. An expired lease can be renewed as
    /// long as it has not ended.
    fn renew(&self, id: LeaseId, borrower: &str, ttl: Duration) -> Result<Lease, RegistryError>;

    /// Records that the copy on the borrower's disk is lost: from now on the lent bytes are the
    /// only ones ([`super::Durability::None`]). If the lender already asked for them, the deadline
    /// is extended once, by the time to copy them. Succeeds if this is already known.
    fn sole_copy(&self, id: LeaseId, borrower: &str) -> Result<Lease, RegistryError>;

    /// Asks for a lease back `within` a time. An earlier deadline stays. A borrower that must copy
    /// the bytes first gets the time for that, whatever the lender asks: the lender may not know of
    /// it yet.
    fn recall(&self, id: LeaseId, lender: &LenderId, within: Duration)
    -> Result<(), RegistryError>;

    /// Records that the borrower no longer needs a lease. Succeeds if the lease has already ended.
    fn release(&self, id: LeaseId, borrower: &str) -> Result<(), RegistryError>;

    /// Records that a lease's bytes can no longer be reached and are the lender's again. Succeeds
    /// if the lease has already ended.
    fn ended(&self, id: LeaseId, lender: &LenderId) -> Result<(), RegistryError>;

    /// All offers and leases, without keys.
    fn picture(&self) -> Result<Picture, RegistryError>;
}

impl fmt::Debug for dyn Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a registry")
    }
}

//! Interface of the registry, which records which host lends RAM to which, and guarantees that no
//! byte is lent twice.
//!
//! ```text
//!   lender     offer ----------.                        .-- publish ---- ended
//!                               v                       |                 ^
//!   borrower                  take ---> [taken] ---> [exported] ---> [released]
//!                                          `------------release-----------^
//! ```
//! A lease's bytes count as lent from [`take`](Registry::take) until its *lender* calls
//! [`ended`](Registry::ended), because only the lender knows when nobody can reach the bytes any
//! more. An expired deadline frees nothing by itself; it tells the lender to end the export. So no
//! byte is lent twice, whichever process dies or is cut off.
//!
//! Each method is one transaction that compares and changes one lender's record and one lease, so
//! an etcd can execute it as well.

use std::fmt;
use std::time::Duration;

use super::endpoint::Endpoint;
pub use super::lease::MAX_TTL;
use super::lease::{Lease, LeaseId, LenderId, Picture};
use super::offer::{Offer, Want};
use super::registry_error::RegistryError;
pub use super::registry_error::{check_bytes, check_name};

/// Registry of offers and leases. Every implementation must pass `registry_tests::suite`.
pub trait Registry: Send + Sync {
    /// Publishes a lender's offer, which is valid for `ttl`. A later incarnation replaces an
    /// earlier one with the same host name; the leases of the earlier one count as ended.
    fn offer(&self, offer: &Offer, ttl: Duration) -> Result<(), RegistryError>;

    /// Withdraws a lender's offer. The lender's leases stay until the lender ends them.
    fn withdraw(&self, lender: &LenderId) -> Result<(), RegistryError>;

    /// Reserves bytes for a lease at the lender that has the most free bytes.
    fn take(&self, want: &Want, ttl: Duration) -> Result<Lease, RegistryError>;

    /// Records that the lender has exported a taken lease at `endpoint`.
    fn publish(
        &self,
        id: LeaseId,
        lender: &LenderId,
        endpoint: &Endpoint,
    ) -> Result<(), RegistryError>;

    /// Returns the endpoint of a lease; `None` until the lease is exported.
    fn endpoint(&self, id: LeaseId, borrower: &str) -> Result<Option<Endpoint>, RegistryError>;

    /// Extends the borrower's right to a lease to `ttl` from now. An expired lease can be renewed
    /// as long as its lender has not ended it.
    fn renew(&self, id: LeaseId, borrower: &str, ttl: Duration) -> Result<Lease, RegistryError>;

    /// Records that the borrower has lost the copy on its disk, so that the lent bytes are the only
    /// copy ([`super::Durability::None`]). If the lender has already recalled the lease, the
    /// deadline is extended once, by the time to copy the bytes. Succeeds if the loss is already
    /// recorded.
    fn sole_copy(&self, id: LeaseId, borrower: &str) -> Result<Lease, RegistryError>;

    /// Asks the borrower to return a lease `within` a time. An earlier deadline remains. A borrower
    /// that must copy the bytes first gets the time for that, even if the lender asks for less: the
    /// lender may not know yet that the borrower has no copy.
    fn recall(&self, id: LeaseId, lender: &LenderId, within: Duration)
    -> Result<(), RegistryError>;

    /// Records that the borrower no longer needs a lease. Succeeds if the lease has already ended.
    fn release(&self, id: LeaseId, borrower: &str) -> Result<(), RegistryError>;

    /// Records that nobody can reach a lease's bytes any more, so that the lender has them back.
    /// Succeeds if the lease has already ended.
    fn ended(&self, id: LeaseId, lender: &LenderId) -> Result<(), RegistryError>;

    /// Returns all offers and leases, without keys.
    fn picture(&self) -> Result<Picture, RegistryError>;
}

impl fmt::Debug for dyn Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a registry")
    }
}

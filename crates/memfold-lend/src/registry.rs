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

/// Keeps leases. Every implementation passes `registry_tests::suite`.
pub trait Registry: Send + Sync {
    /// Says what a lender has, for `ttl`. A later incarnation takes the name over, and leases of
    /// the one before have ended.
    fn offer(&self, offer: &Offer, ttl: Duration) -> Result<(), RegistryError>;

    /// A lender lends no more; its leases stay until they are ended.
    fn withdraw(&self, lender: &LenderId) -> Result<(), RegistryError>;

    /// Sets bytes of one lender aside, of the one that has the most free.
    fn take(&self, want: &Want, ttl: Duration) -> Result<Lease, RegistryError>;

    /// The lender has exported a lease that was taken.
    fn publish(
        &self,
        id: LeaseId,
        lender: &LenderId,
        endpoint: &Endpoint,
    ) -> Result<(), RegistryError>;

    /// How the borrower reaches a lease; `None` until it is exported.
    fn endpoint(&self, id: LeaseId, borrower: &str) -> Result<Option<Endpoint>, RegistryError>;

    /// The borrower still needs it, for `ttl` from now. Whether it was over and is so no more
    /// doesn't matter, as long as it hasn't ended.
    fn renew(&self, id: LeaseId, borrower: &str, ttl: Duration) -> Result<Lease, RegistryError>;

    /// The copy that the borrower had on its disk is none any more: the lent bytes are the only
    /// ones from now on ([`super::Durability::None`]). If they are asked for already, there is time
    /// to copy them now, once. Fine if it is known.
    fn sole_copy(&self, id: LeaseId, borrower: &str) -> Result<Lease, RegistryError>;

    /// The lender needs it back `within` a time; a deadline that was set before stays if it is
    /// earlier. Who has to copy it first has the time for that, whatever the lender says: it may
    /// not know yet.
    fn recall(&self, id: LeaseId, lender: &LenderId, within: Duration)
    -> Result<(), RegistryError>;

    /// The borrower needs it no more. Fine if it has ended already.
    fn release(&self, id: LeaseId, borrower: &str) -> Result<(), RegistryError>;

    /// Its bytes can be reached no more: the lender has them back. Fine if it has ended already.
    fn ended(&self, id: LeaseId, lender: &LenderId) -> Result<(), RegistryError>;

    /// Everything, without keys.
    fn picture(&self) -> Result<Picture, RegistryError>;
}

impl fmt::Debug for dyn Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a registry")
    }
}

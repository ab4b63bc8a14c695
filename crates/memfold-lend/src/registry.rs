//! Interface of the lease registry, which records which host lends RAM to which, and guarantees
//! that no byte is lent twice. The drawing shows the states of a lease, and which call of lender or
//! borrower leads to each state.
//!
//! ```text
//!   lender     offer ----------.                        .-- publish ---- ended
//!                               v                       |                 ^
//!   borrower                  take ---> [taken] ---> [exported] ---> [released]
//!                                          `------------release-----------^
//! ```
//! A lease's bytes count as lent from [`take`](Registry::take) until its *lender* calls
//! [`ended`](Registry::ended), because only the lender knows when nobody can reach the bytes any
//! more. When a lease's deadline has passed, the lender ends the export, and only then are the
//! bytes free. So no byte is lent twice, whichever process dies or is cut off.
//!
//! Each method is one transaction that compares and changes one lender's record and one lease.
//! Therefore both a database and an etcd can execute it.

use std::fmt;
use std::time::Duration;

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

use super::endpoint::Endpoint;
pub use super::lease::MAX_TTL;
use super::lease::{Durability, Lease, LeaseId, LenderId, LenderView, Picture};
use super::registry_error::{LEAST_LEASE, MOST_OF_LENDER, RegistryError, Result};
pub use super::registry_error::{check_bytes, check_name};

/// RAM that a lender offers to others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The lender that makes the offer.
    pub lender: LenderId,
    /// Size of the offered RAM in bytes, including the part that is lent already.
    pub bytes: u64,
}

/// A borrower's request for RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Want {
    /// Name of the host that borrows. A host never borrows its own RAM.
    pub borrower: String,
    /// Name of the VM whose swap disk will use the RAM.
    pub vm: String,
    /// Number of bytes that the borrower wants, all from one lender: 64 KiB to 1 PiB.
    pub bytes: u64,
    /// Size of the VM's whole swap disk, in bytes, at most 1 PiB. A disk over several lenders is
    /// larger than `bytes`. 0: the disk has `bytes` (requests of older versions).
    #[serde(default)]
    pub disk_bytes: u64,
    /// Place where the borrowed bytes survive if the lender dies.
    #[serde(default)]
    pub durability: Durability,
    /// Host names of lenders from which the borrower takes nothing, because they hold the other
    /// copy of the swap disk.
    #[serde(default)]
    pub apart_from: Vec<String>,
}

impl Want {
    /// Checks the values of a request that comes from another host.
    ///
    /// # Errors
    /// Fails if a name or the size is not allowed.
    pub fn check(&self) -> Result<()> {
        check_name("borrower", &self.borrower)?;
        check_name("vm", &self.vm)?;
        check_bytes(self.bytes, LEAST_LEASE)?;
        check_bytes(self.disk_bytes, 0)
    }

    /// Chooses the lender with the most free bytes, and of several the first. `lenders` are sorted
    /// by name. `leases`: number of a lender's leases that have not ended.
    pub(super) fn choose<T>(
        &self,
        mut lenders: Vec<T>,
        view: impl Fn(&T) -> &LenderView,
        leases: impl Fn(&T) -> usize,
    ) -> Result<T> {
        lenders.retain(|lender| {
            let (host, left_ms) = (&view(lender).lender.host, view(lender).left_ms);
            left_ms > 0 && *host != self.borrower && !self.apart_from.contains(host)
        });
        let count = lenders.len();
        // A lender that now offers less than it has lent has no free bytes.
        let free = |lender: &T| {
            if leases(lender) >= MOST_OF_LENDER {
                return 0;
            }
            let view = view(lender);
            view.offered_bytes.saturating_sub(view.lent_bytes)
        };
        let best = lenders.into_iter().rev().max_by_key(free);
        let largest = best.as_ref().map_or(0, free);
        let best = best.filter(|_| largest >= self.bytes);
        best.ok_or_else(|| RegistryError::NothingToSpare {
            wanted: ByteSize(self.bytes),
            borrower: self.borrower.clone(),
            largest,
            lenders: count,
        })
    }
}

/// A registry of lenders and leases. Every implementation must pass `registry_tests::suite`.
pub trait Registry: Send + Sync {
    /// Publishes a lender's offer, which is valid for `ttl`. An offer of a later start of the
    /// lender replaces that of an earlier start; the leases of the earlier start count as ended.
    fn offer(&self, offer: &Offer, ttl: Duration) -> Result<()>;

    /// Withdraws a lender's offer. The lender's leases stay until the lender ends them.
    fn withdraw(&self, lender: &LenderId) -> Result<()>;

    /// Reserves RAM for a new lease, at the lender that has the most free bytes. The lease is valid
    /// for `ttl`. A lender has at most 256 leases, and a borrower holds at most 1024.
    fn take(&self, want: &Want, ttl: Duration) -> Result<Lease>;

    /// Records that the lender serves the RAM of a lease at `endpoint`.
    fn publish(&self, id: LeaseId, lender: &LenderId, endpoint: &Endpoint) -> Result<()>;

    /// Returns where and with which key the borrower reaches the RAM of a lease; `None` until the
    /// lender serves it.
    fn endpoint(&self, id: LeaseId, borrower: &str) -> Result<Option<Endpoint>>;

    /// Makes the borrower's lease valid for `ttl` from now. An expired lease can be renewed as long
    /// as its lender has not ended it.
    fn renew(&self, id: LeaseId, borrower: &str, ttl: Duration) -> Result<Lease>;

    /// Records that the borrower has lost the copy on its disk, so that the lent bytes are the only
    /// copy ([`super::Durability::None`]). If the lender has already recalled the lease, the
    /// deadline is extended once, by the time to copy the bytes. Succeeds if the loss is already
    /// recorded.
    fn sole_copy(&self, id: LeaseId, borrower: &str) -> Result<Lease>;

    /// Records that the lender wants a lease back, within the time `within` from now. An earlier
    /// deadline remains. A borrower that must copy the bytes first gets the time for that, even if
    /// the lender asks for less: the lender may not know yet that the borrower has no copy.
    fn recall(&self, id: LeaseId, lender: &LenderId, within: Duration) -> Result<()>;

    /// Records that the borrower no longer needs the RAM of a lease. Succeeds if the lease has
    /// already ended.
    fn release(&self, id: LeaseId, borrower: &str) -> Result<()>;

    /// Ends a lease: records that nobody can reach its bytes any more, so that the lender has them
    /// back. Succeeds if the lease has already ended.
    fn ended(&self, id: LeaseId, lender: &LenderId) -> Result<()>;

    /// Returns all lenders and leases that the registry knows, without keys.
    fn picture(&self) -> Result<Picture>;
}

impl fmt::Debug for dyn Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a registry")
    }
}

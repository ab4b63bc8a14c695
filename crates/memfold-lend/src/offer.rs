//! Offers of lenders and requests of borrowers.

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

use super::lease::{Durability, LenderId};
use super::registry_error::{RegistryError, check_bytes, check_name};

/// RAM that a lender offers to others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The run of the lender's daemon that makes the offer.
    pub lender: LenderId,
    /// Total size of the offered RAM in bytes, including the part that is lent already.
    pub bytes: u64,
}

/// A borrower's request for RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Want {
    /// Name of the borrower's host. A host never borrows its own RAM.
    pub borrower: String,
    /// Name of the VM whose swap disk will use the RAM.
    pub vm: String,
    /// Number of bytes wanted, all from one lender.
    pub bytes: u64,
    /// Place where the bytes survive if the lender dies.
    #[serde(default)]
    pub durability: Durability,
    /// Host names of lenders to avoid, because they hold the other copy.
    #[serde(default)]
    pub apart_from: Vec<String>,
}

impl Want {
    /// Checks the values of a request that comes from another host.
    ///
    /// # Errors
    /// Fails if a name or the size is not allowed.
    pub fn check(&self) -> Result<(), RegistryError> {
        check_name("borrower", &self.borrower)?;
        check_name("vm", &self.vm)?;
        check_bytes(self.bytes, 1)
    }

    /// Chooses the lender with the most free bytes, and of several the first. `lenders` are sorted
    /// by name. `facts` returns a lender's host name and free bytes.
    pub(super) fn choose<T>(
        &self,
        mut lenders: Vec<T>,
        facts: impl Fn(&T) -> (&str, u64),
    ) -> Result<T, RegistryError> {
        lenders.retain(|lender| {
            let (host, _) = facts(lender);
            host != self.borrower && !self.apart_from.iter().any(|other| other == host)
        });
        let count = lenders.len();
        let free = |lender: &T| facts(lender).1;
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

//! Offers of lenders and requests of borrowers.

use serde::{Deserialize, Serialize};

use super::lease::{Durability, LenderId};
use super::registry_error::{RegistryError, check_bytes, check_name};

/// RAM that a lender offers to others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The lender's daemon.
    pub lender: LenderId,
    /// Total size of the offered RAM in bytes, lent RAM included.
    pub bytes: u64,
}

/// A borrower's request for RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Want {
    /// Name of the host that borrows. It never gets its own RAM.
    pub borrower: String,
    /// Name of the VM that uses the RAM.
    pub vm: String,
    /// Size in bytes. All of it comes from one lender.
    pub bytes: u64,
    /// Where the bytes survive if the lender dies.
    #[serde(default)]
    pub durability: Durability,
    /// Lenders to avoid, because they hold the other copy.
    #[serde(default)]
    pub apart_from: Vec<String>,
}

impl Want {
    /// Checks a request from another host.
    ///
    /// # Errors
    /// A name or the size is not allowed.
    pub fn check(&self) -> Result<(), RegistryError> {
        check_name("borrower", &self.borrower)?;
        check_name("vm", &self.vm)?;
        check_bytes(self.bytes, 1)
    }
}

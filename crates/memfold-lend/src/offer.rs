//! Offers of lenders and requests of borrowers.

use serde::{Deserialize, Serialize};

use super::lease::{Durability, LenderId};
use super::registry_error::{RegistryError, check_bytes, check_name};

/// What a lender has for others, lent or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Who lends.
    pub lender: LenderId,
    /// Bytes in all.
    pub bytes: u64,
}

/// What a borrower wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Want {
    /// Name of the host that borrows. It is never given its own RAM.
    pub borrower: String,
    /// The VM that gets it.
    pub vm: String,
    /// Bytes, of one lender.
    pub bytes: u64,
    /// What keeps them if the lender dies.
    #[serde(default)]
    pub durability: Durability,
    /// Lenders that it must not be of: those that hold the other copy.
    #[serde(default)]
    pub apart_from: Vec<String>,
}

impl Want {
    /// Checks what came from elsewhere.
    pub fn check(&self) -> Result<(), RegistryError> {
        check_name("borrower", &self.borrower)?;
        check_name("vm", &self.vm)?;
        check_bytes(self.bytes, 1)
    }
}

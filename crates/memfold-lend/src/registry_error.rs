//! Errors of a registry, and the checks of values in requests.

use std::time::Duration;

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

use super::lease::{LeaseId, LeaseState, MAX_TTL};

/// Most bytes of one offer or lease: 1 PiB.
const MAX_BYTES: u64 = 1 << 50;

/// Longest name of a host.
pub(super) const MAX_NAME: usize = 64;

/// Why a registry refuses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum RegistryError {
    /// A value that makes no sense.
    #[error("{field}: {why}")]
    Value {
        /// Which.
        field: String,
        /// What is wrong and what would be right.
        why: String,
    },
    /// Nobody has so much to spare.
    #[error(
        "no lender has {wanted} to spare; {} is the most that one of {lenders} offers to '{borrower}' now. Lend more there (memfold lend --max), or use a smaller swap disk",
        ByteSize(*largest)
    )]
    NothingToSpare {
        /// What was asked for.
        wanted: ByteSize,
        /// Who asked.
        borrower: String,
        /// Most bytes that one lender has free.
        largest: u64,
        /// Lenders looked at.
        lenders: usize,
    },
    /// No such lease, or it isn't theirs who ask.
    #[error(
        "'{who}' has no lease {id}: the lender has ended it, or it never existed; 'memfold leases' lists all leases"
    )]
    NoLease {
        /// Number that was asked for.
        id: LeaseId,
        /// Who asked.
        who: String,
    },
    /// Another daemon lends under this name.
    #[error(
        "another daemon has begun to lend as '{lender}'; give each host its own name (memfold serve --host)"
    )]
    Superseded {
        /// The name.
        lender: String,
    },
    /// What was asked doesn't fit what the lease is now.
    #[error("lease {id} is {state} and cannot be {wanted}")]
    State {
        /// Number of the lease that is in another state.
        id: LeaseId,
        /// What it is.
        state: LeaseState,
        /// What it was to become.
        wanted: String,
    },
    /// The registry can't be reached or used now.
    #[error("cannot use the registry at {place}: {why}")]
    Unusable {
        /// Where it is.
        place: String,
        /// Why.
        why: String,
    },
}

pub(super) fn value(field: &str, why: impl Into<String>) -> RegistryError {
    RegistryError::Value {
        field: field.into(),
        why: why.into(),
    }
}

/// Checks the name of a host or VM: it comes from another host, and gets into paths and logs.
pub fn check_name(field: &str, name: &str) -> Result<(), RegistryError> {
    let letter = |c: char| c.is_ascii_alphanumeric();
    let good = (1..=MAX_NAME).contains(&name.len())
        && name.starts_with(letter)
        && name.chars().all(|c| letter(c) || "._-".contains(c));
    if good {
        return Ok(());
    }
    Err(value(
        field,
        "give 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
    ))
}

/// Checks a number of bytes.
pub fn check_bytes(bytes: u64, least: u64) -> Result<(), RegistryError> {
    if (least..=MAX_BYTES).contains(&bytes) {
        return Ok(());
    }
    Err(value(
        "bytes",
        format!("{bytes} is not {least} to {MAX_BYTES}"),
    ))
}

/// Checks a time until a deadline.
pub fn check_ttl(ttl: Duration) -> Result<u64, RegistryError> {
    if ttl <= MAX_TTL {
        return Ok(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX));
    }
    Err(value("ttl", format!("longer than {} s", MAX_TTL.as_secs())))
}

//! Errors of the lease registry, and checks of the names, sizes and times in requests to the
//! registry.

use std::time::Duration;

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

use super::lease::{LeaseId, LeaseState, MAX_TTL, ms};

/// Maximum size of an offer or a lease, in bytes: 1 PiB.
const MAX_BYTES: u64 = 1 << 50;

/// Minimum size of a lease, in bytes: 64 KiB, the unit of striped disks.
pub(super) const LEAST_LEASE: u64 = 64 << 10;

/// Maximum number of leases of one lender. Each lease is served by a process of its own.
pub(super) const MOST_OF_LENDER: usize = 256;

/// Maximum number of leases that one borrower holds, and has not released.
const MOST_OF_BORROWER: usize = 1024;

/// Maximum length of the name of a host or VM, in bytes.
pub(super) const MAX_NAME: usize = 64;

/// Result of a request to a registry of leases.
pub type Result<T, E = RegistryError> = std::result::Result<T, E>;

/// Reason why a registry refuses a request or cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum RegistryError {
    /// A value in the request is not allowed.
    #[error("{field}: {why}")]
    Value {
        /// Name of the request's field with the value.
        field: String,
        /// Why the value is not allowed, and which values are.
        why: String,
    },
    /// No lender has as many free bytes as the borrower wants.
    #[error(
        "no lender has {wanted} to spare: the largest offer of {lenders} lenders to '{borrower}' is {}; lend more on another host (memfold lend --max), or use a smaller swap disk",
        ByteSize(*largest)
    )]
    NothingToSpare {
        /// Number of bytes that the borrower wants.
        wanted: ByteSize,
        /// Host name of the borrower.
        borrower: String,
        /// Free bytes of the lender that has the most.
        largest: u64,
        /// Number of lenders that the borrower may use.
        lenders: usize,
    },
    /// The lease does not exist, or does not belong to the caller.
    #[error(
        "host '{who}' has no lease {id}: the lender has ended the lease, or the lease never existed; 'memfold leases' lists all leases"
    )]
    NoLease {
        /// Number of the lease that was asked for.
        id: LeaseId,
        /// Name of the host that asked for the lease.
        who: String,
    },
    /// A daemon that started later lends under the same host name.
    #[error(
        "another daemon has begun to lend under the host name '{lender}'; give each host its own name (memfold serve --host)"
    )]
    Superseded {
        /// Host name of the lender.
        lender: String,
    },
    /// The lease's state does not allow the request.
    #[error("lease {id} is {state} and cannot be {wanted}")]
    State {
        /// Number of the lease that was asked for.
        id: LeaseId,
        /// State of the lease now.
        state: LeaseState,
        /// State into which the request would bring the lease, or `renewed`.
        wanted: String,
    },
    /// The registry cannot be reached, or does not work now.
    #[error("cannot use the registry at {place}: {why}")]
    Unusable {
        /// Address of the registry that cannot be used.
        place: String,
        /// Error of the connection, or the registry's refusal.
        why: String,
    },
}

pub(super) fn value(field: &str, why: impl Into<String>) -> RegistryError {
    RegistryError::Value {
        field: field.into(),
        why: why.into(),
    }
}

/// Returns the error for a lease that does not exist, and for a lease of another owner, so that
/// callers do not learn of it.
pub(super) fn no_lease(id: LeaseId, who: &str) -> RegistryError {
    let who = who.to_owned();
    RegistryError::NoLease { id, who }
}

pub(super) fn wrong_state(id: LeaseId, state: LeaseState, wanted: &str) -> RegistryError {
    let wanted = wanted.to_owned();
    RegistryError::State { id, state, wanted }
}

/// Checks the name of a host or VM, which may come from another host and become part of paths and
/// logs: 1 to 64 letters, digits, `.`, `_` or `-`. `field`: what is named, for the error message.
pub fn check_name(field: &str, name: &str) -> Result<()> {
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

/// Checks that a size in bytes is between `least` and 1 PiB.
pub fn check_bytes(bytes: u64, least: u64) -> Result<()> {
    if (least..=MAX_BYTES).contains(&bytes) {
        return Ok(());
    }
    // Three digits are not enough to tell a size just below the limit from the limit.
    let why = format!(
        "{} ({bytes} bytes) is not possible; give {} to {}",
        ByteSize(bytes),
        ByteSize(least),
        ByteSize(MAX_BYTES)
    );
    Err(value("bytes", why))
}

/// Checks that a borrower that holds `leases` leases may take another one.
pub(super) fn check_leases(borrower: &str, leases: usize) -> Result<()> {
    if leases < MOST_OF_BORROWER {
        return Ok(());
    }
    Err(value(
        "borrower",
        format!(
            "host '{borrower}' holds {leases} leases, and a host may hold {MOST_OF_BORROWER}; return some of them (memfold return)"
        ),
    ))
}

/// Checks that a time until a deadline is at most [`MAX_TTL`], and returns it in milliseconds.
pub fn check_ttl(ttl: Duration) -> Result<u64> {
    if ttl <= MAX_TTL {
        return Ok(ms(ttl));
    }
    Err(value("ttl", format!("longer than {} s", MAX_TTL.as_secs())))
}

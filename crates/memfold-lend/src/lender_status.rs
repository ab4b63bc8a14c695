//! Options of a lender, and its status for the API and the command line.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use serde::{Deserialize, Serialize};

use super::endpoint::Listen;

/// Options of a lender: how much RAM it lends, and where its exports listen.
#[derive(Clone, Debug)]
pub struct LenderOptions {
    /// Name of this host in the registry.
    pub host: String,
    /// Maximum number of bytes to lend.
    pub max_bytes: u64,
    /// Addresses that exports listen on.
    pub listen: Listen,
    /// Directory for exports' files. No other lender may use it.
    pub directory: PathBuf,
    /// Bytes that this host's VMs may claim at once by writing to shared pages. The ledger updates
    /// the value.
    pub owed: Arc<AtomicU64>,
    /// Number of this host's guests that are short of memory. The daemon updates the value.
    pub short_guests: Arc<AtomicU32>,
}

/// Status of a lender.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderStatus {
    /// Name of the lender's host.
    pub host: String,
    /// Maximum number of bytes to lend.
    pub max_bytes: u64,
    /// Bytes that this lender offers now, lent bytes included.
    pub offer_bytes: u64,
    /// Size of all exports now, in bytes. Their memory is allocated and locked.
    pub lent_bytes: u64,
    /// Bytes that the lender has asked borrowers to give back.
    pub recalled_bytes: u64,
    /// Addresses that exports listen on, as text for the operator.
    #[serde(default)]
    pub listens: String,
    /// Reason why the lender offers no more.
    pub why: String,
    /// Description of the lender's present problem, if there is one.
    pub problem: Option<String>,
    /// Number of exports that this daemon has ended: returned, expired, or failed.
    pub ended: u64,
    /// Number of ended exports that failed: their process ended or was stopped.
    pub failed: u64,
    /// Number of connections to exports that broke off or were refused, such as connections of
    /// strangers without the key.
    #[serde(default)]
    pub refused: u64,
    /// Whether the lender is taking all memory back and will then stop.
    pub is_ending: bool,
}

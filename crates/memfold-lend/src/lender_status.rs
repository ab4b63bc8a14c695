//! Options of a lending host, and the status of its lending that the API and the command line show.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use serde::{Deserialize, Serialize};

use super::endpoint::Listen;

/// How much RAM a lender may lend, and where its exports listen.
#[derive(Clone, Debug)]
pub struct LenderOptions {
    /// Name of the lender's host in the registry.
    pub host: String,
    /// Most bytes that the lender may lend.
    pub max_bytes: u64,
    /// Addresses and protocol of the lender's exports.
    pub listen: Listen,
    /// Directory for the files of the lender's exports. No other lender may use it.
    pub directory: PathBuf,
    /// Bytes that the VMs of the lender's host may claim at once by writing to shared pages. The
    /// daemon updates the value.
    pub owed: Arc<AtomicU64>,
    /// Number of guests on the lender's host that are short of memory. The daemon updates the
    /// value.
    pub short_guests: Arc<AtomicU32>,
    /// Bytes of lent memory that right-sizing wants back for the VMs of the lender's host. The
    /// daemon updates the value.
    pub wanted_back: Arc<AtomicU64>,
    /// Bytes that must stay available on the lender's host beside what it offers, so that lending
    /// does not cause what right-sizing takes back. The daemon updates the value.
    pub kept: Arc<AtomicU64>,
}

/// What a lender offers, has lent and takes back at this moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderStatus {
    /// Name of the lender's host.
    pub host: String,
    /// Most bytes that the lender may lend.
    pub max_bytes: u64,
    /// Bytes that the lender offers now, including those that are lent already.
    pub offer_bytes: u64,
    /// Size of all exports of the lender now, in bytes. Their memory is allocated and locked.
    pub lent_bytes: u64,
    /// Size of all leases that the lender has asked borrowers to give back and that have not ended,
    /// in bytes.
    pub recalled_bytes: u64,
    /// Addresses that the lender's exports listen on, as text for the operator.
    #[serde(default)]
    pub listens: String,
    /// Reason why the lender offers no more than `offer_bytes`, as text for the operator.
    pub why: String,
    /// What the lender's present problem is, as text; null: there is none.
    pub problem: Option<String>,
    /// Number of the lender's exports that have ended since its start, for any reason.
    pub ended: u64,
    /// Number of the lender's exports that failed: their process did not become ready, ended, or
    /// was stopped.
    pub failed: u64,
    /// Number of connections to the lender's exports that broke off or were refused, such as
    /// connections of strangers without the key.
    #[serde(default)]
    pub refused: u64,
    /// Whether the lender takes all memory back and will then stop.
    pub is_ending: bool,
}

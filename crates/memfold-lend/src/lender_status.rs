//! Status of a lender, for the API and the command line.

use serde::{Deserialize, Serialize};

/// Status of a lender.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderStatus {
    /// Name of the lender's host.
    pub host: String,
    /// Most bytes to lend.
    pub max_bytes: u64,
    /// Bytes offered now, lent ones included.
    pub offer_bytes: u64,
    /// Bytes exported now. They are allocated and locked.
    pub lent_bytes: u64,
    /// Bytes that borrowers have been asked to give back.
    pub recalled_bytes: u64,
    /// Description of the addresses that exports listen on.
    #[serde(default)]
    pub listens: String,
    /// Reason why no more is offered.
    pub why: String,
    /// Description of a problem, if there is one.
    pub problem: Option<String>,
    /// Number of exports that this daemon has ended: given back, expired, or failed.
    pub ended: u64,
    /// Number of these that failed: their process ended or was stopped.
    pub failed: u64,
    /// Number of connections to exports that broke off or were refused, such as those of strangers
    /// without the key.
    #[serde(default)]
    pub refused: u64,
    /// Whether the lender takes everything back and then stops.
    pub is_ending: bool,
}

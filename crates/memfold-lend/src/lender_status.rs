//! Status of a lender, for the API and the command line.

use serde::{Deserialize, Serialize};

/// Status of a lender.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderStatus {
    /// Name of the host.
    pub host: String,
    /// Most bytes to lend.
    pub max_bytes: u64,
    /// Bytes offered now, lent ones included.
    pub offer_bytes: u64,
    /// Bytes exported now: allocated and locked.
    pub lent_bytes: u64,
    /// Bytes that borrowers are to give back.
    pub recalled_bytes: u64,
    /// Where exports listen, in words.
    #[serde(default)]
    pub listens: String,
    /// Why no more is offered.
    pub why: String,
    /// What is wrong, if anything is.
    pub problem: Option<String>,
    /// Exports that this daemon has ended, because they were given back, were over, or had failed.
    pub ended: u64,
    /// Of these, those that had failed: their process ended or stood still.
    pub failed: u64,
    /// Connections to exports that broke off or were refused: strangers, without the key.
    #[serde(default)]
    pub refused: u64,
    /// Whether it takes everything back and lends no more.
    pub is_ending: bool,
}

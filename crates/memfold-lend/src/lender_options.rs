//! Options of a lender: how much RAM it lends, and where its exports listen.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::listen::Listen;

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

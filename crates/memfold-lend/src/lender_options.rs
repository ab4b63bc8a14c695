//! Options of a lender: how much it lends and where its exports listen.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::listen::Listen;

/// Options of a lender: how much it lends and where its exports listen.
#[derive(Clone, Debug)]
pub struct LenderOptions {
    /// This host's name.
    pub host: String,
    /// Most bytes to lend.
    pub max_bytes: u64,
    /// Where exports listen.
    pub listen: Listen,
    /// Directory for exports' files, this lender's alone.
    pub directory: PathBuf,
    /// What this host's VMs may call in at once, in bytes; whoever knows keeps it up to date.
    pub owed: Arc<AtomicU64>,
    /// How many guests of this host lack memory themselves; kept up to date likewise.
    pub short_guests: Arc<AtomicU32>,
}

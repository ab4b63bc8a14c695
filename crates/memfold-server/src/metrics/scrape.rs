//! Data of one scrape.

use std::sync::Arc;

use super::process::Process;
use memfold_daemon::Figures;

use crate::access::RefusedCounts;

/// Data of one scrape.
#[derive(Debug)]
pub(super) struct Scrape {
    pub figures: Arc<Figures>,
    pub process: Process,
    pub refused: RefusedCounts,
}

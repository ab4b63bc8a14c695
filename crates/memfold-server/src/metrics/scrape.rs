//! What one scrape shows.

use std::sync::Arc;

use super::process::Process;
use memfold_daemon::Figures;

use crate::access::RefusedCounts;

/// What one scrape shows.
#[derive(Debug)]
pub(super) struct Scrape {
    pub figures: Arc<Figures>,
    pub process: Process,
    pub refused: RefusedCounts,
}

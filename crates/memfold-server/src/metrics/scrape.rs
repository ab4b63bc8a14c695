//! The data from which one scrape's metrics are written.

use std::sync::Arc;

use super::process::Process;
use memfold_daemon::Figures;

use crate::access::RefusedCounts;

/// The data from which one scrape's metrics are written.
#[derive(Debug)]
pub(super) struct Scrape {
    pub figures: Arc<Figures>,
    pub process: Process,
    pub refused: RefusedCounts,
}

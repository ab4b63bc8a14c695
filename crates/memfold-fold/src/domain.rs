//! What the fold engine knows about one trust domain: its page store, and the index of file
//! contents that its VMs can share.

use std::time::Instant;

use memfold_store::{Source, Store, StoreError};
use memfold_units::StorePage;
use tracing::warn;

use super::candidates::Candidates;
use super::content::Contents;
use super::image::file_number;

pub(super) struct Domain {
    pub store: Store,
    pub contents: Contents,
    pub candidates: Candidates,
    pub full: bool,
    /// Processes that mapped the page store when this daemon adopted it. While one of them lives
    /// that is no VM of this engine, or whose library the engine cannot reach, no page of the store
    /// is freed.
    pub guardians: Vec<rustix::process::Pid>,
    pub appended: u64,
    pub punched: u64,
    pub last_reclaim: Instant,
    /// Reason why the last reclaim freed nothing, which names the VM or process; `None` if the
    /// engine knew every mapping of the store.
    pub not_freed: Option<String>,
    /// First reserved page of the page store, and the guest pages to copy into the reserved pages
    /// before the batch folds anything; `None` if no page is reserved.
    pub reserved: Option<(StorePage, Vec<Source>)>,
    /// Earliest time of the next search for holes of the page store that can be filled again;
    /// `None` if the search need not wait.
    pub next_search: Option<Instant>,
}

impl Domain {
    /// Returns the number by which orders to the libraries name the page store.
    pub fn store_number(&self) -> u32 {
        let identity = self.store.identity();
        file_number(identity.dev, identity.ino)
    }
}

/// Logs a failure of a store once when the store becomes full, and not once for each page.
pub(super) fn note_store_error(domain_name: &str, domain: &mut Domain, error: &StoreError) {
    if !domain.full {
        warn!(domain = domain_name, error = %error, "page store accepts no new pages; raise --store-cap or free memory");
        domain.full = true;
    }
}

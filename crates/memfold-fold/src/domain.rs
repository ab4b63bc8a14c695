//! A trust domain: its page store, and what its VMs are thought to share.

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
    /// Processes that mapped the store when it was taken over from a former daemon. Nothing is
    /// punched while one of them lives that this engine doesn't know.
    pub guardians: Vec<rustix::process::Pid>,
    pub appended: u64,
    pub punched: u64,
    pub last_reclaim: Instant,
    /// Pages reserved in the store from the first on, to be filled before anything is folded.
    pub reserved: Option<(StorePage, Vec<Source>)>,
    /// When its holes may be searched again for room.
    pub next_search: Option<Instant>,
}

impl Domain {
    /// Number that fold orders name the store by.
    pub fn store_number(&self) -> u32 {
        let identity = self.store.identity();
        file_number(identity.dev, identity.ino)
    }
}

/// Logs a store failure once a state change, not once a page.
pub(super) fn note_store_error(domain_name: &str, domain: &mut Domain, error: &StoreError) {
    if !domain.full {
        warn!(domain = domain_name, error = %error, "page store takes no new content; raise --store-cap or free memory");
        domain.full = true;
    }
}

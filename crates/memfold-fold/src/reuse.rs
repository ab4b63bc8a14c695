//! Reuses freed pages (holes) of the page store's file. This is needed only after 16 TiB of pages
//! have been appended to the file, because then no new page number is left.
//!
//! A hole is reused only if no process maps this place of the file and no table of the fold engine
//! refers to it.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use memfold_store::mapped;
use memfold_units::{HUGE_PAGE_PAGES, StorePage};
use rustix::process::Pid;
use tracing::{info, warn};

use super::content::StorePageFacts;
use super::domain::Domain;
use super::state::Engine;
use super::task::BATCH_PAGES;

/// Maximum number of pages that a batch appends, including the alignment to a huge page.
const ROOM: u64 = BATCH_PAGES as u64 + HUGE_PAGE_PAGES;

/// Time after an unsuccessful search until the next search.
const SEARCH_INTERVAL: Duration = Duration::from_secs(60);

impl Engine {
    /// Ensures, as far as holes allow, that every page store has space for the pages of a batch.
    pub(super) fn make_room(&mut self) {
        let now = Instant::now();
        for (name, domain) in &mut self.domains {
            if domain.store.room() >= ROOM || domain.store.next_gap() {
                continue;
            }
            if domain.next_search.is_some_and(|next| now < next) {
                continue;
            }
            let vms = self.vms.values().filter(|vm| vm.domain == *name);
            match gaps(domain, vms.map(|vm| vm.guest.pid())) {
                Ok(gaps) => {
                    info!(
                        domain = name,
                        gaps = gaps.len(),
                        "page store has used all its page numbers; the numbers of freed pages are reused"
                    );
                    domain.store.reuse(gaps);
                }
                Err(error) => {
                    warn!(domain = name, %error, "cannot search the page store for freed pages to reuse; retrying in 60 s");
                }
            }
            if !domain.store.next_gap() {
                domain.next_search = Some(now + SEARCH_INTERVAL);
            }
        }
    }
}

/// Returns the holes of a store that may be filled again.
fn gaps(domain: &Domain, vms: impl Iterator<Item = Pid>) -> io::Result<Vec<Range<StorePage>>> {
    let huge = |page: u64| page / HUGE_PAGE_PAGES;
    let store = domain.store.identity();
    let mut used = HashSet::new();
    // VMs of a former daemon, which this daemon does not know, are included.
    for pid in mapped::processes(store)?.into_iter().chain(vms) {
        let mappings = match mapped::read(pid, store) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue, // the process has ended
            mappings => mappings?,
        };
        for mapping in mappings.store {
            let end = mapping.file_page + mapping.pages;
            used.extend(huge(mapping.file_page)..=huge(end - 1));
        }
    }
    let known = domain.contents.known_store_pages();
    let known = known.filter(|(_, facts)| *facts != StorePageFacts::default());
    used.extend(known.map(|(page, _)| huge(page.into())));
    let mut gaps: Vec<Range<StorePage>> = Vec::new();
    for hole in domain.store.holes().map_err(io::Error::other)? {
        for at in (huge(hole.start.0)..huge(hole.end.0)).filter(|at| !used.contains(at)) {
            let (start, end) = (
                StorePage(at * HUGE_PAGE_PAGES),
                StorePage((at + 1) * HUGE_PAGE_PAGES),
            );
            match gaps.last_mut().filter(|gap| gap.end == start) {
                Some(gap) => gap.end = end,
                None => gaps.push(start..end),
            }
        }
    }
    gaps.retain(|gap| gap.end.0 - gap.start.0 >= ROOM);
    Ok(gaps)
}

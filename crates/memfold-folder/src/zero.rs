//! Discards anonymous pages of guest RAM that hold only zeroes.
//!
//! Only pages that the page map shows as anonymous and in memory are examined, so no page is
//! swapped in and no hole is filled. A run of pages that seem to be zero is frozen, checked again,
//! and discarded. The guest then has empty memory there, which reads as zeroes.

use memfold_sys::pagemap::{Filter, Pagemap, Region, category};
use memfold_sys::region::Area;
use memfold_sys::userfaultfd::Userfaultfd;
use memfold_units::HUGE_PAGE_PAGES;
use memfold_wire::library::{MAX_RUN_PAGES, Range};

use crate::freeze::Staged;
use crate::ram::Kind;
use crate::state::{State, record_freeze};

/// Number of pages that are examined under one hold of the lock: the longest run.
pub(crate) const CHUNK_PAGES: u64 = MAX_RUN_PAGES as u64;

impl State {
    /// Examines one chunk (at most [`CHUNK_PAGES`]). Returns the numbers of examined and of
    /// discarded pages; `None` if the chunk is not RAM.
    pub(crate) fn drop_zero(
        &mut self,
        uffd: &Userfaultfd,
        pagemap: &Pagemap,
        chunk: &Range,
    ) -> Option<(u64, u64)> {
        let (_, area) = self.ram.find(chunk.hva, chunk.pages)?;
        let anonymous = Filter {
            all_of: category::PRESENT,
            none_of: category::FILE | category::ZERO | category::SWAPPED,
            ..Filter::default()
        };
        // The scan fails if the chunk was unmapped meanwhile; then no page is found.
        let regions = pagemap
            .scan(area.start(), area.end(), anonymous)
            .unwrap_or_default();
        let (mut scanned, mut dropped) = (0, 0);
        for region in regions {
            let part = area.part(region.start.pages_since(area.start()), region.pages());
            scanned += part.pages();
            dropped += self.drop_zero_in(uffd, &region, part);
        }
        Some((scanned, dropped))
    }

    fn drop_zero_in(&mut self, uffd: &Userfaultfd, region: &Region, part: Area) -> u64 {
        if region.is(category::HUGE) {
            // Discarding some of its pages would split the huge page, which costs the guest more
            // than the pages are worth.
            let whole = part.pages() == HUGE_PAGE_PAGES
                && part.start().0 % (HUGE_PAGE_PAGES * memfold_units::PAGE_SIZE) == 0;
            if !whole || part.zero_pages() < part.pages() {
                return 0;
            }
        }
        let mut dropped = 0;
        let mut at = 0;
        while at < part.pages() {
            let rest = part.after(at);
            let zeroes = rest.zero_pages();
            if zeroes > 0 {
                dropped += self.drop_run(uffd, rest.part(0, zeroes));
            }
            // The page after the run is not zero, or no longer in memory.
            at += zeroes + 1;
        }
        dropped
    }

    /// Discards the pages at the start of `run` that are still zero. Returns their number.
    fn drop_run(&mut self, uffd: &Userfaultfd, run: Area) -> u64 {
        let Some(staging) = self.staging.as_mut() else {
            return 0;
        };
        let anonymous = self
            .ram
            .find(run.start().0, run.pages())
            .is_some_and(|(block, area)| block.first_kind(area) == (Kind::Anonymous, area));
        if !anonymous {
            return 0;
        }
        let slot = staging.slot(run);
        let Ok((staged, _)) = Staged::freeze(uffd, &staging.pagemap, run, slot) else {
            return 0;
        };
        let zeroes = staged.contents().zero_pages();
        let frozen = staged.finish(zeroes, false);
        record_freeze(&mut self.stats, frozen);
        self.stats.zero_pages += zeroes;
        zeroes
    }
}

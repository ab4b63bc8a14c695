//! Where the runs of the study `mappings` lie in memory, and which bytes each page holds.
//!
//! Memory consists of equal *units* of 128 pages:
//!
//! ```text
//!   page  0    4    8                64                   112           128
//!         | run | run | ... 16 runs  | 48 ordinary pages   | 16 fresh    |
//!         folded, if the memory is   | first 24: the same  | never       |
//!         the folded one             | in every unit, so   | written, or |
//!                                    | KSM merges them     | discarded   |
//! ```
//!
//! Runs that are neighbours in memory are far apart in the page store, so each run is a mapping of
//! its own. In this way 60,000 runs fit into the kernel's default limit of 65,530 mappings.

use memfold_units::PAGE_BYTES;

use crate::random::Random;

/// Pages in a run. Guests' caches have mean runs of 5 to 10 pages.
pub const RUN_PAGES: u64 = 4;

const UNIT_RUNS: u64 = 16;
const SHARED_PAGES: u64 = UNIT_RUNS * RUN_PAGES;
const ORDINARY_PAGES: u64 = 48;
const FRESH_PAGES: u64 = 16;
pub const UNIT_PAGES: u64 = SHARED_PAGES + ORDINARY_PAGES + FRESH_PAGES;

/// Ordinary pages at the start of each unit's ordinary pages that are the same in every unit.
const EQUAL_PAGES: u64 = 24;

/// Of each so many runs, one is *spare*: the measured work discards it, or folds it, and the
/// touching thread leaves it alone.
pub const SPARE: u64 = 10;

/// Range of pages of the memory: the first page's index, and the number of pages.
pub type Pages = (u64, u64);

/// The layout of memory with this number of runs.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    units: u64,
}

#[allow(clippy::unused_self)] // callers need not know which places depend on the size
impl Layout {
    /// Creates a layout of at least `runs` runs, in whole units.
    pub const fn new(runs: u64) -> Self {
        Self {
            units: runs.div_ceil(UNIT_RUNS),
        }
    }

    pub const fn units(self) -> u64 {
        self.units
    }

    pub const fn runs(self) -> u64 {
        self.units * UNIT_RUNS
    }

    pub const fn pages(self) -> u64 {
        self.units * UNIT_PAGES
    }

    pub const fn run(self, run: u64) -> Pages {
        let first = run / UNIT_RUNS * UNIT_PAGES + run % UNIT_RUNS * RUN_PAGES;
        (first, RUN_PAGES)
    }

    /// Returns the pages of all runs of a unit.
    pub const fn shared(self, unit: u64) -> Pages {
        (unit * UNIT_PAGES, SHARED_PAGES)
    }

    /// Returns the fresh pages of a unit.
    pub const fn fresh(self, unit: u64) -> Pages {
        (
            unit * UNIT_PAGES + SHARED_PAGES + ORDINARY_PAGES,
            FRESH_PAGES,
        )
    }

    /// Returns the pages of a unit that have bytes: all but the fresh ones.
    pub const fn filled(self, unit: u64) -> Pages {
        (unit * UNIT_PAGES, SHARED_PAGES + ORDINARY_PAGES)
    }

    /// Returns fresh page number `n`, counted over all units.
    pub const fn fresh_page(self, n: u64) -> u64 {
        self.fresh(n / FRESH_PAGES % self.units).0 + n % FRESH_PAGES
    }

    pub const fn fresh_pages(self) -> u64 {
        self.units * FRESH_PAGES
    }

    /// Returns ordinary page number `n`, counted over all units.
    pub const fn ordinary_page(self, n: u64) -> u64 {
        n / ORDINARY_PAGES % self.units * UNIT_PAGES + SHARED_PAGES + n % ORDINARY_PAGES
    }

    pub const fn ordinary_pages(self) -> u64 {
        self.units * ORDINARY_PAGES
    }

    /// Returns all runs in the order in which they lie in the page store.
    pub fn in_store_order(self) -> impl Iterator<Item = u64> {
        (0..UNIT_RUNS).flat_map(move |at| (0..self.units).map(move |unit| unit * UNIT_RUNS + at))
    }

    /// Returns the spare runs, which are in even and odd units.
    pub fn spare(self) -> impl Iterator<Item = u64> {
        (0..self.runs()).filter(|run| run % SPARE == 0)
    }

    /// Returns a run of a unit with even (`odd` 0) or odd (1) number, which is not spare. `n`: any
    /// number.
    pub const fn touched_run(self, n: u64, odd: u64) -> u64 {
        let unit = (n / UNIT_RUNS * 2 + odd) % (self.units / 2 * 2);
        let run = unit * UNIT_RUNS + n % UNIT_RUNS;
        if run % SPARE == 0 { run + 1 } else { run }
    }
}

/// Returns a generator of the words that a page of the memory holds.
fn random(page: u64) -> Random {
    let (unit, at) = (page / UNIT_PAGES, page % UNIT_PAGES);
    let is_equal = (SHARED_PAGES..SHARED_PAGES + EQUAL_PAGES).contains(&at);
    let id = if is_equal {
        at
    } else {
        at + (unit + 1) * UNIT_PAGES
    };
    Random::new((id + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// Returns the first word of a page of the memory.
pub fn first_word(page: u64) -> u64 {
    random(page).number()
}

/// Returns all words of a page of the memory.
pub fn words(page: u64) -> [u64; PAGE_BYTES / 8] {
    let mut random = random(page);
    std::array::from_fn(|_| random.number())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_page_has_one_place_in_its_unit_and_runs_that_touch_are_apart_in_the_store() {
        let layout = Layout::new(60);
        assert_eq!((layout.units(), layout.runs()), (4, 64));
        let mut pages = BTreeSet::new();
        for run in 0..layout.runs() {
            let (first, count) = layout.run(run);
            pages.extend(first..first + count);
        }
        pages.extend((0..layout.fresh_pages()).map(|n| layout.fresh_page(n)));
        pages.extend((0..layout.ordinary_pages()).map(|n| layout.ordinary_page(n)));
        assert_eq!(pages, (0..layout.pages()).collect());
        let order: Vec<u64> = layout.in_store_order().collect();
        assert_eq!(order.iter().collect::<BTreeSet<_>>().len(), 64);
        for pair in order.windows(2) {
            let (first, count) = layout.run(pair[0]);
            assert_ne!(first + count, layout.run(pair[1]).0);
        }
    }

    #[test]
    fn the_runs_that_are_touched_are_not_spare_and_are_in_units_of_the_wanted_parity() {
        let layout = Layout::new(320);
        for n in 0..1000 {
            for odd in [0, 1] {
                let run = layout.touched_run(n, odd);
                assert!(run < layout.runs() && run % SPARE != 0, "{run}");
                assert_eq!(run / UNIT_RUNS % 2, odd, "{run}");
            }
        }
    }

    #[test]
    fn only_the_first_ordinary_pages_have_the_same_bytes_in_every_unit() {
        let same = |at| words(at) == words(at + UNIT_PAGES);
        assert!(same(SHARED_PAGES) && same(SHARED_PAGES + EQUAL_PAGES - 1));
        assert!(!same(0) && !same(SHARED_PAGES + EQUAL_PAGES));
        assert_eq!(words(77)[0], first_word(77));
    }
}

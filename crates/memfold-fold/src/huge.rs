//! Decides which transparent huge pages of a VM's RAM the fold engine may split. A huge page must
//! be split before some of its small pages can be folded.

use std::collections::{HashMap, HashSet};

use memfold_sys::pagemap::{Filter, Pagemap, category};
use memfold_units::{HUGE_PAGE_PAGES, Hva, PAGE_SIZE};

use super::hint_stack::Hint;
use super::vm_table::{Index, VmTable};

/// Minimum number of pages of a huge page that must cache files before the huge page is split: 1/8
/// of its pages. With fewer pages, the lost TLB reach costs the guest more than the saved memory is
/// worth.
pub const HUGE_SPLIT_PAGES: u16 = 64;

/// Number of a 2 MiB region of QEMU's memory: the region's address divided by 2 MiB.
type Region = u64;

/// Records which transparent huge pages of one VM's RAM may be split, and which stay whole.
#[derive(Debug, Default)]
pub struct HugePages {
    /// Regions that are not huge pages, or are worth splitting. A folded region never becomes a
    /// huge page again, because it consists of several mappings.
    split: HashSet<Region>,
    /// Huge pages that were left whole. They are checked again when more of their pages cache
    /// files.
    kept: HashSet<Region>,
    /// Huge pages that this batch left whole, each with the number of pages that were not folded
    /// because of it.
    batch: HashMap<Region, u64>,
}

impl HugePages {
    /// Returns whether guest page `at`, which is not folded, must stay unfolded because it is in a
    /// huge page with too few pages that cache files. `is_huge` returns whether the 2 MiB at an
    /// address are one huge page now; it is called once for each 2 MiB and batch.
    pub fn spares(
        &mut self,
        table: &VmTable,
        at: Index,
        is_huge: impl FnOnce(Hva) -> bool,
    ) -> bool {
        let Some(hva) = table.hva(at) else {
            return false;
        };
        let region = hva.0 / (HUGE_PAGE_PAGES * PAGE_SIZE);
        if self.split.contains(&region) {
            return false;
        }
        if let Some(left) = self.batch.get_mut(&region) {
            *left += 1;
            return true;
        }
        let start = Hva(region * HUGE_PAGE_PAGES * PAGE_SIZE);
        if cached_in(table, start) >= HUGE_SPLIT_PAGES || !is_huge(start) {
            self.split.insert(region);
            return false;
        }
        self.kept.insert(region);
        self.batch.insert(region, 1);
        true
    }

    /// Ends a batch. Returns the number of pages that the batch did not fold, to keep huge pages
    /// whole.
    pub fn end_batch(&mut self) -> u64 {
        self.batch.drain().map(|(_, left)| left).sum()
    }

    /// Returns hints for the cached pages of huge pages that were left whole before and are worth
    /// splitting now. `hint` makes a hint from the number of a file and a page of the file.
    pub fn worth_it_now(&mut self, table: &VmTable, hint: impl Fn(u32, u32) -> Hint) -> Vec<Hint> {
        let mut hints = Vec::new();
        let worth = |region: &Region| {
            let start = Hva(region * HUGE_PAGE_PAGES * PAGE_SIZE);
            cached_in(table, start) >= HUGE_SPLIT_PAGES
        };
        let ready: Vec<Region> = self.kept.iter().copied().filter(worth).collect();
        for region in ready {
            self.kept.remove(&region);
            self.split.insert(region);
            let start = Hva(region * HUGE_PAGE_PAGES * PAGE_SIZE);
            let pages = (0..HUGE_PAGE_PAGES).filter_map(|step| {
                let at = table.index_at(start.add_pages(step))?;
                table.cached(at)
            });
            hints.extend(pages.map(|(file, page)| hint(file, page)));
        }
        hints
    }

    /// Drops all records of huge pages, because the layout of the VM's RAM has changed.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Returns the number of pages in the region that cache files.
fn cached_in(table: &VmTable, start: Hva) -> u16 {
    (0..HUGE_PAGE_PAGES)
        .filter_map(|step| table.index_at(start.add_pages(step)))
        .map(|at| u16::from(table.cached(at).is_some()))
        .sum()
}

/// Returns whether the 2 MiB at `hva` of the process with page map `map` are one huge page.
pub fn is_huge(map: &Pagemap, hva: Hva) -> bool {
    let filter = Filter {
        all_of: category::HUGE,
        ..Filter::default()
    };
    map.scan(hva, hva.add_pages(HUGE_PAGE_PAGES), filter)
        .is_ok_and(|regions| !regions.is_empty())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use memfold_vm::RamLayout;

    fn table() -> VmTable {
        VmTable::new(RamLayout::one_block(Hva(0x7000_0000_0000), 4096))
    }

    #[test]
    fn a_huge_page_is_split_only_if_an_eighth_of_it_can_be_folded() {
        let mut table = table();
        for index in (0..10).chain(600..670).chain(1030..1040) {
            assert!(table.cache(index, 1, index));
        }
        let mut huge = HugePages::default();
        // The first two regions are huge pages; the third is not.
        let spares = |huge: &mut HugePages, table: &VmTable, at| {
            huge.spares(table, at, |hva| hva < Hva(0x7000_0040_0000))
        };
        assert!(spares(&mut huge, &table, 0) && spares(&mut huge, &table, 1));
        assert!(!spares(&mut huge, &table, 600) && !spares(&mut huge, &table, 1030));
        assert_eq!(huge.end_batch(), 2);

        let hint = |file, page| Hint {
            file,
            page,
            pages: 1,
            at: Instant::now(),
            tries: 0,
        };
        assert!(huge.worth_it_now(&table, hint).is_empty());
        for index in 10..64 {
            assert!(table.cache(index, 1, index));
        }
        assert_eq!(huge.worth_it_now(&table, hint).len(), 64);
        assert!(!spares(&mut huge, &table, 0));
        assert!(huge.worth_it_now(&table, hint).is_empty());
    }
}

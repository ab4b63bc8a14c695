//! Which pages of the page store VMs may still show. All other pages may be freed.

use super::vm_table::{PIECE, VmTable};

/// Calls `each` with the pages of the page store that pages of a VM may still show: the VM maps
/// them, and had no private copy at the last sync with the kernel's page tables. Each call has a
/// piece of 64 store pages, and one bit for each page that is needed.
///
/// The set may be too large, but not too small, however old the last sync is: a guest page with a
/// private copy shows the store again only if the engine maps the page anew, which
/// [`VmTable::set_mapped`] records. If QEMU discards the page, memfold's library puts anonymous
/// memory there. What agents report plays no part.
pub(super) fn needed_store_pages(table: &VmTable, mut each: impl FnMut(u32, u64)) {
    for (first, pages, mut store_page) in table.mapped_runs() {
        let (mut at, end) = (first, first + pages);
        while at < end {
            // A step stays within one word of the set of guest pages, and within one piece of the
            // store.
            let step = (PIECE - at % PIECE).min(PIECE - store_page % PIECE);
            let step = step.min(end - at);
            let copied = table.copied(at as usize / 64) >> (at % PIECE);
            let needed = u64::MAX >> (PIECE - step) & !copied;
            if needed != 0 {
                each(store_page / PIECE, needed << (store_page % PIECE));
            }
            at += step;
            store_page += step;
        }
    }
}

#[cfg(test)]
mod tests {
    use memfold_units::Hva;
    use memfold_vm::RamLayout;

    use super::*;
    use crate::vm_table::Mapped;

    fn table() -> VmTable {
        VmTable::new(RamLayout::one_block(Hva(0x7000_0000_0000), 2048))
    }

    #[test]
    fn store_pages_are_needed_until_a_sync_finds_private_copies_whatever_agents_report() {
        let mut t = table();
        let needed = |t: &VmTable| {
            let mut pages = Vec::new();
            needed_store_pages(t, |piece, bits| {
                let set = (0..64).filter(move |page| bits >> page & 1 == 1);
                pages.extend(set.map(|page| piece * 64 + page));
            });
            pages.sort_unstable();
            pages
        };
        for at in 100..300 {
            let store_page = 1000 + at * 3 % 200 + at / 2;
            let shared = true;
            t.set_mapped(at, Some(Mapped { store_page, shared }));
        }
        for at in 500..700 {
            let store_page = 5_000 + at;
            let shared = true;
            t.set_mapped(at, Some(Mapped { store_page, shared }));
        }
        let mut own = vec![0_u64; 2048 / 64];
        for at in (150..200).chain(510..600) {
            own[at / 64] |= 1 << (at % 64);
        }
        t.set_copied(&own);
        // An agent says that pages hold something else now, which need not be true.
        for at in 250..650 {
            assert!(t.cache(at, 9, at));
        }
        let mut wanted: Vec<u32> = (100..300_u32)
            .chain(500..700)
            .filter(|at| own[*at as usize / 64] >> (at % 64) & 1 == 0)
            .map(|at| t.mapped(at).unwrap().store_page)
            .collect();
        wanted.sort_unstable();
        wanted.dedup();
        let mut found = needed(&t);
        found.dedup();
        assert_eq!(found, wanted);
        // A page that is folded again shows the store again.
        let page = Mapped {
            store_page: 9_000,
            shared: true,
        };
        t.set_mapped(520, Some(page));
        assert!(needed(&t).contains(&9_000));
        t.set_mapped(520, None);
        assert!(!needed(&t).contains(&9_000));
    }
}

//! Discards guest pages that hold only zeroes, so that the host has their memory back.
//!
//! This module orders memfold's library in QEMU to find, freeze, verify and discard such pages.
//! [`super::zero_pass`] decides when.

use std::time::Instant;

use memfold_sys::pagemap::Filter;
use memfold_units::Hva;
use memfold_wire::library::{MAX_RUNS, Order, Range, Reply};

use super::guest::VmId;
use super::schedule::Work;
use super::state::{Engine, VmState};
use super::zero_pass::resident_pages;

/// Maximum number of pages that one order examines (64 MiB): a few milliseconds of the library's
/// thread.
const ORDER_PAGES: u64 = 16_384;

impl Engine {
    /// Sends the next order of a pass. Returns whether an order was due.
    pub(super) fn zero_due(&mut self, now: Instant) -> bool {
        let Some(id) = self.first_due(Work::Zero, now) else {
            return false;
        };
        self.zero_step(id, now);
        true
    }

    fn zero_step(&mut self, id: VmId, now: Instant) {
        let Some(vm) = self.vms.get_mut(&id) else {
            return;
        };
        if vm.zero.rest.is_empty() {
            vm.zero.rest = candidates(vm);
        }
        let mut ranges = Vec::new();
        let mut pages = 0;
        while let Some(range) = vm.zero.rest.pop() {
            pages += range.pages;
            ranges.push(range);
            if pages >= ORDER_PAGES || ranges.len() == MAX_RUNS {
                break;
            }
        }
        if !ranges.is_empty() {
            // Some pages may have been discarded or folded since the pass began.
            let copies = scan(vm, &ranges, Filter::COPIES).unwrap_or_default();
            let order = Order::DropZero { ranges };
            match vm.guest.order(&order, None) {
                Ok(Reply::Zero {
                    dropped, cpu_ns, ..
                }) => {
                    vm.stats.zero_pages += dropped.min(pages);
                    if dropped > 0 {
                        mark_gone(vm, &copies);
                    }
                    self.library_cpu_ns += cpu_ns;
                }
                Ok(_) => {}
                Err(error) => return self.lost(id, &error),
            }
        }
        if vm.zero.rest.is_empty() {
            vm.zero.due = None;
            vm.zero.last = now;
            vm.zero.resident_pages = resident_pages(vm.guest.pid());
        }
    }
}

/// Marks the pages in `copies`, which had private copies before an order, as zero pages if they are
/// neither in memory nor in swap now. Pages that map the store are no zero pages: QEMU may discard
/// them, too.
fn mark_gone(vm: &mut VmState, copies: &[Range]) {
    for range in copies {
        let end = Hva(range.hva).add_pages(range.pages);
        let Ok(there) = scan(vm, std::slice::from_ref(range), Filter::THERE) else {
            return;
        };
        let mut from = Hva(range.hva);
        let there = there.iter().map(|r| (Hva(r.hva), r.pages));
        for (next, pages) in there.chain([(end, 0)]) {
            if let Some(first) = vm.table.index_at(from) {
                let gone = u32::try_from(next.pages_since(from)).unwrap_or(0);
                for at in first..first.saturating_add(gone) {
                    if vm.table.mapped(at).is_none() {
                        vm.table.set_zero(at);
                    }
                }
            }
            from = next.add_pages(pages);
        }
    }
}

/// Returns the pages in `ranges` that pass a filter.
fn scan(vm: &VmState, ranges: &[Range], filter: Filter) -> std::io::Result<Vec<Range>> {
    let map = vm.pagemap.as_ref().ok_or(std::io::ErrorKind::NotFound)?;
    let mut found = Vec::new();
    for range in ranges {
        let end = Hva(range.hva).add_pages(range.pages);
        let regions = map.scan(Hva(range.hva), end, filter)?;
        found.extend(regions.iter().map(|region| Range {
            hva: region.start.0,
            pages: region.pages(),
        }));
    }
    Ok(found)
}

/// Returns the anonymous pages of a VM that are in memory, in ranges of at most [`ORDER_PAGES`].
fn candidates(vm: &VmState) -> Vec<Range> {
    let Some(map) = &vm.pagemap else {
        return Vec::new();
    };
    let mut ranges = Vec::new();
    for slot in &vm.table.layout().slots {
        let Ok(regions) = map.scan(slot.hva, slot.hva.add_pages(slot.pages), Filter::COPIES) else {
            return Vec::new();
        };
        for region in regions {
            let mut from = region.start;
            while from < region.end {
                let pages = region.end.pages_since(from).min(ORDER_PAGES);
                ranges.push(Range { hva: from.0, pages });
                from = from.add_pages(pages);
            }
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use memfold_sys::region::Area;
    use memfold_wire::library::Advice;

    use super::*;
    use crate::random_changes::{FakeGuest, ram};
    use crate::settings::EngineSettings;
    use crate::vm_table::Mapped;

    const PAGES: u32 = 16;

    fn discard(pages: Area) {
        pages.advise(rustix::mm::Advice::LinuxDontNeed).unwrap();
    }

    #[test]
    fn only_pages_that_an_order_discarded_and_that_map_no_store_page_count_as_zero_pages() {
        let (ram, layout) = ram(PAGES);
        let mut engine = Engine::new(EngineSettings::default());
        let area = ram.area();
        // Each search for zero pages discards pages 9 and 12.
        let guest = Box::new(FakeGuest::new(move |order| {
            let Order::DropZero { .. } = order else {
                return Reply::Ok;
            };
            discard(area.part(9, 1));
            discard(area.part(12, 1));
            Reply::Zero {
                scanned: 8,
                dropped: 1,
                cpu_ns: 0,
            }
        }));
        let (name, advice) = ("vm1".to_owned(), [Advice::default()]);
        engine.add(1, name, None, layout, &advice, guest, None);
        let vm = engine.vms.get_mut(&1).unwrap();
        vm.zero.rest = candidates(vm);
        assert_eq!(vm.zero.rest[0].pages, 16);
        // The guest's balloon takes pages after the list was made, and page 12 was folded.
        discard(ram.area().part(0, 8));
        let mapped = Mapped {
            store_page: 3,
            shared: true,
        };
        vm.table.set_mapped(12, Some(mapped));
        engine.zero_step(1, Instant::now());
        let vm = engine.vms.get_mut(&1).unwrap();
        assert_eq!(vm.table.keep_zero(&[0]), 1);
        assert_eq!(vm.table.keep_zero(&[1 << 9]), 0);
    }
}

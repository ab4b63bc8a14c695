//! Discards guest pages that hold only zeroes, so that the host has their memory back.
//!
//! This module orders memfold's library in QEMU to find, freeze, verify and discard such pages.
//! [`super::zero_pass`] decides when.

use std::time::Instant;

use memfold_sys::pagemap::{Filter, category};
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
            let order = Order::DropZero {
                ranges: ranges.clone(),
            };
            match vm.guest.order(&order, None) {
                Ok(Reply::Zero {
                    dropped, cpu_ns, ..
                }) => {
                    vm.stats.zero_pages += dropped.min(pages);
                    if dropped > 0 {
                        mark_gone(vm, &ranges);
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

/// Marks the pages in `ranges` that are no longer in memory as zero pages.
fn mark_gone(vm: &mut VmState, ranges: &[Range]) {
    let filter = Filter {
        all_of: category::PRESENT,
        ..Filter::default()
    };
    for range in ranges {
        let (start, end) = (Hva(range.hva), Hva(range.hva).add_pages(range.pages));
        let scanned = vm.pagemap.as_ref().map(|map| map.scan(start, end, filter));
        let Some(Ok(there)) = scanned else {
            return;
        };
        let mut from = start;
        for (gone, next) in there.iter().map(|r| (r.start, r.end)).chain([(end, end)]) {
            let pages = gone.pages_since(from);
            if let Some(first) = vm.table.index_at(from) {
                let end = first.saturating_add(u32::try_from(pages).unwrap_or(0));
                (first..end).for_each(|at| vm.table.set_zero(at));
            }
            from = next;
        }
    }
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

//! Gives the pages of a VM's RAM numbers without gaps, although the RAM consists of several memory
//! slots. The numbers are indexes into the fold engine's tables.

use memfold_units::{Hva, Pfn};
use memfold_vm::RamLayout;

/// Number of a page of guest RAM, counted from 0 without gaps through all memory slots.
pub type Index = u32;

/// Numbering of the pages of one VM's RAM (at most 16 TiB).
#[derive(Debug)]
pub(super) struct Numbering {
    pub(super) layout: RamLayout,
    /// Index of each slot's first page, and the total number of pages at the end.
    starts: Vec<u32>,
}

impl Numbering {
    pub fn new(layout: RamLayout) -> Self {
        let mut starts = vec![0];
        let mut total = 0_u32;
        for slot in &layout.slots {
            total = total.saturating_add(u32::try_from(slot.pages).unwrap_or(u32::MAX));
            starts.push(total);
        }
        Self { layout, starts }
    }

    /// Returns the size of the VM's RAM in pages.
    pub fn pages(&self) -> u32 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Returns the number of guest page frame `pfn`; `None` for a page frame outside RAM.
    pub fn index_of(&self, pfn: Pfn) -> Option<Index> {
        let slots = &self.layout.slots;
        let at = slots.partition_point(|s| s.pfn <= pfn).checked_sub(1)?;
        let inside = pfn.pages_since(slots[at].pfn);
        let inside = u32::try_from(inside)
            .ok()
            .filter(|_| inside < slots[at].pages)?;
        Some(self.starts[at] + inside)
    }

    /// Returns the host virtual address in QEMU of page number `at`; `None` for a number outside
    /// RAM.
    pub fn hva(&self, at: Index) -> Option<Hva> {
        let slot = self.starts.partition_point(|&s| s <= at).checked_sub(1)?;
        let first = self.layout.slots.get(slot)?.hva;
        Some(first.add_pages(u64::from(at - self.starts[slot])))
    }

    /// Returns the number after the last page of the memory slot that contains page number `at`;
    /// `None` for a number outside RAM.
    pub fn slot_end(&self, at: Index) -> Option<Index> {
        let slot = self.starts.partition_point(|&s| s <= at);
        self.starts.get(slot).copied()
    }

    /// Returns whether page `next` directly follows page `at`, both in guest memory and in QEMU's
    /// memory.
    pub fn adjacent(&self, at: Index, next: Index) -> bool {
        at.checked_add(1) == Some(next) && !self.starts.contains(&next)
    }
}

//! Tells for each page of a VM's RAM what it is: private, shared with the page store, of a file,
//! zeroes, swapped or free. The mappings and page map (`/proc/PID/pagemap`) of QEMU's process show
//! this.

use memfold_store::StoreIdentity;
use memfold_sys::pagemap::{Region, category};
use memfold_units::{Hva, PAGE_SIZE};
use memfold_vm::RamLayout;

use super::read::Vma;

/// Kind of a mapping of guest RAM in QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A mapping of anonymous memory, or no mapping at all.
    Anonymous,
    /// A mapping of a page store.
    Store,
    /// A mapping of a file that is no page store.
    File,
}

/// A stretch `[start, end)` of QEMU's addresses that is mapped in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Address of the stretch's first byte.
    pub start: Hva,
    /// Address after the stretch's last byte.
    pub end: Hva,
    /// Kind of the stretch's mapping.
    pub kind: Kind,
}

/// Numbers of guest pages by class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// Number of pages in each class, in the order of [`Place`].
    pub pages: [u64; 9],
    /// Number of pages that huge pages map. Each of them is also counted in its class.
    pub huge: u64,
}

/// Returns the address ranges of guest RAM in QEMU: all RAM blocks and memory slots, merged, sorted
/// and without overlap.
#[must_use]
pub fn ram_ranges(layout: &RamLayout) -> Vec<(Hva, Hva)> {
    let blocks = layout.blocks.iter().map(|b| (b.hva, b.pages));
    let slots = layout.slots.iter().map(|s| (s.hva, s.pages));
    let mut all: Vec<(Hva, Hva)> = blocks
        .chain(slots)
        .filter(|(_, pages)| *pages > 0)
        .map(|(hva, pages)| (hva, hva.add_pages(pages)))
        .collect();
    all.sort_unstable();
    let mut merged: Vec<(Hva, Hva)> = Vec::new();
    for (start, end) in all {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    merged
}

/// Splits `[start, end)` into stretches with one kind of mapping each, in address order. An
/// unmapped range is a stretch of kind `Anonymous`. `vmas` must be sorted by address. `stores`
/// identifies the files of the page stores.
#[must_use]
pub fn stretches(vmas: &[Vma], start: Hva, end: Hva, stores: &[StoreIdentity]) -> Vec<Stretch> {
    let mut found = Vec::new();
    let mut push = |start, end, kind| {
        if start < end {
            found.push(Stretch { start, end, kind });
        }
    };
    let mut at = start;
    for vma in &vmas[vmas.partition_point(|v| v.end <= start)..] {
        if vma.start >= end {
            break;
        }
        let (from, to) = (vma.start.max(start), vma.end.min(end));
        let kind = match vma.file {
            None => Kind::Anonymous,
            Some(file) if stores.contains(&file) => Kind::Store,
            Some(_) => Kind::File,
        };
        push(at, from, Kind::Anonymous);
        push(from, to, kind);
        at = to;
    }
    push(at, end, Kind::Anonymous);
    found
}

/// Class of a page of guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// An anonymous page in memory, outside page-store mappings.
    Private,
    /// A private copy inside a page-store mapping: a page that was written after it was folded.
    Unfolded,
    /// A page of a page store that is in QEMU's page tables.
    FoldedResident,
    /// A page of a page store that is not in QEMU's page tables.
    FoldedUntouched,
    /// A page of a file other than a page store that is in QEMU's page tables.
    FileResident,
    /// A page of a file other than a page store that is not in QEMU's page tables.
    FileUntouched,
    /// A page that is mapped to the kernel's zero page.
    Zero,
    /// A page in swap.
    Swapped,
    /// A page without memory: never used, or given back to the host.
    Free,
}

/// Classifies every page of `stretches` in address order. Calls `told` for each run of pages of one
/// class, with the class, the run's start and end, and whether huge pages map the run. `regions`
/// are the pages of `stretches` that are present or swapped, in address order.
pub fn each_run(
    stretches: &[Stretch],
    regions: &[Region],
    mut told: impl FnMut(Place, Hva, Hva, bool),
) {
    let mut regions = regions.iter().peekable();
    for stretch in stretches {
        let absent = match stretch.kind {
            Kind::Anonymous => Place::Free,
            Kind::Store => Place::FoldedUntouched,
            Kind::File => Place::FileUntouched,
        };
        let mut at = stretch.start;
        while let Some(region) = regions.peek() {
            let (from, to) = (region.start.max(stretch.start), region.end.min(stretch.end));
            if from < to {
                if at < from {
                    told(absent, at, from, false);
                }
                // A huge zero page costs as little as a small one.
                let huge =
                    region.is(category::HUGE | category::PRESENT) && !region.is(category::ZERO);
                told(place(stretch.kind, region), from, to, huge);
                at = to;
            }
            // The kernel joins pages of equal categories across mappings, so a region may continue
            // in the next stretch.
            if region.end > stretch.end {
                break;
            }
            regions.next();
        }
        if at < stretch.end {
            told(absent, at, stretch.end, false);
        }
    }
}

fn place(kind: Kind, region: &Region) -> Place {
    if !region.is(category::PRESENT) {
        Place::Swapped
    } else if region.is(category::ZERO) {
        Place::Zero
    } else if region.is(category::FILE) {
        match kind {
            Kind::Store => Place::FoldedResident,
            // A page of a file in an anonymous mapping: this mapping appeared after the mappings
            // were read and before the page map was read.
            Kind::File | Kind::Anonymous => Place::FileResident,
        }
    } else if kind == Kind::Store {
        Place::Unfolded
    } else {
        Place::Private
    }
}

/// Counts the pages of `stretches` by class. `regions` are the pages of `stretches` that are
/// present or swapped, in address order.
#[must_use]
pub fn sort_pages(stretches: &[Stretch], regions: &[Region]) -> Places {
    let mut places = Places::default();
    each_run(stretches, regions, |place, from, to, huge| {
        let pages = (to.0 - from.0) / PAGE_SIZE;
        places.pages[place as usize] += pages;
        if huge {
            places.huge += pages;
        }
    });
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORE: StoreIdentity = StoreIdentity { dev: 1, ino: 7 };

    fn vma(start: u64, end: u64, file: Option<StoreIdentity>) -> Vma {
        Vma {
            start: Hva(start * PAGE_SIZE),
            end: Hva(end * PAGE_SIZE),
            file,
            ..Vma::default()
        }
    }

    fn region(start: u64, end: u64, categories: u64) -> Region {
        Region {
            start: Hva(start * PAGE_SIZE),
            end: Hva(end * PAGE_SIZE),
            categories,
        }
    }

    #[test]
    fn the_ledger_counts_each_page_of_a_vm_in_exactly_one_class() {
        let template = StoreIdentity { dev: 9, ino: 9 };
        let vmas = [
            vma(0, 14, None),
            vma(14, 20, Some(STORE)),
            vma(20, 30, Some(template)),
            // Pages 30..34 are not mapped.
            vma(34, 50, None),
        ];
        let stretches = stretches(&vmas, Hva(10 * PAGE_SIZE), Hva(40 * PAGE_SIZE), &[STORE]);
        let present = category::PRESENT;
        let places = sort_pages(
            &stretches,
            &[
                region(11, 16, present),                  // 3 private, 2 unfolded
                region(16, 22, present | category::FILE), // 4 folded, 2 of the template
                region(22, 23, present),                  // a private copy of the template
                region(34, 36, present | category::ZERO),
                region(36, 37, category::SWAPPED),
            ],
        );
        assert_eq!(
            places,
            Places {
                pages: [4, 2, 4, 0, 2, 7, 2, 1, 1 + 4 + 3],
                huge: 0,
            }
        );
    }

    #[test]
    fn the_ledger_counts_page_store_pages_that_the_vm_has_not_touched_and_huge_pages() {
        let vmas = [vma(0, 8, Some(STORE)), vma(8, 1032, None)];
        let stretches = stretches(&vmas, Hva(0), Hva(1032 * PAGE_SIZE), &[STORE]);
        let places = sort_pages(
            &stretches,
            &[
                region(8, 520, category::PRESENT | category::HUGE),
                region(
                    520,
                    1032,
                    category::PRESENT | category::HUGE | category::ZERO,
                ),
            ],
        );
        assert_eq!(
            (places.pages, places.huge),
            ([512, 0, 0, 8, 0, 0, 512, 0, 0], 512)
        );
    }

    #[test]
    fn ram_that_is_in_a_ram_block_and_in_two_memory_slots_is_counted_once() {
        let mut layout = RamLayout::default();
        layout.blocks.push(memfold_vm::RamBlock {
            name: "ram".into(),
            hva: Hva(1 << 30),
            pages: 100,
        });
        for first in [0, 60] {
            layout.slots.push(memfold_vm::RamSlot {
                pfn: memfold_units::Pfn(first),
                pages: 40,
                hva: Hva(1 << 30).add_pages(first),
                block: 0,
            });
        }
        assert_eq!(
            ram_ranges(&layout),
            [(Hva(1 << 30), Hva(1 << 30).add_pages(100))]
        );
    }
}

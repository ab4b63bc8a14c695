//! Makes a map of one VM's RAM, which the dashboard shows as a picture. The map divides the RAM
//! into cells of equal size, and counts the pages of each cell by state, such as folded or private.

use memfold_store::StoreIdentity;
use memfold_sys::pagemap::Filter;
use memfold_units::{Hva, PAGE_SIZE};
use memfold_vm::RamLayout;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::memory::{each_run, ram_ranges};
use super::read::{Proc, ReadError, pagemap_of};
use super::take::look;

/// Names of the page states that a memory map counts, in the order of the counts of each cell.
/// `template`: pages of a snapshot's image or of another file.
pub const STATES: [&str; 7] = [
    "private", "unfolded", "folded", "template", "zero", "swapped", "free",
];

/// Largest number of cells into which a memory map divides the RAM. Each further range of RAM
/// addresses may add one cell.
pub const MOST_CELLS: u64 = 8192;

/// A segment that the VM maps beside its RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MappedSegment {
    /// Name and build number of the segment, as `NAME@GENERATION`.
    pub segment: String,
    /// Size of the part of the segment that the VM maps, in bytes.
    pub bytes: u64,
    /// Bytes of the segment that are in QEMU's page tables; part of `bytes`.
    pub resident_bytes: u64,
}

/// Guest-physical address of one cell of a memory map. The addresses of the cells after it follow
/// without a gap, until the cell of the next `CellPlace`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CellPlace {
    /// Index of the cell in the memory map, from 0.
    pub cell: u64,
    /// Guest-physical address of the cell; null: this part of QEMU's memory is not in the guest's
    /// address space.
    pub address: Option<u64>,
}

/// Map of a VM's RAM: the numbers of pages in each state, for cells of equal size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryMap {
    /// Name of the VM.
    pub vm: String,
    /// Size of guest RAM in bytes, which all cells together cover.
    pub ram_bytes: u64,
    /// Bytes of guest RAM that one cell covers. The last cell of a range of addresses may cover
    /// less.
    pub cell_bytes: u64,
    /// Names of the page states that are counted in each cell, in the order of the counts.
    pub states: Vec<String>,
    /// Number of pages in each state, for each cell, in the order of guest addresses. The states
    /// have the order of `states`.
    pub cells: Vec<[u64; 7]>,
    /// Guest-physical addresses of the first cell, and of each cell that does not directly follow
    /// the previous cell.
    pub places: Vec<CellPlace>,
    /// Segments that the VM's QEMU maps beside the RAM.
    pub segments: Vec<MappedSegment>,
}

/// Number of the state in [`STATES`] for each class of pages, in the order of
/// [`super::memory::Place`].
const STATE_OF: [usize; 9] = [0, 1, 2, 2, 3, 3, 4, 5, 6];

/// Adds the pages `[from, to)` of a range to its cells.
fn add(cells: &mut [[u64; 7]], from: u64, to: u64, cell_pages: u64, state: usize) {
    let mut at = from;
    while at < to {
        let cell = at / cell_pages;
        let end = to.min((cell + 1) * cell_pages);
        let found = usize::try_from(cell).ok().and_then(|c| cells.get_mut(c));
        if let Some(cell) = found {
            cell[state] += end - at;
        }
        at = end;
    }
}

/// Adds the addresses of a range's cells, except those of cells that follow the previous cell
/// without a gap. The last cell of the previous range may have been shorter than `cell_bytes`.
fn extend(places: &mut Vec<CellPlace>, begins: impl Iterator<Item = CellPlace>, cell_bytes: u64) {
    for (number, begin) in begins.enumerate() {
        let follows = places.last().filter(|_| number > 0).is_some_and(|last| {
            let after = |address| address + (begin.cell - last.cell) * cell_bytes;
            last.address.map(after) == begin.address
        });
        if !follows {
            places.push(begin);
        }
    }
}

/// Makes the map of a VM's RAM, divided into about `cells` cells (1 to [`MOST_CELLS`]). The VM is
/// given by QEMU's process number and its name; `segments`, by their references and image files.
///
/// # Errors
///
/// A [`ReadError`] if the process ended or may not be read, or if the kernel has no `PAGEMAP_SCAN`.
pub fn memory_map(
    (pid, name): (i32, &str),
    layout: &RamLayout,
    stores: &[StoreIdentity],
    segments: &[(String, StoreIdentity)],
    cells: u64,
) -> Result<MemoryMap, ReadError> {
    let failed = |source| ReadError::Pagemap { pid, source };
    let pagemap = pagemap_of(pid)?;
    let mut ranges = ram_ranges(layout);
    let address = |at: Hva| layout.pfn_of(at).map(|pfn| pfn.0 * PAGE_SIZE);
    // Memory outside the guest's address space comes last.
    ranges.sort_by_key(|(start, _)| address(*start).unwrap_or(u64::MAX));
    let pages = |(start, end): &(Hva, Hva)| (end.0 - start.0) / PAGE_SIZE;
    let all: u64 = ranges.iter().map(pages).sum();
    let cell_pages = all.div_ceil(cells.clamp(1, MOST_CELLS)).max(1);
    let proc = Proc::default();
    let (mut map, mut places) = (Vec::new(), Vec::new());
    let mut mappings = Vec::new();
    for range in &ranges {
        let before = proc.maps(pid)?;
        let looked = look(&proc, pid, &pagemap, &[*range], stores, before)?;
        let count = pages(range).div_ceil(cell_pages);
        let mut of_range = vec![[0; 7]; usize::try_from(count).unwrap_or(0)];
        each_run(&looked.stretches, &looked.regions, |place, from, to, _| {
            let [from, to] = [from, to].map(|at| (at.0 - range.0.0) / PAGE_SIZE);
            add(
                &mut of_range,
                from,
                to,
                cell_pages,
                STATE_OF[place as usize],
            );
        });
        let first = map.len() as u64;
        let begins = (0..count).map(|cell| CellPlace {
            cell: first + cell,
            address: address(range.0.add_pages(cell * cell_pages)),
        });
        extend(&mut places, begins, cell_pages * PAGE_SIZE);
        map.append(&mut of_range);
        mappings = looked.mappings;
    }
    let mut found = Vec::new();
    for (segment, identity) in segments {
        let (mut bytes, mut resident_bytes) = (0, 0);
        for vma in mappings.iter().filter(|v| v.file == Some(*identity)) {
            bytes += vma.end.0 - vma.start.0;
            let regions = pagemap
                .scan(vma.start, vma.end, Filter::RESIDENT)
                .map_err(failed)?;
            let pages = regions.iter().map(memfold_sys::pagemap::Region::pages);
            resident_bytes += pages.sum::<u64>() * PAGE_SIZE;
        }
        found.push(MappedSegment {
            segment: segment.clone(),
            bytes,
            resident_bytes,
        });
    }
    Ok(MemoryMap {
        vm: name.to_owned(),
        ram_bytes: all * PAGE_SIZE,
        cell_bytes: cell_pages * PAGE_SIZE,
        states: STATES.map(str::to_owned).to_vec(),
        cells: map,
        places,
        segments: found,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn if_a_run_spans_several_cells_of_the_memory_map_each_page_is_counted_in_one_cell() {
        let mut cells = vec![[0; 7]; 4];
        add(&mut cells, 0, 5, 10, 0);
        add(&mut cells, 5, 31, 10, 2);
        add(&mut cells, 31, 37, 10, 6);
        let row = |private, folded, free| [private, 0, folded, 0, 0, 0, free];
        assert_eq!(
            cells,
            [row(5, 5, 0), row(0, 10, 0), row(0, 10, 0), row(0, 1, 6)]
        );
        // Pages beyond the end are not counted, because there is no cell for them.
        add(&mut cells, 37, 45, 10, 6);
        assert_eq!(cells.iter().flatten().sum::<u64>(), 40);
    }

    #[test]
    fn the_first_cell_of_the_memory_map_after_an_address_gap_records_its_address() {
        let place = |(cell, address)| CellPlace { cell, address };
        let mut places = Vec::new();
        // The cells: a hole in the guest's addresses, one outside the guest's address space, and
        // the next range.
        let first = [
            (0, Some(0)),
            (1, Some(10)),
            (2, Some(50)),
            (3, Some(60)),
            (4, None),
            (5, None),
        ];
        extend(&mut places, first.into_iter().map(place), 10);
        extend(&mut places, [(6, Some(70))].into_iter().map(place), 10);
        let expected = [(0, Some(0)), (2, Some(50)), (4, None), (6, Some(70))];
        assert_eq!(places, expected.map(place));
    }
}

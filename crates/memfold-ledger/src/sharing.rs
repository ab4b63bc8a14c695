//! Computes how much memory each pair of VMs shares: the pages of a file that both VMs map and
//! neither has copied.
//!
//! The pages of a page store are in memory whether or not a VM has accessed them, so all folded
//! pages are counted. Pages of snapshot images and of segments are counted if they are in the page
//! tables of both QEMUs. Pages merged by KSM are not counted, because the kernel does not tell
//! which VMs share them.

use memfold_store::StoreIdentity;
use memfold_sys::pagemap::{Filter, Region, category};
use memfold_units::{Hva, PAGE_SIZE};
use memfold_vm::RamLayout;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::memory::ram_ranges;
use super::read::{Proc, ReadError, Vma, pagemap_of};

/// Mechanism by which a page is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum By {
    Folding,
    Template,
    Segment,
}

/// A run of pages of one file that the VM has not copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FilePages {
    file: (u64, u64),
    first: u64,
    end: u64,
    by: By,
}

/// A VM whose shared memory was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Sharer {
    /// Name of the VM.
    pub vm: String,
    /// Trust domain of the VM; null: the VM shares with no other VM.
    pub domain: Option<String>,
    /// Bytes of file pages that the VM maps and has not copied. A page that the VM maps twice
    /// counts once.
    pub mapped_bytes: u64,
}

/// Memory that a pair of VMs shares, by mechanism.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SharedPair {
    /// Name of the first VM of the pair.
    pub a: String,
    /// Name of the second VM of the pair.
    pub b: String,
    /// Bytes that both VMs map from a page store.
    pub folded_bytes: u64,
    /// Bytes that both VMs map from a snapshot's image, or from another file.
    pub template_bytes: u64,
    /// Bytes that both VMs map from segments.
    pub segment_bytes: u64,
}

impl SharedPair {
    /// Bytes that both VMs share by any mechanism.
    fn bytes(&self) -> u64 {
        self.folded_bytes + self.template_bytes + self.segment_bytes
    }
}

/// VMs, and the memory that each pair of them shares.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Sharing {
    /// The VMs whose shared memory was read, in the order of the request.
    pub vms: Vec<Sharer>,
    /// Pairs of VMs that share at least one page, each pair once. If only some pairs were
    /// requested, those that share most.
    pub pairs: Vec<SharedPair>,
    /// Number of pairs of VMs that share at least one page, including those not in `pairs`.
    pub pairs_total: usize,
}

impl Sharing {
    /// Returns the VMs, and the `most` pairs that share most, the largest first.
    #[must_use]
    pub fn largest(&self, most: usize) -> Self {
        let mut pairs: Vec<&SharedPair> = self.pairs.iter().collect();
        // The sort is stable: of equal pairs, the earlier one is first.
        pairs.sort_by_key(|pair| std::cmp::Reverse(pair.bytes()));
        Self {
            vms: self.vms.clone(),
            pairs: pairs.into_iter().take(most).cloned().collect(),
            pairs_total: self.pairs_total,
        }
    }
}

/// The file pages that one VM maps and has not copied.
#[derive(Debug)]
pub struct FilesOf {
    vm: String,
    domain: Option<String>,
    pages: Vec<FilePages>,
}

/// Reads from the kernel which file pages a VM maps and has not copied. The VM is given by QEMU's
/// process number, its name and its trust domain.
///
/// # Errors
///
/// A [`ReadError`] if the process ended or may not be read, or if the kernel has no `PAGEMAP_SCAN`.
pub fn files_of(
    (pid, vm, domain): (i32, &str, Option<&str>),
    layout: &RamLayout,
    stores: &[StoreIdentity],
    segments: &[StoreIdentity],
) -> Result<FilesOf, ReadError> {
    let failed = |source| ReadError::Pagemap { pid, source };
    let pagemap = pagemap_of(pid)?;
    let ram = ram_ranges(layout);
    let in_ram = |vma: &Vma| ram.iter().any(|(s, e)| vma.start < *e && *s < vma.end);
    let mut pages = Vec::new();
    for vma in Proc::default().maps(pid)? {
        let Some(file) = vma.file else { continue };
        let by = if segments.contains(&file) {
            By::Segment
        } else if !in_ram(&vma) {
            continue;
        } else if stores.contains(&file) {
            By::Folding
        } else {
            By::Template
        };
        let regions = pagemap.scan(vma.start, vma.end, Filter::THERE);
        let regions = regions.map_err(failed)?;
        uncopied(&vma, &regions, by == By::Folding, |from, to| {
            let page = |at: Hva| (vma.offset + at.0 - vma.start.0) / PAGE_SIZE;
            pages.push(FilePages {
                file: (file.dev, file.ino),
                first: page(from),
                end: page(to),
                by,
            });
        });
    }
    Ok(FilesOf {
        vm: vm.to_owned(),
        domain: domain.map(str::to_owned),
        pages: united(pages),
    })
}

/// Reports the ranges of a mapping that hold the file's own pages. `untouched`: also pages that are
/// in no page table.
fn uncopied(vma: &Vma, regions: &[Region], untouched: bool, mut told: impl FnMut(Hva, Hva)) {
    let mut at = vma.start;
    for region in regions {
        if untouched && at < region.start {
            told(at, region.start);
        }
        if region.is(category::PRESENT | category::FILE) {
            told(region.start, region.end);
        }
        at = region.end;
    }
    if untouched && at < vma.end {
        told(at, vma.end);
    }
}

/// Sorts and merges runs, so that each page occurs once.
fn united(mut pages: Vec<FilePages>) -> Vec<FilePages> {
    pages.sort_unstable();
    let mut all: Vec<FilePages> = Vec::new();
    for run in pages {
        match all.last_mut() {
            Some(last) if last.file == run.file && run.first <= last.end => {
                last.end = last.end.max(run.end);
            }
            _ => all.push(run),
        }
    }
    all
}

/// Returns the number of pages that both VMs map, by mechanism.
fn common(a: &[FilePages], b: &[FilePages]) -> [u64; 3] {
    let mut found = [0; 3];
    let (mut i, mut j) = (0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        if x.file == y.file {
            let pages = x.end.min(y.end).saturating_sub(x.first.max(y.first));
            found[x.by as usize] += pages;
        }
        if (x.file, x.end) < (y.file, y.end) {
            i += 1;
        } else {
            j += 1;
        }
    }
    found
}

/// Computes the memory that each pair of `vms` shares.
#[must_use]
pub fn sharing(vms: &[FilesOf]) -> Sharing {
    let mut pairs = Vec::new();
    for (at, a) in vms.iter().enumerate() {
        for b in &vms[at + 1..] {
            let common = common(&a.pages, &b.pages);
            let bytes = |by: By| common[by as usize] * PAGE_SIZE;
            if common != [0; 3] {
                pairs.push(SharedPair {
                    a: a.vm.clone(),
                    b: b.vm.clone(),
                    folded_bytes: bytes(By::Folding),
                    template_bytes: bytes(By::Template),
                    segment_bytes: bytes(By::Segment),
                });
            }
        }
    }
    let sharer = |of: &FilesOf| Sharer {
        vm: of.vm.clone(),
        domain: of.domain.clone(),
        mapped_bytes: of.pages.iter().map(|p| p.end - p.first).sum::<u64>() * PAGE_SIZE,
    };
    Sharing {
        vms: vms.iter().map(sharer).collect(),
        pairs_total: pairs.len(),
        pairs,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(file: u64, first: u64, end: u64, by: By) -> FilePages {
        FilePages {
            file: (1, file),
            first,
            end,
            by,
        }
    }

    fn of(vm: &str, pages: Vec<FilePages>) -> FilesOf {
        FilesOf {
            vm: vm.into(),
            domain: None,
            pages: united(pages),
        }
    }

    #[test]
    fn two_vms_share_those_file_pages_that_both_of_them_map() {
        let a = of(
            "a",
            vec![
                run(7, 20, 30, By::Folding),
                run(7, 0, 10, By::Folding),
                // These pages occur twice in the VM's memory and once in the page store.
                run(7, 5, 10, By::Folding),
                run(9, 0, 4, By::Segment),
            ],
        );
        let b = of(
            "b",
            vec![
                run(7, 8, 25, By::Folding),
                run(8, 0, 100, By::Template),
                run(9, 2, 9, By::Segment),
            ],
        );
        let c = of("c", vec![run(6, 0, 100, By::Folding)]);
        let found = sharing(&[a, b, c]);
        let mapped: Vec<u64> = found
            .vms
            .iter()
            .map(|v| v.mapped_bytes / PAGE_SIZE)
            .collect();
        assert_eq!(mapped, [24, 124, 100]);
        let [pair] = &found.pairs[..] else {
            panic!("{:?}", found.pairs)
        };
        assert_eq!((pair.a.as_str(), pair.b.as_str()), ("a", "b"));
        assert_eq!(pair.folded_bytes, 7 * PAGE_SIZE);
        assert_eq!(
            (pair.template_bytes, pair.segment_bytes),
            (0, 2 * PAGE_SIZE)
        );
    }

    #[test]
    fn the_pairs_of_vms_that_share_most_come_first_and_all_pairs_are_counted() {
        let vm = |name, end| of(name, vec![run(7, 0, end, By::Folding)]);
        let all = sharing(&[vm("a", 2), vm("b", 5), vm("c", 9)]);
        assert_eq!((all.pairs.len(), all.pairs_total), (3, 3));
        let largest = all.largest(2);
        let names = |pair: &SharedPair| format!("{}{}", pair.a, pair.b);
        let names: Vec<String> = largest.pairs.iter().map(names).collect();
        assert_eq!(names, ["bc", "ab"]);
        assert_eq!((largest.vms.len(), largest.pairs_total), (3, 3));
    }

    #[test]
    fn private_copies_and_swapped_pages_do_not_count_as_pages_of_the_mapped_file() {
        let vma = Vma {
            start: Hva(0),
            end: Hva(10 * PAGE_SIZE),
            ..Vma::default()
        };
        let region = |start, end, categories| Region {
            start: Hva(start * PAGE_SIZE),
            end: Hva(end * PAGE_SIZE),
            categories,
        };
        let regions = [
            region(1, 3, category::PRESENT | category::FILE),
            region(3, 4, category::PRESENT),
            region(6, 7, category::SWAPPED),
        ];
        let pages = |untouched| {
            let mut pages = 0;
            uncopied(&vma, &regions, untouched, |from, to| {
                pages += (to.0 - from.0) / PAGE_SIZE;
            });
            pages
        };
        assert_eq!((pages(true), pages(false)), (8, 2));
    }
}

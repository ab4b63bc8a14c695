//! The working set of a snapshot: the pages that a VM touches first after a restore. It is recorded
//! at the first restore and prefetched by later ones on request.
//!
//! ```text
//!   first restore       VM runs 10 s ---- its page tables say what it touched ---- working-set
//!   restore --prefetch  VM runs ---- meanwhile these pages are read for it: from disk, and into its page tables
//! ```

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;
use std::time::Duration;

use memfold_sys::memory;
use memfold_sys::pagemap::{Filter, Pagemap, category};
use memfold_units::{Hva, PAGE_SIZE};
use memfold_vm::RamLayout;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::image::ImageBlock;
use super::manifest::Manifest;

/// Its file in a snapshot. It is no part of what was saved: without it, or with a wrong one,
/// nothing is lost.
pub const FILE: &str = "working-set";

/// Run time of a restored VM before its page tables are read.
pub const TIME: Duration = Duration::from_secs(10);

/// Parts that are as near to each other, in pages, become one.
const GAP: u64 = 16;

/// Pages that are read with one call (`IOV_MAX`).
const BATCH: usize = 1024;

/// The pages of an image that a VM touched first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkingSet {
    /// The image: checksum of its checksums.
    image: String,
    /// First page, counted from the image's beginning, and number of pages; ascending.
    runs: Vec<(u64, u64)>,
}

/// Where a VM has a block of an image.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    first_page: u64,
    hva: Hva,
    pages: u64,
}

/// Where a VM has the blocks of an image.
#[must_use]
pub fn places(manifest: &Manifest, layout: &RamLayout) -> Vec<Place> {
    let place = |saved: &ImageBlock| {
        let here = layout.blocks.iter().find(|b| b.name == saved.name)?;
        (here.pages == saved.pages).then_some(Place {
            first_page: saved.first_page,
            hva: here.hva,
            pages: saved.pages,
        })
    };
    manifest.blocks.iter().filter_map(place).collect()
}

impl WorkingSet {
    /// Reads the pages that a restored VM has touched since. `image`: checksum of the image's
    /// checksums.
    pub fn of(pid: Pid, image: &str, places: &[Place]) -> io::Result<Self> {
        let pagemap = Pagemap::open(pid)?;
        let filter = Filter {
            any_of: category::PRESENT | category::SWAPPED,
            none_of: category::ZERO,
            ..Filter::default()
        };
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for place in places {
            let end = place.hva.add_pages(place.pages);
            for region in pagemap.scan(place.hva, end, filter)? {
                let first = place.first_page + region.start.pages_since(place.hva);
                let end = first + region.end.pages_since(region.start);
                match runs.last_mut() {
                    Some((from, pages)) if *from + *pages + GAP >= first => *pages = end - *from,
                    _ => runs.push((first, end - first)),
                }
            }
        }
        Ok(Self {
            image: image.to_owned(),
            runs,
        })
    }

    /// Bytes of it.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.1).sum::<u64>() * PAGE_SIZE
    }

    /// That of a snapshot in this directory, if there is one of this image.
    #[must_use]
    pub fn read(place: &Path, image: &str) -> Option<Self> {
        let text = fs::read(place.join(FILE)).ok()?;
        let set: Self = serde_json::from_slice(&text).ok()?;
        (set.image == image).then_some(set)
    }

    /// Keeps it in a snapshot's directory.
    pub fn write(&self, place: &Path) -> io::Result<()> {
        let new = place.join(format!("{FILE}.new"));
        let written = File::create(&new).and_then(|mut file| {
            file.write_all(&serde_json::to_vec(self)?)?;
            file.sync_all()?;
            fs::rename(&new, place.join(FILE))
        });
        if written.is_err() {
            // Half of it is of no use.
            let _ = fs::remove_file(&new);
        }
        written
    }

    /// Loads these pages into the page tables of a VM restored from the image. Returns how many are
    /// present.
    pub fn prefetch(&self, pid: Pid, places: &[Place]) -> io::Result<u64> {
        let mut done = 0;
        let mut bytes = [0; BATCH];
        let mut batch: Vec<(Hva, usize)> = Vec::with_capacity(BATCH);
        let mut fetch = |batch: &mut Vec<(Hva, usize)>| {
            // Reading a byte of another process's memory is a fault of that process.
            let read = memory::read_many(pid, batch, &mut bytes);
            batch.clear();
            read.map(|read| done += read as u64)
        };
        for place in places {
            let end = place.first_page + place.pages;
            for &(first, pages) in &self.runs {
                let to = first.saturating_add(pages).min(end);
                for page in first.max(place.first_page)..to {
                    batch.push((place.hva.add_pages(page - place.first_page), 1));
                    if batch.len() == BATCH {
                        fetch(&mut batch)?;
                    }
                }
            }
        }
        if !batch.is_empty() {
            fetch(&mut batch)?;
        }
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use memfold_sys::region::Mapping;

    use super::*;

    const PAGES: u64 = 2048;

    /// An image that is mapped privately, as a restored VM has it. The second half lies elsewhere
    /// in the image.
    fn vm(image: &File) -> (Mapping, [Place; 2]) {
        let memory = Mapping::anonymous(PAGES, true).unwrap();
        memory.area().map_file(image.as_fd(), 0).unwrap();
        let place = |first: u64, first_page| Place {
            first_page,
            hva: memory.area().start().add_pages(first),
            pages: PAGES / 2,
        };
        let places = [place(0, 0), place(PAGES / 2, 10 * PAGES)];
        (memory, places)
    }

    fn present(places: &[Place]) -> Vec<(u64, u64)> {
        let me = rustix::process::getpid();
        WorkingSet::of(me, "", places).unwrap().runs
    }

    #[test]
    fn pages_touched_by_one_vm_are_prefetched_into_the_page_tables_of_the_next_vm() {
        let me = rustix::process::getpid();
        let image = tempfile::tempfile().unwrap();
        image
            .write_all_at(&vec![1; 4096 * usize::try_from(PAGES).unwrap()], 0)
            .unwrap();
        let (first, places) = vm(&image);
        assert!(present(&places).is_empty());
        for page in [100, 700, PAGES - 1] {
            first.area().part(page, 1).write(&[7; 512]);
        }
        let set = WorkingSet::of(me, "sum", &places).unwrap();
        let touched = |page| set.runs.iter().any(|&(a, n)| (a..a + n).contains(&page));
        assert!(
            touched(100) && touched(700) && touched(11 * PAGES - PAGES / 2 - 1),
            "{set:?}"
        );
        assert!(
            !touched(400) && set.bytes() < PAGES * PAGE_SIZE / 8,
            "{set:?}"
        );

        let place = tempfile::tempdir().unwrap();
        assert_eq!(WorkingSet::read(place.path(), "sum"), None);
        set.write(place.path()).unwrap();
        assert_eq!(WorkingSet::read(place.path(), "other"), None);
        let known = WorkingSet::read(place.path(), "sum").unwrap();
        assert_eq!(known, set);

        let (_second, places) = vm(&image);
        let fetched = known.prefetch(me, &places).unwrap();
        assert_eq!(fetched * PAGE_SIZE, set.bytes());
        let now = WorkingSet::of(me, "sum", &places).unwrap();
        for (from, pages) in set.runs {
            for page in from..from + pages {
                let there = now.runs.iter().any(|&(a, n)| (a..a + n).contains(&page));
                assert!(there, "page {page}");
            }
        }
        // One that speaks of what isn't there does no harm.
        let wild = WorkingSet {
            image: String::new(),
            runs: vec![(PAGES / 2 - 1, u64::MAX), (u64::MAX, 1), (30 * PAGES, 5)],
        };
        assert_eq!(wild.prefetch(me, &places[..1]).unwrap(), 1);
        fs::write(place.path().join(FILE), "{").unwrap();
        assert_eq!(WorkingSet::read(place.path(), "sum"), None);
    }
}

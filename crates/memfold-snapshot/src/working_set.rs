//! Records which pages a VM touches in the first seconds after a restore (the snapshot's working
//! set). Later restores with `--prefetch` load these pages in advance.
//!
//! ```text
//!   first restore       VM runs for 0.5 and for 10 s -- its page tables show the touched pages -- file working-set
//!   restore --prefetch  VM runs -- meanwhile, the pages in working-set are read from disk into its page tables
//! ```

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;
use std::time::Duration;

use memfold_sys::memory;
use memfold_sys::pagemap::Pagemap;
use memfold_units::{Hva, PAGE_SIZE};
use memfold_vm::RamLayout;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::image::ImageBlock;
use super::manifest::Manifest;
use super::plan::HELD;

/// Name of the file in a snapshot's directory that stores the working set. The file is only a hint:
/// without it, or with a wrong one, a restore is only slower.
pub const FILE: &str = "working-set";

/// Times for which a restored VM runs before its page tables are read for the working set: for the
/// pages that it touches at once, and for all others.
pub const TIMES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(10)];

/// Maximum distance in pages of two runs that are recorded as one.
const GAP: u64 = 16;

/// Number of pages that are read with one call (`IOV_MAX`).
const BATCH: usize = 1024;

/// The pages of a RAM image that a restored VM touched in the first seconds ([`TIMES`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkingSet {
    /// Identity of the image: the checksum of its checksums.
    image: String,
    /// Runs of touched pages, ascending: first page in the image, and number of pages.
    runs: Vec<(u64, u64)>,
    /// The same, of the pages touched after the shorter time. Empty if they are not known.
    #[serde(default)]
    soonest: Vec<(u64, u64)>,
}

/// Address in a restored VM's QEMU of one block of a RAM image.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    first_page: u64,
    hva: Hva,
    pages: u64,
}

/// Returns the addresses at which a restored VM's QEMU has the blocks of a snapshot's RAM image.
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
    /// Reads which pages a VM has touched since its restore. `image` identifies the RAM image: it
    /// is the checksum of `ram.sums`.
    pub fn of(pid: Pid, image: &str, places: &[Place]) -> io::Result<Self> {
        let pagemap = Pagemap::open(pid)?;
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for place in places {
            let end = place.hva.add_pages(place.pages);
            for region in pagemap.scan(place.hva, end, HELD)? {
                let first = place.first_page + region.start.pages_since(place.hva);
                let end = first + region.end.pages_since(region.start);
                match runs.last_mut() {
                    Some((from, pages)) if *from + *pages + GAP >= first => *pages = end - *from,
                    _ => runs.push((first, end - first)),
                }
            }
        }
        let image = image.to_owned();
        let soonest = Vec::new();
        Ok(Self {
            image,
            runs,
            soonest,
        })
    }

    /// Adds the pages that a VM had touched after the shorter of [`TIMES`].
    #[must_use]
    pub fn with_soonest(self, soonest: Self) -> Self {
        Self {
            soonest: soonest.runs,
            ..self
        }
    }

    /// Returns the size of the working set in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        // The file may come from another host, with any numbers in it.
        let pages = self.runs.iter().map(|run| run.1);
        let pages = pages.fold(0, u64::saturating_add);
        pages.saturating_mul(PAGE_SIZE)
    }

    /// Returns the runs of pages: first page in the image, and number of pages.
    #[must_use]
    pub fn runs(&self) -> &[(u64, u64)] {
        &self.runs
    }

    /// Returns the runs of pages that a VM touches at once. Empty if they are not known.
    #[must_use]
    pub fn soonest(&self) -> &[(u64, u64)] {
        &self.soonest
    }

    /// Reads the working set from the snapshot's directory `place`. Returns `None` if there is
    /// none, if it belongs to another RAM image than `image`, the checksum of `ram.sums`, or if its
    /// runs overlap: the file may come from another host, and such a list could be endless work.
    #[must_use]
    pub fn read(place: &Path, image: &str) -> Option<Self> {
        let text = fs::read(place.join(FILE)).ok()?;
        let set: Self = serde_json::from_slice(&text).ok()?;
        let is_right = set.image == image && ascend(&set.runs) && ascend(&set.soonest);
        is_right.then_some(set)
    }

    /// Writes the working set to the snapshot's directory `place`.
    pub fn write(&self, place: &Path) -> io::Result<()> {
        let new = place.join(format!("{FILE}.new"));
        let written = File::create(&new).and_then(|mut file| {
            file.write_all(&serde_json::to_vec(self)?)?;
            file.sync_all()?;
            fs::rename(&new, place.join(FILE))
        });
        if written.is_err() {
            // An incomplete file is of no use.
            let _ = fs::remove_file(&new);
        }
        written
    }

    /// Loads the pages of the working set into the page tables of a VM that was restored from the
    /// image. Returns the number of pages that were loaded.
    pub fn prefetch(&self, pid: Pid, places: &[Place]) -> io::Result<u64> {
        let of_place = |place: &Place| {
            let (hva, start, end) = (place.hva, place.first_page, place.first_page + place.pages);
            let pages = self.runs.iter().flat_map(move |&(first, pages)| {
                first.max(start)..first.saturating_add(pages).min(end)
            });
            pages.map(move |page| (hva.add_pages(page - start), 1))
        };
        let mut pages = places.iter().flat_map(of_place);
        let (mut done, mut bytes) = (0, [0; BATCH]);
        loop {
            let batch: Vec<(Hva, usize)> = pages.by_ref().take(BATCH).collect();
            if batch.is_empty() {
                return Ok(done);
            }
            // Reading a byte of another process's memory causes a page fault of that process.
            done += memory::read_many(pid, &batch, &mut bytes)? as u64;
        }
    }
}

/// Returns whether each run of pages ends before the next one begins.
fn ascend(runs: &[(u64, u64)]) -> bool {
    let is_before =
        |one: (u64, u64), next: u64| one.0.checked_add(one.1).is_some_and(|end| end <= next);
    let is_last_right = runs.last().is_none_or(|&last| is_before(last, u64::MAX));
    is_last_right && runs.windows(2).all(|two| is_before(two[0], two[1].0))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use memfold_sys::region::Mapping;

    use super::*;

    const PAGES: u64 = 2048;

    /// Returns memory that maps an image privately, as in a restored VM. The second half of the
    /// memory is at another place in the image.
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
    fn pages_that_one_clone_touched_are_mapped_in_advance_for_the_next_clone() {
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
        let soonest = WorkingSet::of(me, "sum", &places).unwrap();
        first.area().part(1500, 1).write(&[7; 512]);
        let set = WorkingSet::of(me, "sum", &places).unwrap();
        let set = set.with_soonest(soonest);
        assert!(set.soonest().len() < set.runs().len(), "{set:?}");
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
        let old = r#"{"image": "sum", "runs": [[7, 1]]}"#;
        fs::write(place.path().join(FILE), old).unwrap();
        let old = WorkingSet::read(place.path(), "sum").unwrap();
        assert_eq!((old.runs(), old.soonest().len()), (&[(7, 1)][..], 0));
        // Whoever wrote the file may want endless work to be done.
        for runs in [
            "[0, 9], [8, 1]",
            "[9, 1], [0, 1]",
            "[1, 18446744073709551615]",
        ] {
            let wrong = [
                format!(r#"{{"image": "sum", "runs": [{runs}]}}"#),
                format!(r#"{{"image": "sum", "runs": [], "soonest": [{runs}]}}"#),
            ];
            for wrong in wrong {
                fs::write(place.path().join(FILE), &wrong).unwrap();
                assert_eq!(WorkingSet::read(place.path(), "sum"), None, "{wrong}");
            }
        }

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
        // A working set that names pages that do not exist is harmless.
        let wild = WorkingSet {
            image: String::new(),
            soonest: Vec::new(),
            runs: vec![(PAGES / 2 - 1, u64::MAX), (u64::MAX, 1), (30 * PAGES, 5)],
        };
        assert_eq!(wild.prefetch(me, &places[..1]).unwrap(), 1);
        fs::write(place.path().join(FILE), "{").unwrap();
        assert_eq!(WorkingSet::read(place.path(), "sum"), None);
    }
}

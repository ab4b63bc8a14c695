//! What a VM uses of its memory first of all, after a restore: recorded once, and then at hand for those that want it.
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
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::image::ImageBlock;
use super::manifest::Manifest;
use crate::vm::RamLayout;

/// Its file in a snapshot. It is no part of what was saved: without it, or with a wrong one, nothing is lost.
pub const FILE: &str = "working-set";

/// How long a VM runs before its page tables are looked at.
pub const TIME: Duration = Duration::from_secs(10);

/// Parts that are as near to each other, in pages, become one.
const GAP: u64 = 16;

/// Pages that are read with one call (`IOV_MAX`).
const BATCH: usize = 1024;

/// Pages of an image, as they were used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkingSet {
    /// The image: checksum of its checksums.
    image: String,
    /// First page, counted from the image's beginning, and number of pages; ascending.
    runs: Vec<(u64, u64)>,
}

/// Blocks of an image and where a VM has them.
fn blocks<'a>(
    manifest: &'a Manifest,
    layout: &'a RamLayout,
) -> impl Iterator<Item = (&'a ImageBlock, Hva)> {
    manifest.blocks.iter().filter_map(|saved| {
        let here = layout.blocks.iter().find(|b| b.name == saved.name)?;
        (here.pages == saved.pages).then_some((saved, here.hva))
    })
}

impl WorkingSet {
    /// What a VM that was restored from a snapshot has touched since.
    pub fn of(pid: Pid, manifest: &Manifest, layout: &RamLayout) -> io::Result<Self> {
        let pagemap = Pagemap::open(pid)?;
        let filter = Filter {
            any_of: category::PRESENT | category::SWAPPED,
            none_of: category::ZERO,
            ..Filter::default()
        };
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (saved, hva) in blocks(manifest, layout) {
            for region in pagemap.scan(hva, hva.add_pages(saved.pages), filter)? {
                let first = saved.first_page + region.start.pages_since(hva);
                let end = first + region.end.pages_since(region.start);
                match runs.last_mut() {
                    Some((from, pages)) if *from + *pages + GAP >= first => *pages = end - *from,
                    _ => runs.push((first, end - first)),
                }
            }
        }
        Ok(Self {
            image: manifest.sums.xxh3_128.clone(),
            runs,
        })
    }

    /// How many pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.runs.iter().map(|run| run.1).sum()
    }

    /// That of a snapshot in this directory, if there is one of its image.
    #[must_use]
    pub fn read(place: &Path, manifest: &Manifest) -> Option<Self> {
        let text = fs::read(place.join(FILE)).ok()?;
        let set: Self = serde_json::from_slice(&text).ok()?;
        (set.image == manifest.sums.xxh3_128).then_some(set)
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

    /// Has these pages in the page tables of a VM that was restored from the snapshot; how many are there.
    pub fn prefetch(&self, pid: Pid, manifest: &Manifest, layout: &RamLayout) -> io::Result<u64> {
        let mut done = 0;
        let mut bytes = [0; BATCH];
        let mut batch: Vec<(Hva, usize)> = Vec::with_capacity(BATCH);
        let mut fetch = |batch: &mut Vec<(Hva, usize)>| {
            // Reading a byte of another process's memory is a fault of that process.
            let read = memory::read_many(pid, batch, &mut bytes);
            batch.clear();
            read.map(|read| done += read as u64)
        };
        for (saved, hva) in blocks(manifest, layout) {
            let end = saved.first_page + saved.pages;
            for &(first, pages) in &self.runs {
                let to = first.saturating_add(pages).min(end);
                for page in first.max(saved.first_page)..to {
                    batch.push((hva.add_pages(page - saved.first_page), 1));
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

    /// Bytes of it.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pages() * PAGE_SIZE
    }
}

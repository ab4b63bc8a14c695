//! Copies the table of one VM's cached pages (which guest page caches which page of a file) out of
//! the fold engine, so that another thread can use the table.

use std::sync::Arc;

use memfold_units::Hva;
use memfold_wire::agent::FileNumber;

use super::numbering::{Index, Numbering};
use super::sparse::{PIECE_ENTRIES, Sparse};

/// Page of a file that a guest page caches, as an entry of a VM's table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cached {
    /// Number of the cached file, assigned by the VM's agent, plus one; 0 if the guest page caches
    /// no file.
    pub file: u32,
    pub page: u32,
}

/// Run of pages that are consecutive in QEMU's memory and in the file that they cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// Host virtual address of the run's first page in QEMU.
    pub hva: Hva,
    /// Number of pages in the run.
    pub pages: u32,
    /// Number of the cached file, assigned by the VM's agent.
    pub file: FileNumber,
    /// Offset of the run's first page in the file, in pages.
    pub page: u32,
}

/// Copy of the engine's table of one VM's cached pages, as the VM's agent reported them. Copying is
/// cheap, because copy and table share memory until the table changes.
#[derive(Clone, Debug)]
pub struct CachedPages {
    pub(super) numbering: Arc<Numbering>,
    pub(super) cached: Sparse<Cached>,
}

impl CachedPages {
    /// Returns all runs of cached pages, in the order of guest page frames. Each cached page is in
    /// exactly one run.
    pub fn runs(&self) -> impl Iterator<Item = PageRun> + '_ {
        let mut next = 0;
        std::iter::from_fn(move || {
            let run = self.run_from(next)?;
            next = run.0 + run.1.pages;
            Some(run.1)
        })
    }

    /// Returns the first run that begins at page `at` or later, and the index of the run's first
    /// page.
    fn run_from(&self, mut at: Index) -> Option<(Index, PageRun)> {
        let pages = self.numbering.pages();
        let (file, page) = loop {
            if at >= pages {
                return None;
            }
            if self.cached.is_empty_at(at) {
                at = (at / PIECE_ENTRIES + 1).saturating_mul(PIECE_ENTRIES);
                continue;
            }
            let Cached { file, page } = self.cached.get(at);
            if let Some(file) = file.checked_sub(1) {
                break (file, page);
            }
            at += 1;
        };
        let mut run = PageRun {
            hva: self.numbering.hva(at)?,
            pages: 1,
            file,
            page,
        };
        loop {
            let (last, next) = (at + run.pages - 1, at + run.pages);
            let follows = next < pages
                && self.numbering.adjacent(last, next)
                && page.checked_add(run.pages).is_some_and(|page| {
                    let file = file + 1;
                    self.cached.get(next) == Cached { file, page }
                });
            if !follows {
                return Some((at, run));
            }
            run.pages += 1;
        }
    }
}

//! Copies the table of one VM's cached pages (which guest page caches which page of a file) out of
//! the fold engine, so that another thread can use the table.

use std::sync::Arc;

use memfold_units::Hva;
use memfold_wire::agent::FileNumber;

use super::numbering::{Index, Numbering};
use super::packed::{Bytes, Table, Value, write_difference};

/// Page of a file that a guest page caches, as an entry of a VM's table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cached {
    /// Number of the cached file, assigned by the VM's agent, plus one; 0 if the guest page caches
    /// no file.
    pub file: u32,
    pub page: u32,
}

impl Value for Cached {
    fn after(self, pages: u32) -> Option<Self> {
        let page = self.page.checked_add(pages)?;
        Some(Self { page, ..self })
    }

    fn write(self, expected: Self, bytes: &mut Vec<u8>) {
        write_difference(self.file, expected.file, bytes);
        // Most files are read from their beginning.
        let is_same = self.file == expected.file;
        write_difference(self.page, if is_same { expected.page } else { 0 }, bytes);
    }

    fn read(expected: Self, bytes: &mut Bytes<'_>) -> Self {
        let file = bytes.difference(expected.file);
        let is_same = file == expected.file;
        let page = bytes.difference(if is_same { expected.page } else { 0 });
        Self { file, page }
    }
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
    pub(super) cached: Table<Cached>,
}

impl CachedPages {
    /// Returns all runs of cached pages, in the order of guest page frames. Each cached page is in
    /// exactly one run.
    pub fn runs(&self) -> impl Iterator<Item = PageRun> + '_ {
        let mut parts = self.parts().peekable();
        std::iter::from_fn(move || {
            let (at, mut run) = parts.next()?;
            let follows = |run: &PageRun, next: &(Index, PageRun)| {
                self.numbering.adjacent(at + run.pages - 1, next.0)
                    && next.1.file == run.file
                    && run.page.checked_add(run.pages) == Some(next.1.page)
            };
            while let Some((_, next)) = parts.next_if(|next| follows(&run, next)) {
                run.pages += next.pages;
            }
            Some(run)
        })
    }

    /// Returns runs that are not necessarily as long as possible, and the index of each run's first
    /// page. No run reaches beyond a memory slot.
    fn parts(&self) -> impl Iterator<Item = (Index, PageRun)> + '_ {
        self.cached.runs().flat_map(move |run| {
            let mut at = run.at;
            std::iter::from_fn(move || {
                let end = self.numbering.slot_end(at)?.min(run.at + run.pages);
                let done = at - run.at;
                let part = PageRun {
                    hva: self.numbering.hva(at)?,
                    pages: end.checked_sub(at).filter(|pages| *pages > 0)?,
                    file: run.value.file - 1,
                    page: run.value.page + done,
                };
                Some((std::mem::replace(&mut at, end), part))
            })
        })
    }
}

//! Runs: consecutive pages of a VM that are to be folded. Adjacent runs form a group, which
//! memfold's library in QEMU folds as one run.

use std::collections::VecDeque;
use std::time::Instant;

use memfold_wire::agent::FileNumber;
use memfold_wire::library::MAX_RUN_PAGES;

use super::member::ContentId;
use super::vm_table::{Index, VmTable};

/// Run of a VM's pages that are consecutive in guest memory, in the file that they cache, and in
/// the page store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index of the run's first guest page in the VM's tables.
    pub index: Index,
    /// Length of the run in pages, 1 to [`MAX_RUN_PAGES`].
    pub pages: u32,
    /// Offset of the run's bytes in the page store, in pages.
    pub store_page: u32,
    /// Number of the file that the run caches, assigned by the VM's agent.
    pub file: FileNumber,
    /// Offset of the run's first page in the file, in pages.
    pub page: u32,
    /// Number of the content (the bytes of a file) that the run's pages probably hold.
    pub content: ContentId,
    /// Time at which the daemon received the hint for the run; `None` if a search of all tables (a
    /// sweep) has found the run.
    pub at: Option<Instant>,
    /// Number of earlier attempts to fold the run that failed because a page was busy.
    pub tries: u8,
    /// Whether the run's pages already map a file (the page store or a snapshot's image), so that
    /// they are folded again.
    pub again: bool,
}

impl Run {
    /// Returns the pages of the run as runs of one page.
    pub fn single_pages(&self) -> impl Iterator<Item = Self> + '_ {
        let rest = (0..self.pages).filter_map(|pages| self.rest(pages));
        rest.map(|run| Self { pages: 1, ..run })
    }

    /// Returns the run without its first `pages` pages; `None` if nothing is left.
    #[must_use]
    pub fn rest(&self, pages: u32) -> Option<Self> {
        (pages < self.pages).then(|| Self {
            index: self.index + pages,
            pages: self.pages - pages,
            store_page: self.store_page + pages,
            page: self.page + pages,
            ..*self
        })
    }
}

/// Runs that are consecutive in guest memory and in the page store. The library folds a group as
/// one run, even if its pages belong to several files.
pub type Group = Vec<Run>;

/// Adds the one-page run `run` to `runs`: extends the last run if `run` continues it, otherwise
/// appends a new run.
pub fn append(runs: &mut Vec<Run>, run: Run, table: &VmTable) {
    let last = runs.last_mut().filter(|last| {
        (last.file, last.content, last.page + last.pages) == (run.file, run.content, run.page)
            && last.pages < MAX_RUN_PAGES
            && last.again == run.again
            && last.store_page + last.pages == run.store_page
            && table.adjacent(last.index + last.pages - 1, run.index)
    });
    match last {
        Some(last) => last.pages += 1,
        None => runs.push(run),
    }
}

/// Returns the total number of pages in a group of runs.
pub fn length(group: &[Run]) -> u32 {
    group.iter().map(|run| run.pages).sum()
}

/// Joins adjacent runs into groups of at most [`MAX_RUN_PAGES`] pages. Returns the groups sorted by
/// length, the longest first.
pub fn group(mut runs: Vec<Run>, table: &VmTable) -> VecDeque<Group> {
    runs.sort_by_key(|run| run.index);
    let mut groups: Vec<Group> = Vec::new();
    for run in runs {
        let joins = groups.last().is_some_and(|group| {
            let last = group[group.len() - 1];
            last.again == run.again
                && last.store_page + last.pages == run.store_page
                && table.adjacent(last.index + last.pages - 1, run.index)
                && length(group) + run.pages <= MAX_RUN_PAGES
        });
        match groups.last_mut().filter(|_| joins) {
            Some(group) => group.push(run),
            None => groups.push(vec![run]),
        }
    }
    groups.sort_by_key(|group| std::cmp::Reverse(length(group)));
    groups.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_units::Hva;
    use memfold_vm::RamLayout;

    fn table() -> VmTable {
        VmTable::new(RamLayout::one_block(Hva(0x7000_0000_0000), 4096))
    }

    fn run(index: Index, pages: u32) -> Run {
        Run {
            index,
            pages,
            store_page: 100,
            file: 1,
            page: 0,
            content: 1,
            at: None,
            tries: 0,
            again: false,
        }
    }

    #[test]
    fn if_a_run_is_split_the_second_part_has_the_right_memory_store_and_file_positions() {
        let rest = run(10, 8).rest(3).unwrap();
        assert_eq!(
            (rest.index, rest.pages, rest.store_page, rest.page),
            (13, 5, 103, 3)
        );
        assert_eq!(run(10, 8).rest(8), None);
    }

    #[test]
    fn the_single_pages_of_a_run_have_the_right_memory_store_and_file_positions() {
        let pages: Vec<Run> = run(10, 3).single_pages().collect();
        assert_eq!(pages.len(), 3);
        let last = pages[2];
        assert_eq!(
            (last.index, last.pages, last.store_page, last.page),
            (12, 1, 102, 2)
        );
    }

    #[test]
    fn runs_adjacent_in_memory_and_in_the_page_store_form_one_group_even_if_their_files_differ() {
        let next = Run {
            index: 20,
            store_page: 110,
            file: 2,
            ..run(20, 5)
        };
        let elsewhere = Run {
            store_page: 500,
            ..run(25, 30)
        };
        let groups = group(vec![elsewhere, next, run(10, 10)], &table());
        assert_eq!(groups, [vec![elsewhere], vec![run(10, 10), next]]);
    }
}

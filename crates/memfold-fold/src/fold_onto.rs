//! Makes a VM share memory with its newest fork: folds the VM's pages onto the fork's RAM image,
//! which holds the same bytes. memfold's library in QEMU stops the VM, compares each page again,
//! and leaves alone the pages that the VM has written meanwhile. One command stops the VM once and
//! for a short time; whoever sent it sends another one for what is left, so that the VM runs and
//! the engine does other work in between.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use memfold_units::PAGE_SIZE;
use memfold_wire::library::{
    FoldRun, Freeze, MAX_RUN_PAGES, MAX_RUNS, MapRun, Order, Outcome, Reply,
};

use super::guest::VmId;
use super::image::file_number;
use super::state::Engine;

/// Time after the stop of the VM at which an order starts no further run, in microseconds. A run
/// has at most 2 MiB, which are compared and mapped in about a millisecond. The stop for a fork
/// itself shall take less than 30 ms, and those that follow it are shorter.
const LIMIT_US: u32 = 10_000;

/// Result of one attempt to fold ranges of a VM onto a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoldedOnto {
    /// Number of pages that are folded.
    pub pages: u64,
    /// Ranges for which the time did not suffice.
    pub left: Vec<MapRun>,
    /// How long the VM stood still.
    pub stopped: Duration,
}

impl Engine {
    /// Folds ranges of a VM onto `file` while the VM is stopped once, and answers what is left.
    pub(super) fn fold_onto(
        &mut self,
        id: VmId,
        file: &File,
        ranges: &[MapRun],
        answer: &SyncSender<Result<FoldedOnto, String>>,
    ) {
        let folded = self.try_to_fold_onto(id, file, ranges);
        if let Some(vm) = self.vms.get_mut(&id) {
            vm.maps_stale = true;
        }
        // A receiver that is gone needs no answer: the pages are folded, or as they were.
        let _ = answer.send(folded);
    }

    fn try_to_fold_onto(
        &mut self,
        id: VmId,
        file: &File,
        ranges: &[MapRun],
    ) -> Result<FoldedOnto, String> {
        let facts = file.metadata().map_err(|error| error.to_string())?;
        let store = file_number(facts.dev(), facts.ino());
        let max_pages = facts.len() / PAGE_SIZE;
        let vm = self.vms.get(&id).ok_or("the VM has ended")?;
        if let Some(problem) = &vm.stats.problem {
            return Err(problem.clone());
        }
        // Sharing adds to what guests may claim, as every fold does.
        if let Some(why) = &self.braked {
            return Err(why.clone());
        }
        self.ask_library(id, &Order::AddStore { store, max_pages }, Some(file))?;
        let folded = self.fold_runs(id, runs_of(ranges, store));
        self.ask_library(id, &Order::RemoveStore { store }, None)?;
        folded
    }

    fn fold_runs(&mut self, id: VmId, mut runs: Vec<FoldRun>) -> Result<FoldedOnto, String> {
        if runs.is_empty() {
            return Ok(FoldedOnto::default());
        }
        let later = runs.split_off(runs.len().min(MAX_RUNS));
        let order = Order::Fold {
            freeze: Freeze::Stopped { limit_us: LIMIT_US },
            runs: runs.clone(),
        };
        let Reply::Outcomes {
            outcomes,
            cpu_ns,
            stopped_ns,
        } = self.ask_library(id, &order, None)?
        else {
            return Ok(FoldedOnto::default());
        };
        self.library_cpu_ns += cpu_ns;
        if let Some(vm) = self.vms.get_mut(&id) {
            vm.note_pause(stopped_ns);
        }
        let mut done = FoldedOnto {
            stopped: Duration::from_nanos(stopped_ns),
            left: later.iter().map(range_of).collect(),
            pages: 0,
        };
        for (run, outcome) in runs.iter().zip(outcomes) {
            done.pages += u64::from(outcome.pages_done(run.pages));
            let rest = rest(run, outcome, stopped_ns > 0);
            done.left.extend(rest.as_ref().map(range_of));
        }
        Ok(done)
    }

    fn ask_library(
        &mut self,
        id: VmId,
        order: &Order,
        file: Option<&File>,
    ) -> Result<Reply, String> {
        let vm = self.vms.get_mut(&id).ok_or("the VM has ended")?;
        match vm.guest.order(order, file.map(|file| file.as_fd())) {
            Ok(Reply::Error { reason }) => Err(reason),
            Ok(reply) => Ok(reply),
            Err(error) => {
                self.lost(id, &error);
                Err(error.to_string())
            }
        }
    }
}

/// Returns the runs of an order for these ranges.
fn runs_of(ranges: &[MapRun], store: u32) -> Vec<FoldRun> {
    let most = u64::from(MAX_RUN_PAGES);
    let mut runs = Vec::new();
    for range in ranges {
        for first in (0..range.pages).step_by(MAX_RUN_PAGES as usize) {
            runs.push(FoldRun {
                hva: range.hva + first * PAGE_SIZE,
                pages: u32::try_from(most.min(range.pages - first)).unwrap_or(0),
                store,
                store_page: range.file_page + first,
            });
        }
    }
    runs
}

fn range_of(run: &FoldRun) -> MapRun {
    MapRun {
        hva: run.hva,
        pages: run.pages.into(),
        file_page: run.store_page,
    }
}

/// Returns the part of a run that is tried again: behind a page that differs, or all of a run for
/// which the time did not suffice.
fn rest(run: &FoldRun, outcome: Outcome, has_stopped: bool) -> Option<FoldRun> {
    let skipped = match outcome {
        Outcome::Late if has_stopped => 0,
        Outcome::Differs { folded } | Outcome::Hole { folded } | Outcome::Busy { folded } => {
            folded + 1
        }
        _ => return None,
    };
    let pages = run.pages.checked_sub(skipped).filter(|pages| *pages > 0)?;
    Some(FoldRun {
        hva: run.hva + u64::from(skipped) * PAGE_SIZE,
        pages,
        store_page: run.store_page + u64::from(skipped),
        ..*run
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folding_a_run_continues_behind_a_page_that_differs_and_is_retried_after_a_timeout() {
        let range = MapRun {
            hva: 0x10_0000,
            pages: 700,
            file_page: 40,
        };
        let runs = runs_of(&[range], 5);
        let facts: Vec<_> = runs
            .iter()
            .map(|r| (r.hva, r.pages, r.store_page))
            .collect();
        assert_eq!(facts, [(0x10_0000, 512, 40), (0x30_0000, 188, 552)]);
        let after = rest(&runs[1], Outcome::Differs { folded: 10 }, true).unwrap();
        assert_eq!(
            (after.hva, after.pages, after.store_page),
            (0x30_b000, 177, 563)
        );
        assert_eq!(rest(&runs[1], Outcome::Differs { folded: 187 }, true), None);
        assert_eq!(rest(&runs[1], Outcome::Late, true), Some(runs[1]));
        // A VM that does not run is not asked again and again.
        assert_eq!(rest(&runs[1], Outcome::Late, false), None);
        assert_eq!(rest(&runs[1], Outcome::Done, true), None);
    }
}

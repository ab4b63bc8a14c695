//! Memory of one process of the study `mappings`: folded by memfold's library, or unfolded.

use std::os::fd::{AsRawFd as _, RawFd};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum;
use memfold_store::{Source, Store};
use memfold_sys::region::{Area, Mapping};
use memfold_units::{ByteSize, PAGE_SIZE};
use memfold_wire::library::{Advice, FoldRun, Freeze, MAX_RUNS, Order, Outcome, Range};
use rustix::mm::Advice as Madvise;
use serde::{Deserialize, Serialize};

use super::layout::{Layout, Pages, RUN_PAGES, words};
use crate::folding::Library;

/// Number by which the library knows the page store.
const STORE: u32 = 1;

/// Number of runs that are copied to the page store together, as in a batch of the engine.
const FILL_RUNS: usize = 512;

/// How often a run is tried that the kernel refuses to move, because it migrates one of its pages.
const TRIES: u32 = 50;

/// State of a process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Each run is folded.
    Folded,
    /// No run is folded, and memory is in pages of 4 KiB, as the folded memory is.
    Unfolded,
    /// No run is folded, and memory is in huge pages where the kernel has them.
    UnfoldedHuge,
}

/// Memory of this process, with a page store that has a copy of each run.
pub struct Memory {
    pub layout: Layout,
    pub kind: Kind,
    pub library: Library,
    ram: Mapping,
    store: Store,
    /// First page in the store of each run.
    places: Vec<u64>,
}

impl Memory {
    /// Makes memory in which no run is folded yet.
    pub fn new(layout: Layout, kind: Kind) -> anyhow::Result<Self> {
        let library = Library::new()?;
        let ram = Mapping::anonymous(layout.pages(), true)?;
        let area = ram.area();
        area.advise(match kind {
            Kind::Folded | Kind::Unfolded => Madvise::LinuxNoHugepage,
            Kind::UnfoldedHuge => Madvise::LinuxHugepage,
        })?;
        // As QEMU does it. A kernel without KSM refuses the second one.
        area.advise(Madvise::LinuxDontFork)?;
        let mergeable = area.advise(Madvise::LinuxMergeable).is_ok();
        for unit in 0..layout.units() {
            let (first, pages) = layout.filled(unit);
            (first..first + pages).for_each(|page| area.part(page, 1).write(&words(page)));
        }
        let (hva, pages) = (area.start().0, area.pages());
        let advice = Advice {
            mergeable,
            nohugepage: kind != Kind::UnfoldedHuge,
            hugepage: kind == Kind::UnfoldedHuge,
            dontfork: true,
            noreserve: true,
            ..Advice::default()
        };
        library.give(&Order::AddRam { hva, pages, advice }, None)?;

        let shared = layout.runs() * RUN_PAGES * PAGE_SIZE;
        let name = format!("bench-mappings-{}", std::process::id());
        let mut store = Store::create(&name, ByteSize(2 * shared + ByteSize::mib(4).0))?;
        let mut places = vec![0; usize::try_from(layout.runs())?];
        let order: Vec<u64> = layout.in_store_order().collect();
        for runs in order.chunks(FILL_RUNS) {
            store.align();
            let first = store.reserve(runs.len() as u64 * RUN_PAGES)?;
            let source = |&run: &u64| Source {
                pid: rustix::process::getpid(),
                from: part(area, layout.run(run)).start(),
                pages: RUN_PAGES,
            };
            let sources: Vec<Source> = runs.iter().map(source).collect();
            let filled = store.fill(first, &sources);
            if let Some(error) = filled.error {
                return Err(error.into());
            }
            let is_whole = filled.missing.is_empty();
            ensure!(is_whole, "memory of this process ends early");
            for (&run, step) in runs.iter().zip(0..) {
                places[usize::try_from(run)?] = first.0 + step * RUN_PAGES;
            }
        }
        let add = Order::AddStore {
            store: STORE,
            max_pages: store.frontier().0,
        };
        library.give(&add, Some(store.read_only().try_clone_to_owned()?))?;
        Ok(Self {
            layout,
            kind,
            library,
            ram,
            store,
            places,
        })
    }

    pub fn area(&self) -> Area {
        self.ram.area()
    }

    pub fn run(&self, run: u64) -> Area {
        part(self.area(), self.layout.run(run))
    }

    /// Returns the number of the store's read-only descriptor in this process.
    pub fn store_descriptor(&self) -> RawFd {
        self.store.read_only().as_raw_fd()
    }

    /// Maps the store's copy of a run over an area of as many pages, as the library does it.
    pub fn map(&self, run: u64, over: Area) -> anyhow::Result<()> {
        Ok(over.map_file(self.store.read_only(), self.place(run)?)?)
    }

    fn place(&self, run: u64) -> anyhow::Result<u64> {
        let place = usize::try_from(run).ok().and_then(|n| self.places.get(n));
        place.copied().context("no such run")
    }

    /// Folds runs with one order for each `together` of them, and calls `between` after each order.
    /// Pages that the kernel refuses to move for a moment are tried again afterwards.
    pub fn fold(
        &self,
        runs: &[u64],
        together: usize,
        mut between: impl FnMut(),
    ) -> anyhow::Result<()> {
        let runs = runs.iter().map(|&run| self.fold_run(run));
        let runs = runs.collect::<anyhow::Result<Vec<_>>>()?;
        let mut left = Vec::new();
        for runs in runs.chunks(together.clamp(1, MAX_RUNS)) {
            left.extend(self.order_fold(runs)?);
            between();
        }
        for _ in 0..TRIES {
            if left.is_empty() {
                return Ok(());
            }
            let again: Vec<FoldRun> = left.drain(..).map(|(run, _)| run).collect();
            for runs in again.chunks(MAX_RUNS) {
                left.extend(self.order_fold(runs)?);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        bail!(
            "{} runs could not be folded, the first one: {:?}",
            left.len(),
            left.first().map(|(_, outcome)| outcome)
        )
    }

    /// Folds runs as fast as possible.
    pub fn fold_all(&self, runs: &[u64]) -> anyhow::Result<()> {
        self.fold(runs, MAX_RUNS, || {})
    }

    fn fold_run(&self, run: u64) -> anyhow::Result<FoldRun> {
        let area = self.run(run);
        Ok(FoldRun {
            hva: area.start().0,
            pages: u32::try_from(area.pages())?,
            store: STORE,
            store_page: self.place(run)?,
        })
    }

    /// Gives one order to fold. Returns what is left of runs that were not folded.
    fn order_fold(&self, runs: &[FoldRun]) -> anyhow::Result<Vec<(FoldRun, Outcome)>> {
        let order = Order::Fold {
            freeze: Freeze::Move,
            runs: runs.to_vec(),
        };
        let (outcomes, _) = self.library.outcomes(&order)?;
        let rest = |(run, outcome): (&FoldRun, Outcome)| {
            let done = outcome.pages_done(run.pages);
            let rest = FoldRun {
                hva: run.hva + u64::from(done) * PAGE_SIZE,
                pages: run.pages - done,
                store_page: run.store_page + u64::from(done),
                ..*run
            };
            (rest.pages > 0).then_some((rest, outcome))
        };
        Ok(runs.iter().zip(outcomes).filter_map(rest).collect())
    }

    /// Turns folded runs into anonymous memory with the same bytes.
    pub fn release(&self, runs: &[u64]) -> anyhow::Result<()> {
        for runs in runs.chunks(64) {
            let range = |&run: &u64| Range {
                hva: self.run(run).start().0,
                pages: RUN_PAGES,
            };
            let order = Order::Release {
                freeze: Freeze::WriteProtect,
                ranges: runs.iter().map(range).collect(),
            };
            let (outcomes, _) = self.library.outcomes(&order)?;
            if let Some(other) = outcomes.iter().find(|o| **o != Outcome::Done) {
                bail!("the fold library did not release a run: {other:?}");
            }
        }
        Ok(())
    }

    /// Discards a run through the library, as QEMU does it for free page reporting.
    pub fn discard(&self, run: u64) -> anyhow::Result<()> {
        self.library.discard(self.run(run))
    }

    /// Makes fresh anonymous memory of runs, with their bytes. Unlike memory that was released, it
    /// is one mapping with its anonymous neighbours.
    pub fn renew(&self, runs: &[u64]) -> anyhow::Result<()> {
        for &run in runs {
            self.discard(run)?;
            let (first, pages) = self.layout.run(run);
            (first..first + pages).for_each(|page| self.area().part(page, 1).write(&words(page)));
        }
        Ok(())
    }

    /// Makes page faults possible again: drops the fresh pages, and in folded memory all private
    /// copies of folded pages. Then the runs of even units are mapped, so that a write to them
    /// copies a page, and those of odd units are not, so that a read of them is a fault.
    pub fn prepare(&self) -> anyhow::Result<()> {
        for unit in 0..self.layout.units() {
            part(self.area(), self.layout.fresh(unit)).advise(Madvise::LinuxDontNeed)?;
            if self.kind == Kind::Folded {
                let shared = part(self.area(), self.layout.shared(unit));
                shared.advise(Madvise::LinuxDontNeed)?;
                if unit % 2 == 0 {
                    shared.advise(Madvise::LinuxPopulateRead)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the number of pages whose bytes are not those that were written first. Fresh pages
    /// are not looked at.
    pub fn wrong_pages(&self) -> anyhow::Result<u64> {
        let scratch = Mapping::anonymous(1, false)?;
        let is_wrong = |page: &u64| {
            scratch.area().write(&words(*page));
            self.area().part(*page, 1).equal_pages(scratch.area()) == 0
        };
        let pages = |unit| {
            let (first, pages) = self.layout.filled(unit);
            first..first + pages
        };
        let pages = (0..self.layout.units()).flat_map(pages);
        Ok(pages.filter(is_wrong).count() as u64)
    }
}

/// Returns a part of an area.
pub fn part(area: Area, (first, pages): Pages) -> Area {
    area.part(first, pages)
}

//! Folds one run of pages in QEMU's memory: freezes the run, so that no thread can change it,
//! compares it with the page store, maps the page store instead, and thaws the run.

use std::os::fd::AsFd as _;
use std::time::Duration;

use memfold_sys::region::Area;
use memfold_sys::userfaultfd::Userfaultfd;
use memfold_wire::library::{FoldRun, Freeze, Outcome};
use rustix::io::Errno;
use rustix::mm::Advice;

use crate::freeze::{Staged, Staging, Unwritable};
use crate::ram::Kind;
use crate::state::{State, record_freeze};
use crate::stores::Store;

/// Result of one step: the number of pages folded from the start, the reason why the step stopped,
/// and how long the pages were frozen.
struct Step {
    folded: u64,
    stop: Option<Outcome>,
    frozen: Option<Duration>,
}

impl Step {
    const fn nothing(stop: Outcome) -> Self {
        Self {
            folded: 0,
            stop: Some(stop),
            frozen: None,
        }
    }
}

impl State {
    /// Folds one run. Pages of different kinds are folded in separate steps.
    pub(crate) fn fold(
        &mut self,
        uffd: Option<&Userfaultfd>,
        freeze: Freeze,
        order: &FoldRun,
    ) -> Outcome {
        let pages = u64::from(order.pages);
        let Self {
            ram,
            stores,
            staging,
            stats,
            ..
        } = self;
        let Some((block, area)) = ram.find(order.hva, pages) else {
            return Outcome::Refused;
        };
        let Some(store) = stores.get(order.store) else {
            return Outcome::Refused;
        };
        let Some(window) = store.window(order.store_page, pages) else {
            return Outcome::Refused;
        };
        let mut folded = 0;
        let mut end = None;
        while folded < pages && end.is_none() {
            let (kind, run) = block.first_kind(area.after(folded));
            let first = order.store_page + folded;
            let part = Part {
                run,
                bytes: window.part(folded, run.pages()),
                store,
                first,
                back: kind == Kind::Template && block.shows(run, store.identity, first),
            };
            let step = match (freeze, kind, uffd, staging.as_mut()) {
                (_, Kind::Awaited, ..) => Err(Outcome::Refused),
                // Anonymous pages are moved even if the order says write protection, because a move
                // is also safe with DMA.
                (_, Kind::Anonymous, Some(uffd), Some(staging)) => part.by_move(uffd, staging),
                (Freeze::Stopped { .. }, ..) => {
                    part.by_write_protection(Unwritable::in_stopped(uffd, run))
                }
                (Freeze::WriteProtect, _, Some(uffd), _) if uffd.protection_lasts() => {
                    part.by_write_protection(Unwritable::in_running(uffd, run))
                }
                _ => Err(Outcome::Refused),
            };
            let step = step.unwrap_or_else(Step::nothing);
            if step.folded > 0 && !part.back {
                let done = run.part(0, step.folded);
                block.set(done, Kind::Folded);
                block.advise_later(done);
            }
            match kind {
                Kind::Anonymous => stats.folded_pages += step.folded,
                Kind::Folded | Kind::Template | Kind::Awaited => {
                    stats.refolded_pages += step.folded;
                }
            }
            match step.stop {
                Some(Outcome::Differs { .. }) => stats.differing_pages += 1,
                Some(Outcome::Busy { .. }) => stats.busy_runs += 1,
                _ => {}
            }
            if let Some(frozen) = step.frozen {
                record_freeze(stats, frozen);
            }
            folded += step.folded;
            end = step.stop;
        }
        let folded = u32::try_from(folded).unwrap_or(u32::MAX);
        match end {
            None => Outcome::Done,
            // `Refused` means that nothing was changed. After a folded part, the refused page is
            // one that is no longer anonymous: a hole.
            Some(Outcome::Refused) if folded > 0 => Outcome::Hole { folded },
            Some(stop) => stop.at(folded),
        }
    }
}

/// Pages of one kind, and the store's pages that they shall show.
struct Part<'a> {
    run: Area,
    /// The store's pages, mapped for comparison.
    bytes: Area,
    store: &'a Store,
    /// Index in the store of the first page.
    first: u64,
    /// Whether the run maps the same pages of the same file already. Then dropping the guest's
    /// private copies is enough, and the mapping stays whole.
    back: bool,
}

impl Part<'_> {
    /// Folds anonymous pages: freezes the pages by a move to staging, compares them, maps the store
    /// and thaws the run.
    fn by_move(&self, uffd: &Userfaultfd, staging: &mut Staging) -> Result<Step, Outcome> {
        let slot = staging.slot(self.run);
        // The compare faults in 16 pages of the store's window at a time. Measured on a memfd, in
        // µs of CPU per page in runs of 64: 1.03-1.09 in this way; 1.16-1.28 with
        // MADV_POPULATE_READ before the freeze; 1.6 with the store's bytes read into a buffer
        // instead of mapped. For a store in huge pages, see docs/decisions/0011-store-in-tmpfs.md.
        let (staged, stop) =
            Staged::freeze(uffd, &staging.pagemap, self.run, slot).map_err(failed)?;
        let contents = staged.contents();
        let mut folded = contents.equal_pages(self.bytes);
        let mut stop = match stop {
            _ if folded < contents.pages() => Some(Outcome::Differs { folded: 0 }),
            Some(Errno::BUSY) => Some(Outcome::Busy { folded: 0 }),
            Some(Errno::NOENT) => Some(Outcome::Hole { folded: 0 }),
            stop => stop.map(failed),
        };
        let equal = self.run.part(0, folded);
        if let Err(errno) = equal.map_file(self.store.file.as_fd(), self.first) {
            folded = 0;
            stop = Some(failed(errno));
        }
        Ok(Step {
            folded,
            stop,
            frozen: Some(staged.finish(folded, true)),
        })
    }

    /// Folds pages of any kind in place; no thread can write to them until `guard` is dropped.
    fn by_write_protection(&self, guard: Result<Unwritable<'_>, Errno>) -> Result<Step, Outcome> {
        let guard = guard.map_err(|errno| match errno {
            // The kernel cannot write-protect the run, or QEMU handles SIGSEGV itself.
            Errno::INVAL | Errno::BUSY => Outcome::Refused,
            errno => failed(errno),
        })?;
        let folded = self.run.equal_pages(self.bytes);
        let same = self.run.part(0, folded);
        let done = if self.back {
            same.advise(Advice::LinuxDontNeed)
        } else {
            same.map_file(self.store.file.as_fd(), self.first)
        };
        // After a fold-back the mapping is the old one, which has yet to be thawed.
        let is_replaced = done.is_ok() && !self.back;
        let frozen = guard.finish(if is_replaced { folded } else { 0 });
        let differs = Outcome::Differs { folded: 0 };
        Ok(Step {
            folded: if done.is_ok() { folded } else { 0 },
            stop: match done {
                Err(errno) => Some(failed(errno)),
                Ok(()) => (folded < self.run.pages()).then_some(differs),
            },
            frozen: Some(frozen),
        })
    }
}

/// Makes the outcome of a failed system call before which no page was done.
pub(crate) const fn failed(errno: Errno) -> Outcome {
    Outcome::Failed {
        errno: errno.raw_os_error(),
        folded: 0,
    }
}

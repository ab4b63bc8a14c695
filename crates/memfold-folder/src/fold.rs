//! Folds one run of pages: freeze, compare with the store, replace the mapping, thaw.

use std::time::Duration;

use memfold_sys::region::Area;
use memfold_sys::userfaultfd::Userfaultfd;
use memfold_wire::library::{FoldRun, Freeze, Outcome, Stats};
use rustix::io::Errno;
use rustix::mm::Advice;

use crate::freeze::{Protected, Staged, Staging};
use crate::ram::Kind;
use crate::state::{State, record_freeze};
use crate::stores::Store;

/// Reason why folding a run stopped before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    Differs,
    Busy,
    Hole,
    Refused,
    Failed(Errno),
}

impl Stop {
    fn outcome(self, folded: u64) -> Outcome {
        let folded = u32::try_from(folded).unwrap_or(u32::MAX);
        match self {
            Self::Differs => Outcome::Differs { folded },
            Self::Busy => Outcome::Busy { folded },
            // `Refused` means that nothing was changed. After a folded part, the refused page is
            // one that is no longer anonymous: a hole.
            Self::Hole => Outcome::Hole { folded },
            Self::Refused if folded > 0 => Outcome::Hole { folded },
            Self::Refused => Outcome::Refused,
            Self::Failed(errno) => Outcome::Failed {
                errno: errno.raw_os_error(),
                folded,
            },
        }
    }
}

/// Result of one step: the number of pages folded from the start, the reason why the step stopped,
/// and how long the pages were frozen.
struct Step {
    folded: u64,
    stop: Option<Stop>,
    frozen: Option<Duration>,
}

impl Step {
    const fn nothing(stop: Stop) -> Self {
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
        run: &FoldRun,
    ) -> Outcome {
        let pages = u64::from(run.pages);
        let Self {
            ram,
            stores,
            staging,
            stats,
            ..
        } = self;
        let Some((block, area)) = ram.find(run.hva, pages) else {
            return Outcome::Refused;
        };
        let Some(store) = stores.get(run.store) else {
            return Outcome::Refused;
        };
        let Some(window) = store.window(run.store_page, pages) else {
            return Outcome::Refused;
        };
        let mut folded = 0;
        let mut end = None;
        while folded < pages && end.is_none() {
            let (kind, part) = block.first_kind(area.after(folded));
            let first = run.store_page + folded;
            let bytes = window.part(folded, part.pages());
            let step = match (freeze, kind, uffd, staging.as_mut()) {
                (Freeze::Stopped { .. }, ..) => {
                    let back = kind == Kind::Template && block.shows(part, store.identity(), first);
                    at_rest(part, bytes, store, first, back)
                }
                // Anonymous pages are moved even if the order says write protection, because a move
                // is also safe with DMA.
                (_, Kind::Anonymous, Some(uffd), Some(staging)) => {
                    by_move(uffd, staging, part, bytes, store, first)
                }
                (Freeze::WriteProtect, _, Some(uffd), _) if uffd.protection_lasts() => {
                    let back = kind == Kind::Template && block.shows(part, store.identity(), first);
                    by_write_protection(uffd, part, bytes, store, first, back)
                }
                _ => Step::nothing(Stop::Refused),
            };
            if step.folded > 0 {
                let done = part.part(0, step.folded);
                let back = kind == Kind::Template && block.shows(part, store.identity(), first);
                if !back {
                    block.set(done, Kind::Folded);
                    block.advise_later(done);
                }
            }
            record(stats, kind, &step);
            folded += step.folded;
            end = step.stop;
        }
        end.map_or(Outcome::Done, |stop| stop.outcome(folded))
    }
}

fn record(stats: &mut Stats, kind: Kind, step: &Step) {
    match kind {
        Kind::Anonymous => stats.folded_pages += step.folded,
        Kind::Folded | Kind::Template => stats.refolded_pages += step.folded,
    }
    match step.stop {
        Some(Stop::Differs) => stats.differing_pages += 1,
        Some(Stop::Busy) => stats.busy_runs += 1,
        _ => {}
    }
    if let Some(frozen) = step.frozen {
        record_freeze(stats, frozen);
    }
}

/// Folds anonymous pages: freezes the pages by a move to staging, compares them, maps the store and
/// thaws the run.
fn by_move(
    uffd: &Userfaultfd,
    staging: &mut Staging,
    run: Area,
    bytes: Area,
    store: &Store,
    first: u64,
) -> Step {
    let slot = staging.slot(run);
    // The compare faults in 16 pages of the store's window at a time. Measured on a memfd, in µs of
    // CPU per page in runs of 64: 1.03-1.09 in this way; 1.16-1.28 with MADV_POPULATE_READ before
    // the freeze; 1.6 with the store's bytes read into a buffer instead of mapped. For a store in
    // huge pages, see docs/decisions/0011-store-in-tmpfs.md.
    let (staged, stop) = match Staged::freeze(uffd, staging.pagemap(), run, slot) {
        Ok(frozen) => frozen,
        Err(errno) => return Step::nothing(Stop::Failed(errno)),
    };
    let contents = staged.contents();
    let equal = contents.equal_pages(bytes);
    let mut stop = match stop {
        _ if equal < contents.pages() => Some(Stop::Differs),
        Some(Errno::BUSY) => Some(Stop::Busy),
        Some(Errno::NOENT) => Some(Stop::Hole),
        Some(errno) => Some(Stop::Failed(errno)),
        None => None,
    };
    let mut folded = equal;
    if let Err(errno) = run.part(0, equal).map_file(store.descriptor(), first) {
        folded = 0;
        stop = Some(Stop::Failed(errno));
    }
    let frozen = staged.finish(folded, true);
    Step {
        folded,
        stop,
        frozen: Some(frozen),
    }
}

/// Folds pages that map a file; write protection stops writes meanwhile.
fn by_write_protection(
    uffd: &Userfaultfd,
    run: Area,
    bytes: Area,
    store: &Store,
    first: u64,
    back: bool,
) -> Step {
    let guard = match Protected::freeze(uffd, run) {
        Ok(guard) => guard,
        // The run is a private view of a file that is not shmem, which the kernel cannot
        // write-protect.
        Err(Errno::INVAL) => return Step::nothing(Stop::Refused),
        Err(errno) => return Step::nothing(Stop::Failed(errno)),
    };
    let mut step = at_rest(run, bytes, store, first, back);
    // After a fold-back the mapping is the old one, which is still registered.
    let frozen = guard.finish(if back { 0 } else { step.folded });
    step.frozen = Some(frozen);
    step
}

/// Compares and replaces pages that nobody writes. If `back` is set, the run maps the same pages of
/// the same file already; then dropping the guest's private copies is enough, and the mapping stays
/// whole.
fn at_rest(run: Area, bytes: Area, store: &Store, first: u64, back: bool) -> Step {
    let equal = run.equal_pages(bytes);
    let same = run.part(0, equal);
    let done = if back {
        same.advise(Advice::LinuxDontNeed)
    } else {
        same.map_file(store.descriptor(), first)
    };
    match done {
        Ok(()) => Step {
            folded: equal,
            stop: (equal < run.pages()).then_some(Stop::Differs),
            frozen: None,
        },
        Err(errno) => Step::nothing(Stop::Failed(errno)),
    }
}

//! A part of the self-test: folds memory of this process while threads write to it. The test finds
//! kernels that move pages incorrectly, and faults of memfold's library that lose a write.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, ensure};
use memfold_lab::at_once;
use memfold_sys::memory;
use memfold_sys::region::{Area, Mapping};
use memfold_units::{ByteSize, PAGE_BYTES, PAGE_SIZE};
use memfold_wire::library::{Advice, FoldRun, Freeze, Order, Outcome, Range};
use serde::Serialize;

use crate::folding::Library;
use crate::random::Random;

const PAGES: u64 = 1024;
const WRITERS: u64 = 2;
/// Length in pages at which a page store is replaced by a new one. The old store ends when no page
/// of it is mapped any more.
const STORE_PAGES: u64 = 1 << 15;

/// Results of the stress test of the fold library.
#[derive(Clone, Debug, Serialize)]
pub struct LibraryProof {
    /// Duration of the stress test, in seconds.
    pub seconds: f64,
    /// Number of pages folded from anonymous memory during the stress test.
    pub folded_pages: u64,
    /// Number of pages folded again after a write, over a range that was folded before.
    pub refolded_pages: u64,
    /// Number of runs that a thread changed between the copy to the page store and the comparison,
    /// so that they were not folded.
    pub changed_runs: u64,
    /// Number of writes by the threads of the stress test.
    pub writes: u64,
    /// Number of pages that do not hold the bytes that were written last; any number but 0 is a
    /// failure.
    pub wrong_pages: u64,
    /// Longest time that a page was protected against writes during folding, in microseconds.
    pub freeze_max_us: f64,
}

/// Runs the stress test for `time`: folds random runs while threads count in every page, and then
/// looks for lost counts.
pub fn stress(time: Duration) -> anyhow::Result<LibraryProof> {
    // As in QEMU, the library and its userfaultfd live as long as the process.
    let library: &'static Library = Box::leak(Box::new(Library::new()?));
    let ram = Mapping::anonymous(PAGES, true)?;
    let area = ram.area();
    for page in 0..PAGES {
        area.part(page, 1).write(&body(page, 0));
    }
    let add = Order::AddRam {
        hva: area.start().0,
        pages: PAGES,
        advice: Advice {
            dontfork: true,
            noreserve: true,
            ..Advice::default()
        },
    };
    library.give(&add, None)?;
    let stop = AtomicBool::new(false);
    let began = Instant::now();
    let (changed_runs, counts) = std::thread::scope(|scope| {
        let writers = scope.spawn(|| at_once(0..WRITERS, |me| Ok(count(area, me, &stop))));
        let result = fold_for(library, area, time);
        stop.store(true, Ordering::Relaxed);
        let counts = writers.join().ok().and_then(Result::ok);
        let counts =
            counts.ok_or_else(|| anyhow!("a thread that writes to the folded memory panicked"))?;
        anyhow::Ok((result?, counts))
    })?;
    let mut writes = 0;
    let mut wrong_pages = 0;
    for (page, at) in (0..PAGES).zip(0_usize..) {
        let count: u64 = counts.iter().map(|counts| counts[at]).sum();
        let wanted: Vec<u8> = body(page, count)
            .iter()
            .flat_map(|w| w.to_ne_bytes())
            .collect();
        wrong_pages += u64::from(read(area.part(page, 1))? != wanted);
        writes += count;
    }
    let stats = library.stats()?;
    Ok(LibraryProof {
        seconds: began.elapsed().as_secs_f64(),
        folded_pages: stats.folded_pages,
        refolded_pages: stats.refolded_pages,
        changed_runs,
        writes,
        wrong_pages,
        freeze_max_us: stats.freeze_max_ns as f64 / 1000.0,
    })
}

/// Returns a page's words after `count` writes: the count, and words that never change.
fn body(page: u64, count: u64) -> Vec<u64> {
    let fixed = |word: u64| (page << 10 | word).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    std::iter::once(count).chain((1..512).map(fixed)).collect()
}

/// Counts in the pages of this thread until `stop` is set. Returns the counts of all pages; 0 for
/// pages of other threads.
fn count(area: Area, me: u64, stop: &AtomicBool) -> Vec<u64> {
    let mut counts = vec![0; usize::try_from(PAGES).unwrap_or(0)];
    let mut random = Random::new(0x5EED + me);
    while !stop.load(Ordering::Relaxed) {
        let page = random.below(PAGES / WRITERS) * WRITERS + me;
        if let Some(count) = usize::try_from(page).ok().and_then(|i| counts.get_mut(i)) {
            *count += 1;
            area.part(page, 1).write(&[*count]);
        }
    }
    counts
}

fn read(area: Area) -> anyhow::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(area.pages())? * PAGE_BYTES];
    let got = memory::read(rustix::process::getpid(), area.start(), &mut bytes)?;
    ensure!(got == bytes.len(), "memory of our own could not be read");
    Ok(bytes)
}

/// Folds random runs until the time is over. Returns the number of runs that were changed
/// meanwhile.
fn fold_for(library: &Library, area: Area, time: Duration) -> anyhow::Result<u64> {
    let mut random = Random::new(20_241_121);
    let end = Instant::now() + time;
    let mut changed = 0;
    let mut number = 0;
    while Instant::now() < end {
        number += 1;
        let store = new_store(library, number)?;
        let mut next = 0;
        while next + 64 < STORE_PAGES && Instant::now() < end {
            // Most runs are short, because a long one is nearly always changed before it is
            // compared.
            let most = if random.below(4) == 0 { 64 } else { 2 };
            let first = random.below(PAGES);
            let pages = 1 + random.below(most.min(PAGES - first));
            let part = area.part(first, pages);
            // Now and then, folded memory becomes anonymous again, because pages are moved only
            // from anonymous memory.
            if random.below(4) == 0 {
                let ranges = vec![Range {
                    hva: part.start().0,
                    pages,
                }];
                let freeze = Freeze::WriteProtect;
                library.outcomes(&Order::Release { freeze, ranges })?;
            }
            store.write_all_at(&read(part)?, next * PAGE_SIZE)?;
            let run = FoldRun {
                hva: part.start().0,
                pages: u32::try_from(pages)?,
                store: number,
                store_page: next,
            };
            next += pages;
            // Anonymous memory is moved away; memory that is folded already, or partly, is
            // write-protected.
            let mut outcome = library.fold(Freeze::Move, run)?;
            if matches!(outcome, Outcome::Refused | Outcome::Hole { .. }) {
                outcome = library.fold(Freeze::WriteProtect, run)?;
            }
            match outcome {
                Outcome::Differs { .. } => changed += 1,
                Outcome::Failed { errno, .. } => {
                    bail!("the kernel refused to map shared pages: errno {errno}")
                }
                _ => {}
            }
        }
        library.give(&Order::RemoveStore { store: number }, None)?;
    }
    Ok(changed)
}

fn new_store(library: &Library, number: u32) -> anyhow::Result<File> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let store = File::from(rustix::fs::memfd_create("memfold-self-test", flags)?);
    store.set_len(ByteSize(STORE_PAGES * PAGE_SIZE).0)?;
    let readable = File::open(format!("/proc/self/fd/{}", store.as_raw_fd()))?;
    let order = Order::AddStore {
        store: number,
        max_pages: STORE_PAGES,
    };
    library.give(&order, Some(readable.into()))?;
    Ok(store)
}

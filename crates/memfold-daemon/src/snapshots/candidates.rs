//! Asks a guest which pages of its memory are also on its disks. A save that keeps hot pages
//! (`--keep hot`) then stores a reference to the disk instead of such a page.
//!
//! ```text
//!   engine   runs of pages that cache consecutive pages of a file, by the agent's hints       CachedPages
//!   guest    where these files lie on its disks, the files with most cached pages first       guest_extents
//!   here     run of pages -> disk of the guest, and byte on it                                Candidate
//! ```
//! A guest may report anything. A false report harms only the guest's own snapshot, because the
//! save compares the bytes. The memory for a report is limited ([`MAX_PLACES`], and one candidate
//! for each [`FEWEST_PAGES`] pages of RAM), and so is the time ([`LIMIT`]).

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use memfold_fold::{Command, PageRun};
use memfold_snapshot::guest_extents::{self, GuestDisk, MAX_ANSWER};
use memfold_snapshot::{Candidate, FEWEST_PAGES};
use memfold_units::PAGE_SIZE;
use memfold_vm::AgentLink;
use memfold_wire::agent::{FileNumber, OutputStream};
use memfold_wire::order::{GuestOrder, PathList};
use tracing::{debug, info};

use crate::folding::Folding;
use crate::machine::{Machine, text};

/// Time limit of all questions to the guest together.
const LIMIT: Duration = Duration::from_secs(4);

/// Pages that a save writes in a second (about 400 MB/s). A question that would take longer than
/// writing its pages is not asked.
const WRITTEN_PAGES_PER_S: u64 = 100_000;

/// Largest number of files that the guest is asked about.
const MAX_FILES: usize = 1 << 16;

/// Number of files whose paths the engine looks up at once.
const PATHS_AT_ONCE: usize = 1024;

/// Largest number of runs on disks that are stored for one guest, 32 bytes each.
const MAX_PLACES: usize = 1 << 18;

/// Largest number of disks of a guest.
const MAX_DISKS: usize = 64;

/// Consecutive pages of a file that are also consecutive on a disk of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    /// The first page, as an index in the file.
    page: u32,
    pages: u32,
    /// Index of the disk, in the order in which the guest named its disks.
    guest_disk: usize,
    /// The first page, as a block of the disk (one page each).
    block: u64,
}

impl Place {
    const fn end(&self) -> u64 {
        self.page as u64 + self.pages as u64
    }
}

/// Positions of files on the guest's disks, as the guest reports. Places of one file are ascending
/// and do not overlap.
#[derive(Debug, Default)]
struct Places {
    of: HashMap<FileNumber, Vec<Place>>,
    disks: Vec<GuestDisk>,
    count: usize,
}

/// What is known of a guest's page cache.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Number of pages of files that the guest has cached, as its agent reported.
    pub(super) cached: u64,
    /// Memory that the VM's disks may also hold, in ascending order.
    pub(super) candidates: Vec<Candidate>,
}

/// Finds memory of the VM that its disks may also hold. The result is empty if the guest cannot
/// report it.
pub(super) fn find(folding: &Folding, machine: &Machine) -> Found {
    let began = Instant::now();
    let cached = folding.ask(|answer| Command::CachedPages(machine.id(), answer));
    let (Ok(Some(cached)), Some(agent)) = (cached, machine.agent()) else {
        info!(
            vm = machine.name(),
            "guest has not reported its page cache, so the save does not compare memory with disks"
        );
        return Found::default();
    };
    let mut places = Places::default();
    let paths = |files: &[FileNumber]| {
        let ask = |answer| Command::FilePaths(machine.id(), files.to_vec(), answer);
        folding.ask(ask).map_err(|error| error.to_string())
    };
    let run = |order, limit| run(&agent, order, limit);
    let asked = places.ask(&rank(cached.runs()), began + LIMIT, paths, run);
    if let Err(why) = asked {
        info!(
            vm = machine.name(),
            why, "guest did not report where on its disks all cached files are"
        );
    }
    let candidates = join(cached.runs(), &places);
    debug!(
        vm = machine.name(),
        files = places.of.len(),
        candidates = candidates.len(),
        pages = candidates.iter().map(|run| run.pages).sum::<u64>(),
        took_ms = began.elapsed().as_millis(),
        "cached pages found on the guest's disks"
    );
    let cached = cached.runs().map(|run| u64::from(run.pages)).sum();
    Found { cached, candidates }
}

/// Returns the number of pages of a guest's page cache, and the paths of the files with most of
/// them, most first; none if they are not known.
pub(super) fn most_cached_files(folding: &Folding, machine: &Machine) -> (u64, Vec<Vec<u8>>) {
    let cached = folding.ask(|answer| Command::CachedPages(machine.id(), answer));
    let Ok(Some(cached)) = cached else {
        return (0, Vec::new());
    };
    let pages = cached.runs().map(|run| u64::from(run.pages)).sum();
    let ranked = rank(cached.runs());
    let files = ranked.iter().take(PATHS_AT_ONCE).map(|&(file, _)| file);
    let files: Vec<FileNumber> = files.collect();
    let ask = |answer| Command::FilePaths(machine.id(), files, answer);
    (pages, folding.ask(ask).unwrap_or_default())
}

/// Carries out an order in the guest and returns its standard output.
fn run(agent: &AgentLink, order: GuestOrder, limit: Duration) -> Result<Vec<u8>, String> {
    let (mut answer, mut words) = (Vec::new(), Vec::new());
    let code = agent.run_streaming(order, limit, |stream, bytes| {
        let kept = match stream {
            OutputStream::Stdout => &mut answer,
            OutputStream::Stderr => &mut words,
        };
        kept.extend_from_slice(bytes);
        kept.len() <= MAX_ANSWER
    });
    match code {
        Ok(0) => Ok(answer),
        // Exit code 2: the agent does not know the option.
        Ok(2) => Err("its agent is older than this, and does not know --extents".to_owned()),
        Ok(code) => {
            let words: String = text(&words).chars().take(200).collect();
            Err(format!("its agent ended with code {code}: {words}"))
        }
        Err(error) => Err(error.to_string()),
    }
}

/// Files by the number of cached pages in runs that are worth a reference, most pages first.
fn rank(runs: impl Iterator<Item = PageRun>) -> Vec<(FileNumber, u64)> {
    let mut pages: HashMap<FileNumber, u64> = HashMap::new();
    for run in runs.filter(|run| u64::from(run.pages) >= FEWEST_PAGES) {
        *pages.entry(run.file).or_default() += u64::from(run.pages);
    }
    let mut ranked: Vec<_> = pages.into_iter().collect();
    ranked.sort_unstable_by_key(|&(file, pages)| (Reverse(pages), file));
    ranked.truncate(MAX_FILES);
    ranked
}

impl Places {
    /// Asks the guest for the positions of files in the order of `ranked`, as long as an answer is
    /// faster than writing the pages. Answers received before a failure are kept.
    fn ask(
        &mut self,
        ranked: &[(FileNumber, u64)],
        deadline: Instant,
        paths: impl Fn(&[FileNumber]) -> Result<Vec<Vec<u8>>, String>,
        run: impl Fn(GuestOrder, Duration) -> Result<Vec<u8>, String>,
    ) -> Result<(), String> {
        let mut rest = ranked;
        let mut last_took = Duration::ZERO;
        while !rest.is_empty() && self.count < MAX_PLACES {
            let files = rest.iter().take(PATHS_AT_ONCE).map(|&(file, _)| file);
            let files: Vec<FileNumber> = files.collect();
            let paths = paths(&files)?;
            let (list, asked) = PathList::new(paths.iter().map(Vec::as_slice));
            let pages: u64 = rest.iter().take(asked).map(|&(_, pages)| pages).sum();
            let began = Instant::now();
            let left = deadline.saturating_duration_since(began);
            let is_worth_it = last_took.as_secs_f64() * WRITTEN_PAGES_PER_S as f64 <= pages as f64;
            if asked == 0 || left.is_zero() || !is_worth_it {
                break;
            }
            let answer = run(GuestOrder::ListExtents(list), left)?;
            self.take(&files[..asked.min(files.len())], &answer)?;
            last_took = began.elapsed();
            rest = rest.get(asked..).unwrap_or_default();
        }
        Ok(())
    }

    /// Adds the guest's answer about these files.
    fn take(&mut self, files: &[FileNumber], answer: &[u8]) -> Result<(), String> {
        for extent in guest_extents::parse(answer, files.len())? {
            let known = self.disks.iter().position(|disk| *disk == extent.disk);
            let guest_disk = known.unwrap_or(self.disks.len());
            if guest_disk == MAX_DISKS {
                continue;
            }
            if known.is_none() {
                self.disks.push(extent.disk);
            }
            if self.count == MAX_PLACES {
                break;
            }
            self.count += 1;
            self.of.entry(files[extent.file]).or_default().push(Place {
                page: extent.page,
                pages: extent.pages,
                guest_disk,
                block: extent.block,
            });
        }
        Ok(())
    }
}

/// Intersects the cached runs with the places on the guest's disks. The result is ascending by
/// address.
fn join(runs: impl Iterator<Item = PageRun>, places: &Places) -> Vec<Candidate> {
    let mut parts = Vec::new();
    for run in runs.filter(|run| u64::from(run.pages) >= FEWEST_PAGES) {
        let Some(places) = places.of.get(&run.file) else {
            continue;
        };
        let first = u64::from(run.page);
        let end = first + u64::from(run.pages);
        let next = places.partition_point(|place| place.end() <= first);
        for place in &places[next..] {
            let begin = u64::from(place.page);
            let (from, to) = (first.max(begin), end.min(place.end()));
            if begin >= end {
                break;
            }
            if to - from >= FEWEST_PAGES {
                parts.push(Candidate {
                    hva: run.hva.add_pages(from - first),
                    pages: to - from,
                    guest_disk: place.guest_disk,
                    byte: (place.block + (from - begin)) * PAGE_SIZE,
                });
            }
        }
    }
    parts.sort_unstable_by_key(|part| part.hva);
    let mut candidates: Vec<Candidate> = Vec::new();
    for part in parts {
        let Some(last) = candidates.last_mut() else {
            candidates.push(part);
            continue;
        };
        let end = last.hva.add_pages(last.pages);
        let follows = end == part.hva
            && last.guest_disk == part.guest_disk
            && last.byte + last.pages * PAGE_SIZE == part.byte;
        if follows {
            last.pages += part.pages;
        } else if end <= part.hva {
            // Otherwise two frames of the guest are one page of QEMU, and the second is dropped.
            candidates.push(part);
        }
    }
    candidates
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use std::fmt::Write;

    use memfold_units::Hva;

    const RAM: Hva = Hva(0x7000_0000_0000);

    fn run(at: u64, pages: u32, file: FileNumber, page: u32) -> PageRun {
        PageRun {
            hva: RAM.add_pages(at),
            pages,
            file,
            page,
        }
    }

    fn candidate(at: u64, pages: u64, guest_disk: usize, block: u64) -> Candidate {
        Candidate {
            hva: RAM.add_pages(at),
            pages,
            guest_disk,
            byte: block * PAGE_SIZE,
        }
    }

    /// Simulated answers of a guest about files 10, 11, ...
    fn said(answer: &str) -> Places {
        let mut places = Places::default();
        places.take(&[10, 11, 12], answer.as_bytes()).unwrap();
        places
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn cached_file_pages_are_mapped_to_blocks_of_the_guest_disks() {
        let places = said(
            "0 0 100 254:0 1000\n0 100 100 254:16 50\n0 300 8 254:0 9000\n1 0 4294967295 254:0 5\n",
        );
        assert_eq!(places.disks, [(254, 0), (254, 16)]);
        let runs = [
            // The run crosses the end of one place into the next.
            run(50, 20, 10, 90),
            // The run begins after a gap whose place is unknown.
            run(100, 200, 10, 150),
            // What follows in memory and on the disk is one.
            run(0, 8, 11, 16),
            run(8, 8, 11, 24),
            // Short, of no known file, not on a disk.
            run(400, 1, 11, 0),
            run(410, 50, 13, 0),
            run(460, 50, 10, 400),
        ];
        let wanted = [
            candidate(0, 16, 0, 21),
            candidate(50, 10, 0, 1090),
            candidate(60, 10, 1, 50),
            candidate(100, 50, 1, 100),
            candidate(250, 8, 0, 9000),
        ];
        assert_eq!(join(runs.into_iter(), &places), wanted);
    }

    #[test]
    fn ram_ranges_that_may_equal_disk_blocks_never_overlap_even_if_the_guest_lies() {
        let places = said(
            "0 0 4294967295 254:0 1125899906842624\n1 4294967290 6 254:0 0\n2 0 1 254:0 1\n2 1 1 254:0 7\n",
        );
        let runs = [
            run(0, 64, 10, u32::MAX - 64),
            // Two frames of the guest are one page of QEMU.
            run(10, 64, 10, 0),
            run(60, 10, 10, 100),
            run(100, 6, 11, u32::MAX - 5),
            run(200, 4, 12, 0),
        ];
        let found = join(runs.into_iter(), &places);
        let apart = |a: &Candidate, b: &Candidate| a.hva.add_pages(a.pages) <= b.hva;
        assert!(found.is_sorted_by(apart), "{found:?}");
        let last = (1 << 50) + u64::from(u32::MAX) - 64;
        assert_eq!(found, [candidate(0, 64, 0, last), candidate(100, 6, 0, 0)]);
    }

    #[test]
    fn if_a_guest_reports_an_endless_list_of_disks_and_extents_the_list_is_truncated() {
        let mut places = Places::default();
        let mut answer = String::new();
        for n in 0..30_000 {
            writeln!(answer, "0 {n} 1 {n}:0 {n}").unwrap();
        }
        for file in 0..12 {
            places.take(&[file], answer.as_bytes()).unwrap();
        }
        assert_eq!(
            (places.disks.len(), places.count),
            (MAX_DISKS, MAX_DISKS * 12)
        );
        answer.clear();
        for n in 0..30_000 {
            writeln!(answer, "0 {n} 1 7:0 {n}").unwrap();
        }
        let mut places = Places::default();
        for file in 0..12 {
            places.take(&[file], answer.as_bytes()).unwrap();
        }
        assert_eq!(places.count, MAX_PLACES);
        assert_eq!(places.of.values().map(Vec::len).sum::<usize>(), MAX_PLACES);
    }

    #[test]
    fn the_guest_is_asked_first_for_the_extents_of_the_files_with_the_most_cached_pages() {
        let runs = [
            run(0, 10, 1, 0),
            run(20, 30, 2, 0),
            run(60, 25, 1, 100),
            run(100, 1, 3, 0),
            run(110, 30, 4, 0),
        ];
        assert_eq!(rank(runs.into_iter()), [(1, 35), (2, 30), (4, 30)]);
    }

    fn names(files: &[FileNumber]) -> Vec<Vec<u8>> {
        let name = |file| format!("/{}/{file}", "d".repeat(200)).into_bytes();
        files.iter().map(name).collect()
    }

    /// File numbers in a question.
    fn numbers(order: &GuestOrder) -> Vec<FileNumber> {
        let script = order.script();
        let lines = script.lines().filter(|line| line.starts_with('/'));
        let number = |line: &str| line.rsplit('/').next()?.parse().ok();
        lines.filter_map(number).collect()
    }

    #[test]
    fn file_extents_are_requested_in_several_scripts_if_needed_and_once_for_each_file() {
        let ranked: Vec<(FileNumber, u64)> = (0..3000).map(|n| (n, 1_000_000)).collect();
        let asked = RefCell::new(Vec::new());
        let mut places = Places::default();
        let answer = |order: GuestOrder, _: Duration| {
            let files = numbers(&order);
            let mut answer = String::new();
            for (n, file) in files.iter().enumerate() {
                writeln!(answer, "{n} 0 4 254:0 {file}").unwrap();
            }
            asked.borrow_mut().extend(files);
            Ok(answer.into_bytes())
        };
        places
            .ask(&ranked, later(), |files| Ok(names(files)), answer)
            .unwrap();
        assert_eq!(*asked.borrow(), (0..3000).collect::<Vec<_>>());
        assert!((0..3000).all(|file| places.of[&file][0].block == u64::from(file)));
    }

    #[test]
    fn if_the_guest_fails_while_it_lists_file_extents_the_extents_listed_before_are_used() {
        let ranked: Vec<(FileNumber, u64)> = (0..3000).map(|n| (n, 1_000_000)).collect();
        for failure in [Ok(b"0 0 4 254:0".to_vec()), Err("gone".to_owned())] {
            let times = Cell::new(0);
            let mut places = Places::default();
            let answer = |_: GuestOrder, _: Duration| {
                times.set(times.get() + 1);
                if times.get() == 1 {
                    return Ok(b"0 0 4 254:0 7\n".to_vec());
                }
                failure.clone()
            };
            places
                .ask(&ranked, later(), |files| Ok(names(files)), answer)
                .unwrap_err();
            assert_eq!((times.get(), places.count), (2, 1));
        }
    }

    #[test]
    fn a_guest_is_asked_for_file_extents_only_as_long_as_the_answers_save_time() {
        let asked = Cell::new(0);
        let slow = |_: GuestOrder, limit: Duration| {
            assert!(limit <= Duration::from_secs(60));
            asked.set(asked.get() + 1);
            std::thread::sleep(Duration::from_millis(5));
            Ok(Vec::new())
        };
        // A page a file: written in less time than that, all of them.
        let few: Vec<(FileNumber, u64)> = (0..3000).map(|n| (n, 1)).collect();
        Places::default()
            .ask(&few, later(), |files| Ok(names(files)), slow)
            .unwrap();
        assert_eq!(asked.replace(0), 1);
        let over = Instant::now();
        Places::default()
            .ask(&few, over, |files| Ok(names(files)), slow)
            .unwrap();
        assert_eq!(asked.get(), 0);
    }
}

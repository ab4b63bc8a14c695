//! The measured process of the study `mappings`: has the memory, touches it, and does the work that
//! only the process itself can do. It takes requests from standard input, one JSON text a line, and
//! answers each with one line. It ends when its input ends.

use std::fs;
use std::io::{self, BufRead as _, Write as _, stdin, stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use clap::Args;
use memfold_sys::fork::fork_for_a_moment;
use memfold_sys::region::Mapping;
use rustix::mm::Advice as Madvise;
use rustix::process::getppid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::layout::{Layout, RUN_PAGES};
use super::memory::{Kind, Memory, part};
use super::touch::{Touches, percentile};

/// Time between two forks.
const FORK_PAUSE: Duration = Duration::from_millis(100);

/// Pages that one call swaps out.
const PAGE_OUT_PAGES: u64 = 512;

/// How often each single operation is timed, at most.
const OPERATIONS: usize = 500;

/// Runs that one order folds while memory is touched.
const FOLDED_TOGETHER: usize = 16;

#[derive(Args, Debug)]
pub struct Arguments {
    #[arg(long)]
    pub runs: u64,
    #[arg(long)]
    pub memory: Kind,
}

/// Work of the measured process while its memory is touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    Nothing,
    /// `MADV_PAGEOUT` of all memory, piece by piece.
    PageOut,
    /// Discards of each spare run by the library, as QEMU does it for free page reporting.
    Discard,
    /// Folds the spare runs.
    Fold,
    /// Forks without memory, as QEMU's forks are (`MADV_DONTFORK`).
    Fork,
    /// Forks with all memory. The child is a second process with the same mappings, and ends.
    ForkAll,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Touches memory for so many seconds, while the process does this work.
    Window { work: Work, seconds: f64 },
    /// Times single operations.
    Operations,
    /// Counts pages with wrong bytes.
    Check,
}

/// Runs the measured process.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let (process, facts) = Process::start(arguments)?;
    answer(&facts)?;
    for line in stdin().lock().lines() {
        answer(&process.carry_out(&serde_json::from_str(&line?)?)?)?;
    }
    Ok(())
}

fn answer(value: &Value) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{value}")?;
    Ok(out.flush()?)
}

pub struct Process {
    memory: Memory,
}

impl Process {
    /// Makes the memory. Also returns facts about it.
    pub fn start(arguments: &Arguments) -> anyhow::Result<(Self, Value)> {
        let layout = Layout::new(arguments.runs);
        let memory = Memory::new(layout, arguments.memory)?;
        let (mappings_before, slabs_before) = (mappings()?, slabs());
        let began = Instant::now();
        if arguments.memory == Kind::Folded {
            memory.fold_all(&(0..layout.runs()).collect::<Vec<_>>())?;
        }
        let fold_s = began.elapsed().as_secs_f64();
        let slabs: Map<String, Value> = slabs()
            .into_iter()
            .zip(slabs_before)
            .map(|((name, after), (_, before))| (name.to_owned(), json!(after - before)))
            .collect();
        let facts = json!({
            "runs": layout.runs(),
            "ram_pages": layout.pages(),
            "mappings_before": mappings_before,
            "mappings": mappings()?,
            "fold_s": fold_s,
            "page_tables_kib": status("VmPTE:")?,
            "slab_bytes": slabs,
            "store_descriptor": memory.store_descriptor(),
        });
        Ok((Self { memory }, facts))
    }

    pub fn carry_out(&self, request: &Request) -> anyhow::Result<Value> {
        match request {
            Request::Window { work, seconds } => self.window(*work, *seconds),
            Request::Operations => self.operations(),
            Request::Check => {
                self.memory.prepare()?;
                Ok(json!({ "wrong_pages": self.memory.wrong_pages()?, "mappings": mappings()? }))
            }
        }
    }

    fn window(&self, work: Work, seconds: f64) -> anyhow::Result<Value> {
        let memory = &self.memory;
        memory.prepare()?;
        let spare: Vec<u64> = memory.layout.spare().collect();
        if work == Work::Fold && memory.kind == Kind::Folded {
            memory.renew(&spare)?;
        }
        if work == Work::ForkAll {
            memory.area().advise(Madvise::LinuxDoFork)?;
        }
        // On one CPU, the touching thread would wait for the end of the work instead of meeting it.
        stay_on_cpu(1)?;
        let stop = AtomicBool::new(false);
        let (touches, done) = std::thread::scope(|scope| {
            let touches = scope.spawn(|| {
                stay_on_cpu(0)?;
                Touches::until(&stop, memory.area(), memory.layout)
            });
            let end = Instant::now() + Duration::from_secs_f64(seconds);
            let done = self.work(work, &spare, end);
            let rest = end.saturating_duration_since(Instant::now());
            std::thread::sleep(if done.is_ok() { rest } else { Duration::ZERO });
            stop.store(true, Ordering::Relaxed);
            (touches.join(), done)
        });
        let (done, touches) = (done?, touches.map_err(|_| anyhow!("the thread panicked"))??);
        // Memory gets the state from before.
        match (work, memory.kind) {
            (Work::Discard, Kind::Folded) => {
                memory.renew(&spare)?;
                memory.fold_all(&spare)?;
            }
            (Work::Discard | Work::Fold, Kind::Unfolded | Kind::UnfoldedHuge) => {
                memory.renew(&spare)?;
            }
            (Work::ForkAll, _) => memory.area().advise(Madvise::LinuxDontFork)?,
            _ => {}
        }
        let mut answer = touches.summary();
        answer["work"] = done;
        Ok(answer)
    }

    /// Does the work of a window until `end`, or until there is no more. Returns figures of it.
    fn work(&self, work: Work, spare: &[u64], end: Instant) -> anyhow::Result<Value> {
        let memory = &self.memory;
        let area = memory.area();
        let span = end.saturating_duration_since(Instant::now());
        let mut times = Vec::new();
        match work {
            Work::Nothing => return Ok(Value::Null),
            Work::PageOut => {
                let pieces = (0..area.pages()).step_by(usize::try_from(PAGE_OUT_PAGES)?);
                for first in pieces.cycle() {
                    if Instant::now() >= end {
                        break;
                    }
                    times.push(timed(|| {
                        Ok(area
                            .part(first, PAGE_OUT_PAGES)
                            .advise(Madvise::LinuxPageOut)?)
                    })?);
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            Work::Discard => {
                let mut pace = Pace::new(span, spare.len());
                for &run in spare {
                    times.push(timed(|| memory.discard(run))?);
                    pace.wait();
                }
            }
            Work::Fold => {
                let mut pace = Pace::new(span, spare.len() / FOLDED_TOGETHER);
                let mut began = Instant::now();
                memory.fold(spare, FOLDED_TOGETHER, || {
                    times.push(ns(began.elapsed()));
                    pace.wait();
                    began = Instant::now();
                })?;
            }
            Work::Fork | Work::ForkAll => {
                let mut whole = Vec::new();
                while Instant::now() < end {
                    let forked = fork_for_a_moment()?;
                    times.push(ns(forked.call));
                    whole.push(ns(forked.whole));
                    std::thread::sleep(FORK_PAUSE);
                }
                return Ok(json!({ "call": figures(times), "until_child_ended": figures(whole) }));
            }
        }
        Ok(figures(times))
    }

    /// Times single operations, one after another, while nothing else happens in the process.
    fn operations(&self) -> anyhow::Result<Value> {
        let memory = &self.memory;
        let layout = memory.layout;
        let runs: Vec<u64> = layout.spare().take(OPERATIONS).collect();
        let mut figures_of = Map::new();
        let mut add = |name: &str, times| figures_of.insert(name.to_owned(), figures(times));
        memory.prepare()?;

        // Maps a run that is mapped already. Unfolded memory has no such run, so another area of
        // the same process gets it.
        let scratch = Mapping::anonymous(runs.len() as u64 * RUN_PAGES, true)?;
        let mut times = Vec::new();
        for (&run, at) in runs.iter().zip(0..) {
            let over = match memory.kind {
                Kind::Folded => memory.run(run),
                _ => scratch.area().part(at * RUN_PAGES, RUN_PAGES),
            };
            memory.map(run, over)?;
            times.push(timed(|| memory.map(run, over))?);
            over.advise(Madvise::LinuxDontFork)?;
        }
        drop(scratch);
        add("mmap", times);

        let mut times = Vec::new();
        for unit in 0..layout.units().min(OPERATIONS as u64) {
            let fresh = part(memory.area(), layout.fresh(unit)).part(0, RUN_PAGES);
            (0..RUN_PAGES).for_each(|page| fresh.part(page, 1).write(&[1]));
            times.push(timed(|| Ok(fresh.advise(Madvise::LinuxDontNeed)?))?);
        }
        add("madv_dontneed", times);

        let mut times = Vec::new();
        for &run in &runs {
            times.push(timed(|| memory.discard(run))?);
        }
        add("discard_run", times);
        memory.renew(&runs)?;

        let mut counts = vec![mappings()?];
        let mut times = Vec::new();
        let mut began = Instant::now();
        memory.fold(&runs, 1, || {
            times.push(ns(began.elapsed()));
            began = Instant::now();
        })?;
        add("fold_run", times);
        counts.push(mappings()?);
        let mut times = Vec::new();
        for run in &runs {
            times.push(timed(|| memory.release(std::slice::from_ref(run)))?);
        }
        add("release_run", times);
        counts.push(mappings()?);
        // Released memory stays a mapping of its own, also after a discard. A folded run does not.
        memory.fold_all(&runs)?;
        memory.renew(&runs)?;
        counts.push(mappings()?);
        if memory.kind == Kind::Folded {
            memory.fold_all(&runs)?;
        }

        let mut times = Vec::new();
        for _ in 0..5 {
            times.push(timed(|| mappings().map(drop))?);
        }
        add("read_maps", times);
        // Mappings before these runs were folded, after that, after they were released, and after
        // they were folded again, discarded and filled again.
        figures_of.insert(
            "mappings".into(),
            json!({ "runs": runs.len(), "counts": counts }),
        );
        Ok(Value::Object(figures_of))
    }
}

/// Makes the calling thread run on CPU number `wanted` only, counted among those that it may use.
/// With one CPU, nothing changes.
fn stay_on_cpu(wanted: usize) -> io::Result<()> {
    // The threads of the process have different CPUs by now, but not its parent.
    let parent = getppid();
    let allowed = sched_getaffinity(parent)?;
    let cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    let cpus: Vec<usize> = cpus.take(2).collect();
    if let [_, _] = cpus[..] {
        let mut only = CpuSet::new();
        only.set(cpus[wanted % 2]);
        sched_setaffinity(None, &only)?;
    }
    Ok(())
}

/// Spreads steps evenly over a time.
struct Pace {
    next: Instant,
    step: Duration,
}

impl Pace {
    fn new(span: Duration, steps: usize) -> Self {
        let steps = u32::try_from(steps.max(1)).unwrap_or(u32::MAX);
        Self {
            next: Instant::now(),
            step: span / steps,
        }
    }

    fn wait(&mut self) {
        self.next += self.step;
        std::thread::sleep(self.next.saturating_duration_since(Instant::now()));
    }
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn timed(work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<u64> {
    let began = Instant::now();
    work()?;
    Ok(ns(began.elapsed()))
}

fn figures(mut times: Vec<u64>) -> Value {
    times.sort_unstable();
    json!({
        "count": times.len(),
        "median_us": percentile(&times, 50.0),
        "p99_us": percentile(&times, 99.0),
        "longest_us": percentile(&times, 100.0),
    })
}

/// Returns the number of mappings of this process.
fn mappings() -> anyhow::Result<usize> {
    Ok(fs::read_to_string("/proc/self/maps")?.lines().count())
}

/// Returns a figure of `/proc/self/status` in KiB.
fn status(name: &str) -> anyhow::Result<u64> {
    let text = fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(kib
        .with_context(|| format!("/proc/self/status has no {name}"))?
        .parse()?)
}

/// Returns the bytes in use of the host's slabs that mappings need (`slabinfo(5)`). Only root may
/// read them; otherwise there are none.
fn slabs() -> Vec<(&'static str, i64)> {
    const NAMES: [&str; 4] = ["vm_area_struct", "maple_node", "anon_vma_chain", "anon_vma"];
    let Ok(text) = fs::read_to_string("/proc/slabinfo") else {
        return Vec::new();
    };
    let bytes = |name: &'static str| {
        let mut fields = text.lines().find_map(|line| {
            let mut fields = line.split_ascii_whitespace();
            (fields.next() == Some(name)).then_some(fields)
        })?;
        let mut number = || fields.next()?.parse::<i64>().ok();
        let (in_use, _, size) = (number()?, number()?, number()?);
        Some((name, in_use * size))
    };
    NAMES.into_iter().filter_map(bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_all_work_of_the_mappings_study_folded_and_unfolded_memory_has_its_first_bytes() {
        for memory in [Kind::Folded, Kind::Unfolded] {
            let runs = 640;
            let (process, facts) = Process::start(&Arguments { runs, memory }).unwrap();
            let count = |facts: &Value, key: &str| facts[key].as_u64().unwrap();
            let before = count(&facts, "mappings_before");
            let is_folded = count(&facts, "mappings") >= before + runs;
            assert_eq!(is_folded, memory == Kind::Folded, "{facts}");
            for work in [
                Work::Nothing,
                Work::PageOut,
                Work::Discard,
                Work::Fold,
                Work::Fork,
                Work::ForkAll,
            ] {
                let seconds = 0.2;
                let window = Request::Window { work, seconds };
                let found = process.carry_out(&window).unwrap();
                assert!(found["touches"].as_u64().unwrap() > 4, "{work:?}: {found}");
                assert!(
                    found["longest_us"].as_f64().unwrap() > 0.0,
                    "{work:?}: {found}"
                );
            }
            let operations = process.carry_out(&Request::Operations).unwrap();
            for name in [
                "mmap",
                "madv_dontneed",
                "discard_run",
                "fold_run",
                "release_run",
            ] {
                assert!(
                    operations[name]["median_us"].as_f64().unwrap() > 0.0,
                    "{operations}"
                );
            }
            let check = process.carry_out(&Request::Check).unwrap();
            assert_eq!(check["wrong_pages"], 0, "{memory:?}");
            // All of the unfolded memory that was folded for a while is whole again.
            let (least, most) = match memory {
                Kind::Folded => (before + runs, u64::MAX),
                _ => (0, before + 50),
            };
            assert!(
                (least..=most).contains(&count(&check, "mappings")),
                "{check}"
            );
        }
    }
}

//! The study `memfold bench scale`: what memfold costs by the number of VMs. Its part `daemon`
//! starts up to 1,000 QEMU processes ([`fleet`]). Its part `engine` measures memory and time of the
//! fold engine, up to 1,000 VMs that cache 1 GiB of files each:
//!
//! One real guest boots and reads files, so its agent reports which page of which file each page of
//! its RAM caches. This report is recorded and then repeated for each VM of the study, until the VM
//! caches as much as asked. The VMs of the study are no processes: the engine gets the same
//! messages as from real agents, and folding is paused. So the study measures the engine's tables,
//! and not the mappings in QEMU.
//!
//! | key | what is measured, for each number of VMs |
//! |---|---|
//! | `table_bytes_per_page` | memory that the engine computes for its tables, for each cached page |
//! | `process_bytes_per_page` | growth of this process's memory (`VmRSS`), for each cached page |
//! | `hint_ns_per_page` | CPU time of the engine's thread for taking the hints, for each page |
//! | `stats_cpu_ms` | CPU time of the engine's thread for all figures of `memfold report` |
//! | `hint_to_order_p95_s` | time from a page's hint to its order, at the default CPU budget |
//! | `churn_cpu_percent` | CPU time of the engine's thread meanwhile, as a share of one core |
//!
//! For the last two, the engine folds: each VM reports one run of pages per second, for 20 s. All
//! these VMs have the same RAM, which is memory of this process, and they carry out each order at
//! once, without a change of their memory. So the time of the library and of the kernel is not
//! contained.
//!
//! `exponents`: slope of the logarithm of a total over the logarithm of the number of VMs, between
//! the first and the last number of VMs. 1 means that the cost of a VM does not depend on how many
//! VMs there are.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use memfold_fold::{Command, Engine, EngineSettings, EngineStats, Guest, GuestError, Refold, VmId};
use memfold_lab::{DiskMode, Lab};
use memfold_units::{ByteSize, Hva, PAGE_SIZE};
use memfold_vm::RamLayout;
use memfold_wire::agent::{FileFacts, FromAgent, HintRun};
use memfold_wire::library::{Advice, Order, Outcome, Reply};
use rustix::process::Pid;
use serde_json::{Value, json};

use crate::figure::number;
use crate::fleet;
use crate::host::memory;
use crate::study::Options;

/// RAM and image of the guest that is recorded.
const MEMORY: ByteSize = ByteSize::mib(1024);
const IMAGE: &str = "trixie-a";

/// Files that each VM of the study caches.
const CACHED: ByteSize = ByteSize::mib(1024);

/// Numbers of VMs; a quick study has the first three.
const VMS: [u32; 5] = [10, 30, 100, 300, 1000];

/// Number of hints and of files in one message, as agents send them at most.
const HINTS: usize = 4096;
const FILES: usize = 512;

const BOOT: Duration = Duration::from_secs(180);
const READ: Duration = Duration::from_secs(300);

/// Where the kernel tells how much memory this process has.
const OWN_STATUS: &str = "/proc/self/status";

/// Number of seconds for which each VM of the study reports a run of pages per second.
const CHURN_ROUNDS: u32 = 20;

/// Address at which the RAM of all VMs of the study seems to be. Nothing is mapped there.
const RAM: Hva = Hva(0x6000_0000_0000);

/// What one guest caches: runs of file pages by page of RAM, and the length of each file in pages.
struct Recorded {
    runs: Vec<HintRun>,
    files: BTreeMap<u32, u32>,
    pages: u64,
}

/// What each VM of the study caches: the recorded files, again and again under other names, until
/// they have [`CACHED`] bytes.
struct Cache {
    hints: Vec<HintRun>,
    files: Vec<FileFacts>,
    pages: u64,
    ram_pages: u64,
}

impl Cache {
    fn new(recorded: &Recorded) -> anyhow::Result<Self> {
        ensure!(recorded.pages > 0, "the guest caches no file");
        let wanted = CACHED.0 / PAGE_SIZE;
        let mut cache = Self {
            hints: Vec::new(),
            files: Vec::new(),
            pages: 0,
            ram_pages: 0,
        };
        // The agent numbers its files from 0.
        let numbers = recorded.files.keys().last().map_or(0, |last| last + 1);
        for copy in 0.. {
            if cache.pages >= wanted {
                break;
            }
            let mut used = BTreeSet::new();
            for run in &recorded.runs {
                let left = u32::try_from(wanted - cache.pages).unwrap_or(u32::MAX);
                let pages = run.pages.min(left);
                if pages == 0 {
                    break;
                }
                used.insert(run.file);
                cache.pages += u64::from(pages);
                cache.hints.push(HintRun {
                    file: copy * numbers + run.file,
                    page: run.page,
                    pfn: cache.ram_pages + run.pfn,
                    pages,
                });
            }
            cache.files.extend(used.into_iter().map(|file| FileFacts {
                file: copy * numbers + file,
                path: format!("/usr/lib/copy-{copy}/some/directory/file-{file}").into(),
                size_bytes: u64::from(recorded.files[&file]) * PAGE_SIZE,
            }));
            cache.ram_pages += MEMORY.0 / PAGE_SIZE;
        }
        Ok(cache)
    }
}

/// Boots a guest that reads its files, and records what it caches.
fn record() -> anyhow::Result<Recorded> {
    let lab = Lab::new(EngineSettings::default())?;
    let spec = Lab::spec("recorded", IMAGE, MEMORY, DiskMode::Buffered)?;
    lab.boot(vec![spec], BOOT)?;
    let read = "find /usr /var/lib /etc -xdev -type f -exec cat {} + >/dev/null; sync; sleep 3";
    lab.exec("recorded", read, READ)?;
    let cached = lab.daemon().folding().cached_pages("recorded")?;
    let cached = cached.context("the guest's agent reported no page cache")?;
    let first = cached.runs().map(|run| run.hva).min();
    let first = first.context("the guest's agent reported no cached page")?;
    let (mut runs, mut files, mut pages) = (Vec::new(), BTreeMap::new(), 0);
    for run in cached.runs() {
        let end = files.entry(run.file).or_insert(0);
        *end = (*end).max(run.page + run.pages);
        pages += u64::from(run.pages);
        runs.push(HintRun {
            file: run.file,
            page: u64::from(run.page),
            pfn: run.hva.pages_since(first),
            pages: run.pages,
        });
    }
    Ok(Recorded { runs, files, pages })
}

/// A VM that changes nothing for an order, and answers that it has carried the order out.
struct NoGuest;

impl Guest for NoGuest {
    fn pid(&self) -> Pid {
        rustix::process::getpid()
    }

    fn order(&mut self, order: &Order, _: Option<BorrowedFd<'_>>) -> Result<Reply, GuestError> {
        Ok(match order {
            Order::Fold { runs, .. } => Reply::Outcomes {
                outcomes: vec![Outcome::Done; runs.len()],
                cpu_ns: 0,
                stopped_ns: 0,
            },
            _ => Reply::Ok,
        })
    }

    fn refold(&mut self) -> Refold {
        Refold::Unknown
    }

    fn can_stop(&self) -> bool {
        false
    }
}

/// A fold engine in a thread of its own.
struct Running {
    commands: SyncSender<Command>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn start(settings: EngineSettings) -> Self {
        let (commands, receiver) = sync_channel(64);
        let engine = Engine::new(settings);
        let thread = std::thread::spawn(move || engine.run(&receiver));
        Self {
            commands,
            thread: Some(thread),
        }
    }

    fn tell(&self, command: Command) -> anyhow::Result<()> {
        let sent = self.commands.send(command);
        sent.map_err(|_| anyhow!("the engine has ended"))
    }

    fn stats(&self) -> anyhow::Result<EngineStats> {
        let (answer, answered) = sync_channel(1);
        self.tell(Command::Stats(answer))?;
        Ok(answered.recv().context("the engine has ended")?.0)
    }

    fn add(&self, id: VmId, hva: Hva, pages: u64) -> anyhow::Result<()> {
        self.tell(Command::Add {
            id,
            name: format!("vm{id}"),
            domain: Some(format!("scale-{}", std::process::id())),
            layout: RamLayout::one_block(hva, pages),
            advice: vec![Advice::default()],
            guest: Box::new(NoGuest),
            problem: None,
        })?;
        self.tell(Command::AgentSession(id))
    }

    /// Sends an inventory of the page cache of a VM.
    fn inventory(&self, id: VmId, cache: &Cache) -> anyhow::Result<()> {
        let say = |message| self.tell(Command::Agent(id, message));
        say(FromAgent::InventoryBegin)?;
        for part in cache.files.chunks(FILES) {
            say(FromAgent::Files(part.to_vec()))?;
        }
        for part in cache.hints.chunks(HINTS) {
            say(FromAgent::Hints(part.to_vec()))?;
        }
        let number = |length: usize| u64::try_from(length).unwrap_or(u64::MAX);
        say(FromAgent::InventoryEnd {
            files: number(cache.files.len()),
            pages: cache.pages,
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Measures the engine with this number of VMs.
fn measure(vms: u32, cache: &Cache, rounds: u32) -> anyhow::Result<Value> {
    let engine = Running::start(EngineSettings::default());
    engine.tell(Command::SetPaused(true))?;
    let before = memory(OWN_STATUS.as_ref())?;
    let began_cpu = engine.stats()?.engine_cpu_s;
    for id in 1..=vms {
        engine.add(id, RAM, cache.ram_pages)?;
        engine.inventory(id, cache)?;
    }
    // The answer waits until all hints are taken.
    let stats = engine.stats()?;
    let grown = memory(OWN_STATUS.as_ref())?.saturating_sub(before);
    let pages: u64 = stats.vms.iter().map(|vm| vm.cached_pages).sum();
    let wanted = cache.pages * u64::from(vms);
    ensure!(
        pages == wanted,
        "the engine's tables have {pages} cached pages instead of {wanted}"
    );
    let hints_s = stats.engine_cpu_s - began_cpu;
    let stats_s = engine.stats()?.report_cpu_s - stats.report_cpu_s;
    drop(engine);
    let (p95_s, churn_cpu_percent) = churn(vms, rounds)?;
    Ok(json!({
        "vms": vms,
        "cached_pages": pages,
        "table_bytes_per_page": stats.own_bytes as f64 / pages as f64,
        "process_bytes_per_page": grown as f64 / pages as f64,
        "process_mib": grown >> 20,
        "hint_ns_per_page": hints_s * 1e9 / pages as f64,
        "stats_cpu_ms": stats_s * 1e3,
        "hint_to_order_p95_s": p95_s,
        "churn_cpu_percent": churn_cpu_percent,
    }))
}

/// Returns the 95th percentile of the time from a page's hint to its order in seconds, and the CPU
/// time of the engine's thread in percent of one core, while each VM reports one run a second.
fn churn(vms: u32, rounds: u32) -> anyhow::Result<(Option<f64>, f64)> {
    const COMMON_FILES: u32 = 256;
    const FILE_PAGES: u32 = 64;
    const RUN: u32 = 5;
    let bytes = u64::from(COMMON_FILES * FILE_PAGES) * PAGE_SIZE;
    // Memory that was never written: pages of zeroes, which need no RAM.
    let ram = vec![0_u8; usize::try_from(bytes + PAGE_SIZE)?];
    let hva = Hva((ram.as_ptr() as u64).next_multiple_of(PAGE_SIZE));
    let engine = Running::start(EngineSettings {
        drop_zero: false,
        ..EngineSettings::default()
    });
    let files: Vec<FileFacts> = (0..COMMON_FILES)
        .map(|file| FileFacts {
            file,
            path: format!("/usr/lib/file-{file}").into(),
            size_bytes: u64::from(FILE_PAGES) * PAGE_SIZE,
        })
        .collect();
    for id in 1..=vms {
        engine.add(id, hva, bytes / PAGE_SIZE)?;
        engine.tell(Command::Agent(id, FromAgent::Files(files.clone())))?;
    }
    let before = engine.stats()?;
    let began = Instant::now();
    let step = Duration::from_secs(1) / vms.max(1);
    // Each VM reads other parts of the files in each round, and two VMs in a row the same.
    for (n, id) in (0..rounds).flat_map(|n| (1..=vms).map(move |id| (n, id))) {
        let part = (id - 1) / 2 * rounds + n;
        let page = part * RUN % (FILE_PAGES - RUN);
        let file = part % COMMON_FILES;
        let run = HintRun {
            file,
            page: page.into(),
            pfn: (file * FILE_PAGES + page).into(),
            pages: RUN,
        };
        engine.tell(Command::Agent(id, FromAgent::Hints(vec![run])))?;
        let next = began + step * (n * vms + id);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    // The last hints need their settling time.
    std::thread::sleep(Duration::from_secs(5));
    let elapsed_s = began.elapsed().as_secs_f64();
    let after = engine.stats()?;
    let folded: u64 = after.vms.iter().map(|vm| vm.folded_pages).sum();
    ensure!(folded > 0 || vms < 2, "the engine has folded no page");
    let cpu_s = after.engine_cpu_s - before.engine_cpu_s;
    drop(engine);
    drop(ram);
    Ok((after.hint_to_fold_p95_s, cpu_s / elapsed_s * 100.0))
}

/// Names of the study's parts.
const PARTS: [&str; 2] = ["engine", "daemon"];

/// Runs the study `scale`. Returns its JSON record.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    options.check_arms("scale", &PARTS)?;
    let mut record = if options.is_wanted("engine") {
        run_engine(options)?
    } else {
        json!({ "results": {}, "samples": [] })
    };
    if options.is_wanted("daemon") {
        let (results, samples) = fleet::run(options)?;
        record["results"]["daemon"] = results;
        if let Some(all) = record["samples"].as_array_mut() {
            all.extend(samples);
        }
    }
    Ok(record)
}

fn run_engine(options: &Options) -> anyhow::Result<Value> {
    let recorded = record()?;
    let cache = Cache::new(&recorded)?;
    let run_pages = recorded.pages as f64 / recorded.runs.len().max(1) as f64;
    eprintln!(
        "recorded: {} pages of {} files in {} runs ({run_pages:.1} pages each); each VM caches {} pages",
        recorded.pages,
        recorded.files.len(),
        recorded.runs.len(),
        cache.pages
    );
    let mut samples = Vec::new();
    for vms in options.pick(&VMS[..3], &VMS[..]) {
        let sample = measure(*vms, &cache, CHURN_ROUNDS)?;
        eprintln!("{sample}");
        samples.push(sample);
    }
    let mut results = json!({
        "recorded_pages": recorded.pages,
        "recorded_files": recorded.files.len(),
        "recorded_runs": recorded.runs.len(),
        "pages_per_vm": cache.pages,
        "files_per_vm": cache.files.len(),
    });
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else {
        return Ok(json!({ "results": results }));
    };
    // Whether the figure is one of a page; the others are of all VMs.
    for (key, is_of_page) in [
        ("table_bytes_per_page", true),
        ("process_bytes_per_page", true),
        ("hint_ns_per_page", true),
        ("stats_cpu_ms", false),
    ] {
        let total = |sample: &Value| {
            let pages = number(&sample["cached_pages"]);
            number(&sample[key]) * if is_of_page { pages } else { 1.0 }
        };
        let vms = number(&last["vms"]) / number(&first["vms"]);
        results[key] = last[key].clone();
        results["exponents"][key] = json!((total(last) / total(first)).log(vms));
    }
    for key in ["process_mib", "hint_to_order_p95_s", "churn_cpu_percent"] {
        results[key] = last[key].clone();
    }
    Ok(json!({ "results": results, "samples": samples }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_vm_of_the_scale_study_caches_the_same_number_of_pages_of_the_recorded_files() {
        let run = |file, page, pfn, pages| HintRun {
            file,
            page,
            pfn,
            pages,
        };
        let pages = u32::try_from(CACHED.0 / PAGE_SIZE / 5).unwrap();
        let recorded = Recorded {
            runs: vec![run(0, 0, 0, pages), run(7, 3, u64::from(pages), pages)],
            files: BTreeMap::from([(0, pages), (7, pages + 3)]),
            pages: u64::from(2 * pages),
        };
        let cache = Cache::new(&recorded).unwrap();
        assert_eq!((cache.pages, cache.files.len()), (CACHED.0 / PAGE_SIZE, 6));
        let found = measure(2, &cache, 2).unwrap();
        assert_eq!(found["cached_pages"], 2 * cache.pages);
        assert!(number(&found["table_bytes_per_page"]) < 1.0, "{found}");
        // The hints wait for the settling time of a second.
        let p95_s = number(&found["hint_to_order_p95_s"]);
        assert!((1.0..5.0).contains(&p95_s), "{found}");
    }
}

//! The study `memfold bench scale`: memory and time of the fold engine by the number of VMs, up to
//! 1,000 VMs that cache 1 GiB of files each.
//!
//! One real guest boots and reads files, so its agent reports which page of which file each page of
//! its RAM caches. This report is recorded and then repeated for each VM of the study, until the VM
//! caches as much as asked. The VMs of the study are no processes: the engine gets the same messages
//! as from real agents, and folding is paused. So the study measures the engine's tables, and not
//! the mappings in QEMU.
//!
//! | key | what is measured, for each number of VMs |
//! |---|---|
//! | `table_bytes_per_page` | memory that the engine computes for its tables, for each cached page |
//! | `process_bytes_per_page` | growth of this process's memory (`VmRSS`), for each cached page |
//! | `hint_ns_per_page` | CPU time of the engine's thread for taking the hints, for each page |
//! | `stats_ms` | time until the engine answers the question for all figures |
//!
//! `exponent_*`: slope of the logarithm of a figure's total over the logarithm of the number of
//! VMs. 1 means that the cost of a VM does not depend on the number of VMs.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use memfold_fold::{Command, Engine, EngineSettings, EngineStats, Guest, GuestError, Refold, VmId};
use memfold_lab::{DiskMode, Lab};
use memfold_units::{ByteSize, Hva, PAGE_SIZE, Pfn};
use memfold_vm::{RamBlock, RamLayout, RamSlot};
use memfold_wire::agent::{FileFacts, FromAgent, HintRun};
use memfold_wire::library::{Advice, Order, Reply};
use rustix::process::Pid;
use serde_json::{Value, json};

use crate::study::Options;

/// RAM and image of the guest that is recorded.
const MEMORY: ByteSize = ByteSize::mib(1024);
const IMAGE: &str = "trixie-a";

/// Page cache of each VM of the study.
const CACHED: ByteSize = ByteSize::mib(1024);

/// Numbers of VMs; a quick study has the first three.
const VMS: [u32; 5] = [10, 30, 100, 300, 1000];

/// Number of hints and of files in one message, as agents send them at most.
const HINTS: usize = 4096;
const FILES: usize = 512;

const BOOT: Duration = Duration::from_secs(180);
const READ: Duration = Duration::from_secs(300);

/// Address at which the RAM of all VMs of the study seems to be. Nothing is mapped there.
const RAM: Hva = Hva(0x6000_0000_0000);

/// What one guest caches: runs of file pages by page of RAM, and the sizes of the files in pages.
struct Recorded {
    runs: Vec<HintRun>,
    pages: u64,
    files: BTreeMap<u32, u32>,
    ram_pages: u64,
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
    Ok(Recorded {
        runs,
        pages,
        files,
        ram_pages: MEMORY.0 / PAGE_SIZE,
    })
}

/// A VM that executes no order.
struct NoGuest;

impl Guest for NoGuest {
    fn pid(&self) -> Pid {
        rustix::process::getpid()
    }

    fn order(&mut self, _: &Order, _: Option<BorrowedFd<'_>>) -> Result<Reply, GuestError> {
        Ok(Reply::Ok)
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
    fn start() -> Self {
        let (commands, receiver) = sync_channel(64);
        let engine = Engine::new(EngineSettings::default());
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

    /// Adds a VM that caches the recorded files `copies` times.
    fn add(&self, id: VmId, recorded: &Recorded, copies: u32) -> anyhow::Result<()> {
        let pages = recorded.ram_pages * u64::from(copies);
        let block = RamBlock {
            name: "ram0".into(),
            hva: RAM,
            pages,
        };
        let slot = RamSlot {
            pfn: Pfn(0),
            pages,
            hva: RAM,
            block: 0,
        };
        self.tell(Command::Add {
            id,
            name: format!("vm{id}"),
            domain: Some(format!("scale-{}", std::process::id())),
            layout: RamLayout {
                blocks: vec![block],
                slots: vec![slot],
            },
            advice: vec![Advice::default()],
            guest: Box::new(NoGuest),
            problem: None,
        })?;
        self.tell(Command::AgentSession(id))?;
        let say = |message| self.tell(Command::Agent(id, message));
        say(FromAgent::InventoryBegin)?;
        // The agent numbers its files from 0; each copy of the recorded files has other numbers.
        let per_copy = recorded.files.keys().last().map_or(0, |last| last + 1);
        for copy in 0..copies {
            let files: Vec<FileFacts> = recorded
                .files
                .iter()
                .map(|(file, pages)| FileFacts {
                    file: copy * per_copy + file,
                    path: format!("/usr/lib/copy-{copy}/some/directory/file-{file}").into(),
                    size_bytes: u64::from(*pages) * PAGE_SIZE,
                })
                .collect();
            for part in files.chunks(FILES) {
                say(FromAgent::Files(part.to_vec()))?;
            }
            let shift = u64::from(copy) * recorded.ram_pages;
            let of_copy = |run: &HintRun| HintRun {
                file: copy * per_copy + run.file,
                pfn: shift + run.pfn,
                ..run.clone()
            };
            for part in recorded.runs.chunks(HINTS) {
                say(FromAgent::Hints(part.iter().map(of_copy).collect()))?;
            }
        }
        say(FromAgent::InventoryEnd { files: 0, pages: 0 })
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

/// Returns the memory of this process in bytes (`VmRSS`).
fn own_memory() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|text| text.trim().strip_suffix(" kB"));
    let kib: u64 = kib.context("/proc/self/status has no VmRSS")?.parse()?;
    Ok(kib << 10)
}

/// Measures the engine with this number of VMs.
fn measure(vms: u32, recorded: &Recorded, copies: u32) -> anyhow::Result<Value> {
    let engine = Running::start();
    engine.tell(Command::SetPaused(true))?;
    let before = own_memory()?;
    let began_cpu = engine.stats()?.engine_cpu_s;
    for id in 1..=vms {
        engine.add(id, recorded, copies)?;
    }
    let began = Instant::now();
    let stats = engine.stats()?;
    let stats_ms = began.elapsed().as_secs_f64() * 1e3;
    let grown = own_memory()?.saturating_sub(before);
    let pages: u64 = stats.vms.iter().map(|vm| vm.cached_pages).sum();
    let wanted = recorded.pages * u64::from(copies) * u64::from(vms);
    ensure!(
        pages == wanted,
        "the engine's tables have {pages} cached pages instead of {wanted}"
    );
    // The first answer also waits until all hints are taken; the second one does not.
    let began = Instant::now();
    engine.stats()?;
    let again_ms = began.elapsed().as_secs_f64() * 1e3;
    let hints_s = stats.engine_cpu_s - began_cpu;
    Ok(json!({
        "vms": vms,
        "cached_pages": pages,
        "table_bytes_per_page": stats.own_bytes as f64 / pages as f64,
        "process_bytes_per_page": grown as f64 / pages as f64,
        "process_mib": grown >> 20,
        "hint_ns_per_page": hints_s * 1e9 / pages as f64,
        "first_stats_ms": stats_ms,
        "stats_ms": again_ms,
    }))
}

/// Runs the study `scale`. Returns its JSON record.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    let recorded = record()?;
    let cached = CACHED.0 / PAGE_SIZE;
    let copies = u32::try_from(cached.div_ceil(recorded.pages.max(1)))?;
    let run_pages = recorded.pages as f64 / recorded.runs.len().max(1) as f64;
    eprintln!(
        "recorded: {} pages of {} files in {} runs ({run_pages:.1} pages each), repeated {copies} times for each VM",
        recorded.pages,
        recorded.files.len(),
        recorded.runs.len()
    );
    let mut samples = Vec::new();
    for vms in options.pick(&VMS[..3], &VMS[..]) {
        let sample = measure(*vms, &recorded, copies)?;
        eprintln!("{sample}");
        samples.push(sample);
    }
    let mut results = json!({
        "recorded_pages": recorded.pages,
        "recorded_files": recorded.files.len(),
        "recorded_runs": recorded.runs.len(),
        "pages_per_vm": recorded.pages * u64::from(copies),
    });
    for key in [
        "table_bytes_per_page",
        "process_bytes_per_page",
        "hint_ns_per_page",
        "stats_ms",
    ] {
        let last = samples.last().map(|sample| sample[key].clone());
        results[key] = last.unwrap_or_default();
    }
    Ok(json!({ "results": results, "samples": samples }))
}

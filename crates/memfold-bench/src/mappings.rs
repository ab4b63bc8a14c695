//! The study `memfold bench mappings`: what many folded runs cost a process. Each folded run is a
//! memory mapping, and the kernel takes locks of the process and of mappings for page faults,
//! `mmap`, KSM, migration of pages and more.
//!
//! The part `stalls` starts processes of two sizes, with 20,000 and 60,000 runs of 4 pages, each
//! folded and unfolded. A thread of the process touches memory all the time, as a vCPU does, while
//! other work goes on in turn ([`WINDOWS`]). Folding is done by the code that runs in QEMU, on
//! memory of the process; no guest runs. The longest and the 99th percentile of the touches are the
//! stalls that a guest would see. Time for which the thread waited for a CPU is not counted.
//!
//! The part `neighbours` boots two guests that read the same files, and counts how many of the
//! folded runs that touch in memory are one mapping.
//!
//! | key | meaning |
//! |---|---|
//! | `runs_N.KIND.WINDOW.p99_us`, `longest_us` | stall of a touch, over all kinds of touches |
//! | `runs_N.KIND.WINDOW.write_fresh_p99_us` | of writes to pages that are not there, which are page faults in all kinds of memory |
//! | `runs_N.KIND.exit_ms`, `exit_cpu_ms` | from the kill of the process to the end of its memory |
//! | `runs_N.exit_ratio` | exit of the folded process over that of the unfolded one, in the same round |
//! | `runs_N.KIND.operations` | median of single calls: `mmap` of a run, `madvise(MADV_DONTNEED)` of four pages, and what the library does |
//! | `runs_N.slab_bytes_per_mapping` | kernel memory of a mapping that never is swapped |

mod handle;
mod layout;
mod memory;
mod neighbours;
pub mod process;
mod touch;

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use memfold_ksm as ksm;
use memfold_ledger::read::Proc;
use serde_json::{Map, Value, json};

use crate::figure::{self, Axis, Figure, Series, number};
use crate::host::{check_ksm_is_off, ksmd, start_ksm};
use crate::record::{Found, median, ratios, spread};
use crate::study::Options;
use handle::Handle;
use memory::Kind;
use process::{Request, Work};

/// Numbers of folded runs. Those that do not fit into `vm.max_map_count` are left out.
const RUNS: [u64; 3] = [20_000, 60_000, 250_000];

/// Mappings of the process besides its runs: ordinary memory between them, programs, threads.
const OTHER_MAPPINGS: u64 = 512;

/// Names of the parts of the study.
const STALLS: &str = "stalls";
pub const NEIGHBOURS: &str = "neighbours";

/// Pages that ksmd scans every 20 ms: about 200,000 a second, so that all memory is scanned several
/// times in a window. The kernel's default is 100.
const KSM_PAGES: u64 = 4000;

/// Time for which KSM runs before a window.
const KSM_BEFORE: Duration = Duration::from_secs(1);

/// Time between two reports.
const REPORT_PAUSE: Duration = Duration::from_millis(500);

/// What goes on while memory is touched.
struct Window {
    name: &'static str,
    /// Work of the process itself.
    work: Work,
    ksm: bool,
    compaction: bool,
    reports: bool,
}

const fn window(name: &'static str, work: Work) -> Window {
    Window {
        name,
        work,
        ksm: false,
        compaction: false,
        reports: false,
    }
}

const WINDOWS: [Window; 10] = [
    window("nothing", Work::Nothing),
    Window {
        ksm: true,
        ..window("ksm", Work::Nothing)
    },
    Window {
        compaction: true,
        ..window("compaction", Work::Nothing)
    },
    Window {
        ksm: true,
        compaction: true,
        ..window("ksm_and_compaction", Work::Nothing)
    },
    // A figure of `memfold report` needs the process's `smaps` and `smaps_rollup`.
    Window {
        reports: true,
        ..window("reports", Work::Nothing)
    },
    window("page_out", Work::PageOut),
    window("discards", Work::Discard),
    window("folding", Work::Fold),
    window("fork", Work::Fork),
    window("fork_of_all_memory", Work::ForkAll),
];

/// Runs the study `mappings`. Returns its JSON record.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    options.check_arms("mappings", &[STALLS, NEIGHBOURS])?;
    // Ctrl-C leaves no settings of KSM behind.
    memfold_lab::clean_up_at_interrupt();
    let mut found = Found {
        results: json!({}),
        ..Found::default()
    };
    if options.is_wanted(STALLS) {
        found.add(stalls(options)?);
    }
    if options.is_wanted(NEIGHBOURS) {
        found.add(neighbours::measure()?);
    }
    Ok(json!(found))
}

fn stalls(options: &Options) -> anyhow::Result<Found> {
    // If an earlier run was killed, its settings of KSM are restored first.
    ksm::restore_leftover(ksm::NOTES.as_ref())?;
    check_ksm_is_off()?;
    let limit = Proc::default().max_map_count()?;
    let sizes = options.pick(&RUNS[..1], &RUNS[..]).iter().copied();
    let (sizes, too_many): (Vec<u64>, Vec<u64>) =
        sizes.partition(|runs| runs + runs / 16 + OTHER_MAPPINGS <= limit);
    ensure!(
        !sizes.is_empty(),
        "vm.max_map_count is {limit}, too few for {} runs: raise it to measure (sysctl -w vm.max_map_count=65530)",
        RUNS[0]
    );
    let seconds = options.pick(1.0, 4.0);
    let mut samples = Vec::new();
    for round in 0..options.pick(1, 3) {
        for &runs in &sizes {
            // The order changes, so that none always comes first.
            let mut kinds = [Kind::Folded, Kind::Unfolded, Kind::UnfoldedHuge];
            kinds.rotate_left(round % 2);
            for kind in kinds {
                eprintln!("round {}: {runs} runs, {kind:?}", round + 1);
                let mut sample = measure(runs, kind, seconds)?;
                sample["round"] = json!(round);
                samples.push(sample);
            }
        }
    }
    let mut results = json!({
        "max_map_count": limit,
        "not_measured_runs": too_many,
        "swap": has_swap()?,
    });
    for runs in sizes {
        results[format!("runs_{runs}")] = results_of(&samples, runs);
    }
    Ok(Found {
        samples,
        results,
        ..Found::default()
    })
}

/// Returns whether the host can swap pages out. Without swap space, `MADV_PAGEOUT` only walks the
/// page tables.
fn has_swap() -> anyhow::Result<bool> {
    Ok(fs::read_to_string("/proc/swaps")?.lines().count() > 1)
}

/// Measures one process in all windows, then its operations, then its end.
fn measure(runs: u64, kind: Kind, seconds: f64) -> anyhow::Result<Value> {
    let mut process = Handle::start(runs, kind)?;
    let mut windows = Map::new();
    let wanted = match kind {
        Kind::Folded | Kind::Unfolded => &WINDOWS[..],
        Kind::UnfoldedHuge => &WINDOWS[..1],
    };
    for window in wanted {
        let name = window.name;
        let found = measure_window(&mut process, window, seconds);
        let found = found.with_context(|| format!("in the window '{name}'"))?;
        windows.insert(name.into(), found);
    }
    let operations = process.ask(&Request::Operations)?;
    let check = process.ask(&Request::Check)?;
    ensure!(
        check["wrong_pages"] == 0,
        "the memory of the measured process has wrong bytes: {check}"
    );
    let mut facts = process.facts.take();
    facts["mappings_at_end"] = check["mappings"].clone();
    process.facts = facts.clone();
    let (exit, exit_cpu) = process.kill()?;
    Ok(json!({
        "runs": runs,
        "memory": kind,
        "facts": facts,
        "windows": windows,
        "operations": operations,
        "exit_ms": exit.as_secs_f64() * 1e3,
        "exit_cpu_ms": exit_cpu.as_secs_f64() * 1e3,
    }))
}

fn measure_window(process: &mut Handle, window: &Window, seconds: f64) -> anyhow::Result<Value> {
    let pid = i32::try_from(process.pid())?;
    let ksm_run = if window.ksm {
        Some(KsmRun::start()?)
    } else {
        None
    };
    let migrated = migrated_pages()?;
    let stop = AtomicBool::new(false);
    let (answer, besides) = std::thread::scope(|scope| {
        let besides = scope.spawn(|| match window {
            Window {
                compaction: true, ..
            } => repeat(&stop, Duration::ZERO, || {
                Ok(fs::write("/proc/sys/vm/compact_memory", "1")?)
            }),
            Window { reports: true, .. } => repeat(&stop, REPORT_PAUSE, || {
                let proc = Proc::default();
                proc.smaps(pid)?;
                proc.rollup(pid)?;
                Ok(())
            }),
            _ => Ok(Vec::new()),
        });
        let work = window.work;
        let answer = process.ask(&Request::Window { work, seconds });
        stop.store(true, Ordering::Relaxed);
        (answer, besides.join())
    });
    let mut found = answer?;
    let times = besides.map_err(|_| anyhow!("a thread of the study panicked"))??;
    if !times.is_empty() {
        found["besides_ms"] = spread(times);
    }
    found["migrated_pages_of_host"] = json!(migrated_pages()?.saturating_sub(migrated));
    if let Some(run) = ksm_run {
        found["ksm"] = run.stop()?;
    }
    Ok(found)
}

/// Does something again and again until `stop` is set. Returns the durations in milliseconds.
fn repeat(
    stop: &AtomicBool,
    pause: Duration,
    work: impl Fn() -> anyhow::Result<()>,
) -> anyhow::Result<Vec<f64>> {
    let mut times = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        work()?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(pause);
    }
    Ok(times)
}

/// KSM on all memory that is marked as mergeable, at a high rate.
struct KsmRun {
    run: ksm::Run,
    cpu: Duration,
    scanned: u64,
}

impl KsmRun {
    fn start() -> anyhow::Result<Self> {
        fs::create_dir_all(ksm::NOTES)?;
        let cpu = ksmd()?.cpu_time()?;
        let scanned = scanned()?;
        let run = start_ksm(&ksm::Settings {
            pages_to_scan: Some(KSM_PAGES),
            ..ksm::Settings::kernel_default()
        })?;
        std::thread::sleep(KSM_BEFORE);
        Ok(Self { run, cpu, scanned })
    }

    /// Stops KSM, unmerges all pages, and restores KSM's settings.
    fn stop(self) -> anyhow::Result<Value> {
        let status = ksm::Status::read(&ksm::Controls::default())?;
        let cpu = ksmd()?.cpu_time()?.saturating_sub(self.cpu);
        let scanned = scanned()?.saturating_sub(self.scanned);
        self.run.stop(true)?;
        Ok(json!({
            "pages_sharing": status.pages_sharing,
            "scanned_pages": scanned,
            "cpu_us_per_scanned_page": cpu.as_secs_f64() * 1e6 / scanned.max(1) as f64,
        }))
    }
}

/// Returns the number of pages of all processes that the kernel has moved elsewhere.
fn migrated_pages() -> anyhow::Result<u64> {
    let text = fs::read_to_string("/proc/vmstat")?;
    let count = text
        .lines()
        .find_map(|line| line.strip_prefix("pgmigrate_success "));
    Ok(count.unwrap_or("0").parse()?)
}

fn scanned() -> anyhow::Result<u64> {
    let status = ksm::Status::read(&ksm::Controls::default())?;
    Ok(status.pages_scanned.unwrap_or(0))
}

/// Computes the results for one number of runs.
fn results_of(samples: &[Value], runs: u64) -> Value {
    let of = |kind: Kind| {
        let is_wanted =
            move |sample: &&Value| sample["runs"] == runs && sample["memory"] == json!(kind);
        samples.iter().filter(is_wanted)
    };
    let mut results = json!({});
    for kind in [Kind::Folded, Kind::Unfolded, Kind::UnfoldedHuge] {
        let Some(first) = of(kind).next() else {
            continue;
        };
        let all = |pointer: &str| {
            let values = of(kind).filter_map(|sample| sample.pointer(pointer)?.as_f64());
            spread(values.collect::<Vec<_>>())
        };
        let mut result = json!({
            "mappings": all("/facts/mappings"),
            "page_tables_kib": all("/facts/page_tables_kib"),
            "exit_ms": all("/exit_ms"),
            "exit_cpu_ms": all("/exit_cpu_ms"),
        });
        for name in first["windows"].as_object().into_iter().flat_map(Map::keys) {
            result[name] = json!({
                "p99_us": all(&format!("/windows/{name}/p99_us")),
                "longest_us": all(&format!("/windows/{name}/longest_us")),
                "write_fresh_p99_us": all(&format!("/windows/{name}/write_fresh/p99_us")),
            });
            for (key, pointer) in [
                ("besides_ms", "besides_ms/median"),
                ("migrated_pages_of_host", "migrated_pages_of_host"),
                ("ksmd_us_per_scanned_page", "ksm/cpu_us_per_scanned_page"),
                ("work_median_us", "work/median_us"),
                ("call_median_us", "work/call/median_us"),
            ] {
                let found = all(&format!("/windows/{name}/{pointer}"));
                if !found["median"].is_null() {
                    result[name][key] = found;
                }
            }
        }
        for (name, found) in first["operations"].as_object().into_iter().flatten() {
            if found.get("median_us").is_some() {
                let times = all(&format!("/operations/{name}/median_us"));
                result["operations"][format!("{name}_us")] = times;
            }
        }
        result["operations"]["mappings"] = first["operations"]["mappings"].clone();
        results[json!(kind).as_str().unwrap_or_default()] = result;
    }
    for (key, time, kind) in [
        ("exit_ratio", "exit_ms", Kind::Unfolded),
        ("exit_cpu_ratio", "exit_cpu_ms", Kind::Unfolded),
        ("exit_ratio_to_huge_pages", "exit_ms", Kind::UnfoldedHuge),
    ] {
        let times = |kind| {
            let times = of(kind).map(|sample| number(&sample[time]));
            times.collect::<Vec<_>>()
        };
        results[key] = spread(ratios(&times(Kind::Folded), &times(kind)));
    }
    let per_mapping = of(Kind::Folded).map(|sample| {
        let facts = &sample["facts"];
        let slabs = facts["slab_bytes"].as_object().into_iter().flatten();
        let bytes: f64 = slabs.map(|(_, bytes)| number(bytes)).sum();
        bytes / (number(&facts["mappings"]) - number(&facts["mappings_before"]))
    });
    results["slab_bytes_per_mapping"] = spread(per_mapping.collect::<Vec<_>>());
    results
}

/// Draws the figures of the study `mappings` from its record: the stalls of the largest measured
/// process, and the times of single operations by the number of mappings.
pub fn figures(study: &Value) -> Vec<Figure> {
    let samples = figure::samples(study);
    let largest = samples
        .iter()
        .filter_map(|sample| sample["runs"].as_u64())
        .max();
    let of = |kind: Kind, runs: Option<u64>| {
        let is_wanted = move |sample: &&Value| {
            sample["runs"].as_u64() == runs && sample["memory"] == json!(kind)
        };
        samples.iter().filter(is_wanted)
    };
    let tail = |name: &str, kind: Kind, window: &str| Series {
        name: name.into(),
        points: [2.0, 10.0, 100.0, 1000.0, 10_000.0]
            .map(|n| {
                let pointer = format!("/windows/{window}/tail_us/{n}");
                let values = of(kind, largest).filter_map(|s| s.pointer(&pointer)?.as_f64());
                (n, median(values.collect::<Vec<_>>()))
            })
            .into(),
        dashed: kind != Kind::Folded,
    };
    let stalls = [
        ("nothing", "nothing else"),
        ("ksm_and_compaction", "KSM, compaction"),
        ("folding", "folding"),
    ];
    let stalls: Vec<Series> = stalls
        .into_iter()
        .flat_map(|(window, name)| {
            [
                tail(&format!("{name}, folded"), Kind::Folded, window),
                tail(&format!("{name}, unfolded"), Kind::Unfolded, window),
            ]
        })
        .filter(|series| series.points.iter().any(|point| point.1.is_finite()))
        .collect();
    let mut sizes: Vec<u64> = samples.iter().filter_map(|s| s["runs"].as_u64()).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let operation = |(key, name): (&str, &str)| {
        let at = |kind, runs| {
            let pointer = format!("/operations/{key}/median_us");
            let values = of(kind, runs).filter_map(|s| s.pointer(&pointer)?.as_f64());
            median(values.collect::<Vec<_>>())
        };
        let none = (0.0, at(Kind::Unfolded, largest));
        let folded = sizes
            .iter()
            .map(|&runs| (runs as f64, at(Kind::Folded, Some(runs))));
        Series {
            name: name.into(),
            points: std::iter::once(none).chain(folded).collect(),
            dashed: false,
        }
    };
    let operations: Vec<Series> = [
        ("mmap", "mmap of a run"),
        ("madv_dontneed", "MADV_DONTNEED"),
        ("fold_run", "fold a run"),
        ("discard_run", "discard a folded run"),
        ("release_run", "unfold a run"),
    ]
    .into_iter()
    .map(operation)
    .filter(|_| largest.is_some())
    .collect();
    let stalls = figure::drawn(
        "mappings-stalls",
        &format!(
            "Touches of memory with {} folded runs",
            largest.unwrap_or(0)
        ),
        Axis::Log("one of so many touches takes longer"),
        Axis::Log("µs"),
        &stalls,
    );
    let operations = figure::drawn(
        "mappings-operations",
        "Single operations by number of mappings",
        Axis::Linear("folded runs of the process"),
        Axis::Log("µs"),
        &operations,
    );
    stalls.into_iter().chain(operations).collect()
}

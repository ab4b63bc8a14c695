//! Study of the CPU cost of folding by run length, compared with a bare comparison of the same
//! bytes and with ksmd on the same data.
//!
//! Folding runs in this process, with the code that runs in QEMU. Figures are CPU time of the
//! working thread (ksmd's from `/proc/PID/schedstat`), so other load on the machine matters little.
//! Runs are one page apart in RAM, so that their mappings do not merge, as in a guest. The page
//! store is the daemon's, and is filled as the daemon fills it. The bare comparison has both sides
//! mapped beforehand, unlike folding, so it is a theoretical limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use memfold_folder::Folder;
use memfold_ksm::{self as ksm, Controls, Ksmd, Run, Settings, Status};
use memfold_store::{Source, Store};
use memfold_sys::cpu::thread_cpu_ns;
use memfold_sys::region::{Area, Mapping};
use memfold_units::{ByteSize, PAGE_BYTES, StorePage};
use memfold_wire::library::{Advice, FoldRun, Freeze, MAX_RUNS, Order, Outcome, Reply, VERSION};
use rustix::mm::Advice as Madvise;
use serde_json::{Value, json};

use super::figure::{self, Axis, Figure, Series};
use super::record::{median, spread};
use super::study::Options;

/// Lengths of runs, in pages, that are measured.
const LENGTHS: [u64; 5] = [1, 4, 16, 64, 512];

/// Number of pages that are folded for a measurement, and that ksmd merges.
const PAGES: u64 = 16384;

/// Number of pages that are copied to the page store together, as in a batch of the engine.
const FILL_PAGES: u64 = 2048;

/// Runs the study. Returns `{"results": {...}, "samples": [...]}`; times are in µs of CPU.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    measure_all(options.pick(5, 7), PAGES, PAGES)
}

/// Measures folding and KSM. `repeats`: how often each run length is measured. `pages`: number of
/// pages folded for each measurement of runs of 16 pages and more, at least 2048; shorter runs take
/// fewer. `ksm_pages`: number of pages in each of the two regions that ksmd merges; with 0, KSM is
/// not used, and its figures are `null`.
fn measure_all(repeats: usize, pages: u64, ksm_pages: u64) -> anyhow::Result<Value> {
    let stop = stop_flag()?;
    let folder = Folder::new(None, None);
    match folder.execute(&Order::Hello { version: VERSION }, None) {
        Reply::Hello { problem: None, .. } => {}
        Reply::Hello {
            problem: Some(problem),
            ..
        } => bail!(problem),
        other => bail!("the fold library sent an unexpected reply: {other:?}"),
    }
    let mut samples = Vec::new();
    let mut by_length = serde_json::Map::new();
    let mut fold_64 = 0.0;
    let mut compare = Vec::new();
    let mut ratios = Vec::new();
    let mut appends = serde_json::Map::new();
    let mut number = 0;
    for length in LENGTHS {
        let (mut us, mut append_us) = (Vec::new(), Vec::new());
        for _ in 0..repeats.max(1) {
            ensure!(!stop.load(Ordering::Relaxed), "interrupted");
            number += 1;
            let sample = measure(&folder, number, length, pages.max(2048))?;
            samples.push(json!({
                "run_pages": length,
                "fold_us_per_page": sample.fold,
                "compare_us_per_page": sample.compare,
                "fold_wall_us_per_page": sample.wall,
                "append_us_per_page": sample.append,
            }));
            if length == 64 {
                compare.push(sample.compare);
                ratios.push(sample.fold / sample.compare);
            }
            us.push(sample.fold);
            append_us.push(sample.append);
        }
        if length == 64 {
            fold_64 = median(&us);
        }
        by_length.insert(length.to_string(), spread(&us));
        appends.insert(length.to_string(), spread(&append_us));
    }
    let ksm_us = if ksm_pages > 0 {
        Some(ksm_us_per_page(ksm_pages, &stop)?)
    } else {
        None
    };
    Ok(json!({
        "results": {
            "fold_us_per_page": by_length,
            "append_us_per_page": appends,
            "compare_us_per_page": spread(&compare),
            "ratio_fold_over_compare": median(&ratios),
            "ksm_us_per_merged_page": ksm_us,
            "ratio_ksm_over_fold": ksm_us.map(|ksm| ksm / fold_64),
        },
        "samples": samples,
    }))
}

/// Draws the study's figure: CPU time for each page over the length of runs.
#[must_use]
pub fn figures(study: &Value) -> Vec<Figure> {
    let results = &study["results"];
    let level = |name: &str, value: &Value| Series {
        name: name.into(),
        points: value
            .as_f64()
            .map(|us| LENGTHS.map(|length| (length as f64, us)).to_vec())
            .unwrap_or_default(),
        dashed: true,
    };
    let fold = LENGTHS.map(|length| {
        let us = &results["fold_us_per_page"][length.to_string()]["median"];
        (length as f64, us.as_f64().unwrap_or(f64::NAN))
    });
    let series = [
        Series {
            name: "fold".into(),
            points: fold.to_vec(),
            dashed: false,
        },
        level("ksmd, a merged page", &results["ksm_us_per_merged_page"]),
        level(
            "bare compare, runs of 64",
            &results["compare_us_per_page"]["median"],
        ),
    ];
    let svg = figure::lines(
        "CPU for each shared page",
        &Axis::log("pages in a run"),
        &Axis::log("µs of CPU a page"),
        &series,
    );
    vec![("fold-cost".into(), svg)]
}

/// A run of memory, and the first page of its copy in the page store.
type Place = (Area, u64);

/// CPU times in microseconds per page.
struct Sample {
    append: f64,
    fold: f64,
    compare: f64,
    wall: f64,
}

/// Folds fresh memory in runs of `length` pages, after comparing the same runs in the same order
/// without folding. `number`: number of the page store, which no other measurement has used.
fn measure(folder: &Folder, number: u32, length: u64, pages: u64) -> anyhow::Result<Sample> {
    let pages = if length < 16 { pages / 4 } else { pages };
    let runs = pages / (length + 1);
    let ram = Mapping::anonymous(runs * (length + 1), true)?;
    let area = ram.area();
    area.advise(Madvise::LinuxNoHugepage)?;
    let mut words = Words::default();
    for page in 0..area.pages() {
        area.part(page, 1).write(&words.page());
    }
    let (store, places, append_ns) = fill(number, area, length)?;

    // For the bare comparison, both sides are mapped before the clock starts.
    let total = runs * length;
    let window = Mapping::window(store.read_only(), total)?;
    window.area().advise(Madvise::LinuxPopulateRead)?;
    let began = thread_cpu_ns();
    for (from, first) in &places {
        let equal = from.equal_pages(window.area().part(*first, length));
        ensure!(equal == length, "memory differs from what was written");
    }
    let compare_ns = thread_cpu_ns() - began;
    drop(window);

    let hva = area.start().0;
    expect_ok(folder.execute(
        &Order::AddRam {
            hva,
            pages: area.pages(),
            advice: Advice {
                nohugepage: true,
                dontfork: true,
                noreserve: true,
                ..Advice::default()
            },
        },
        None,
    ))?;
    let result = fold_all(folder, number, &store, &places);
    expect_ok(folder.execute(&Order::RemoveRam { hva }, None))?;
    expect_ok(folder.execute(&Order::RemoveStore { store: number }, None))?;
    let (fold_ns, wall) = result?;
    let us = |nanoseconds: u64| nanoseconds as f64 / 1000.0 / total as f64;
    Ok(Sample {
        append: us(append_ns),
        fold: us(fold_ns),
        compare: us(compare_ns),
        wall: wall.as_secs_f64() * 1e6 / total as f64,
    })
}

/// Makes a page store with a copy of each run of `area`, filled like the daemon does, in batches of
/// [`FILL_PAGES`]. Returns the store, the place of each run, and nanoseconds of CPU.
fn fill(number: u32, area: Area, length: u64) -> anyhow::Result<(Store, Vec<Place>, u64)> {
    let cap = ByteSize(2 * area.bytes() + ByteSize::mib(2).0);
    let mut store = Store::create(&format!("bench-{}-{number}", std::process::id()), cap)?;
    let mut places = Vec::new();
    let began = thread_cpu_ns();
    let mut batch: Option<(StorePage, Vec<Source>)> = None;
    let runs = area.pages() / (length + 1);
    for run in 0..runs {
        let from = area.part(run * (length + 1), length);
        if batch.is_none() {
            store.align();
        }
        let first = store.reserve(length)?;
        let (start, sources) = batch.get_or_insert((first, Vec::new()));
        sources.push(Source {
            pid: rustix::process::getpid(),
            from: from.start(),
            pages: length,
        });
        if first.0 + length - start.0 >= FILL_PAGES || run + 1 == runs {
            let filled = store.fill(*start, sources);
            if let Some(error) = filled.error {
                return Err(error.into());
            }
            ensure!(
                filled.missing.is_empty(),
                "memory of this process ends early"
            );
            batch = None;
        }
        places.push((from, first.0));
    }
    Ok((store, places, thread_cpu_ns() - began))
}

/// Folds every run onto its copy in the page store. Returns nanoseconds of CPU, and the elapsed
/// time.
fn fold_all(
    folder: &Folder,
    number: u32,
    store: &Store,
    places: &[Place],
) -> anyhow::Result<(u64, Duration)> {
    expect_ok(folder.execute(
        &Order::AddStore {
            store: number,
            max_pages: store.frontier().0,
        },
        Some(store.read_only().try_clone_to_owned()?),
    ))?;
    let runs: Vec<FoldRun> = places
        .iter()
        .map(|(from, first)| FoldRun {
            hva: from.start().0,
            pages: u32::try_from(from.pages()).unwrap_or(1),
            store: number,
            store_page: *first,
        })
        .collect();
    let orders: Vec<Order> = runs
        .chunks(MAX_RUNS)
        .map(|runs| Order::Fold {
            freeze: Freeze::Move,
            runs: runs.to_vec(),
        })
        .collect();
    let wall = Instant::now();
    let mut fold_ns = 0;
    for order in &orders {
        match folder.execute(order, None) {
            Reply::Outcomes {
                outcomes, cpu_ns, ..
            } => {
                if let Some(other) = outcomes.iter().find(|o| **o != Outcome::Done) {
                    bail!("the fold library did not fold a range of pages: {other:?}");
                }
                fold_ns += cpu_ns;
            }
            other => bail!("the fold library sent an unexpected reply: {other:?}"),
        }
    }
    Ok((fold_ns, wall.elapsed()))
}

fn expect_ok(reply: Reply) -> anyhow::Result<()> {
    match reply {
        Reply::Ok => Ok(()),
        Reply::Error { reason } => bail!(reason),
        other => bail!("the fold library sent an unexpected reply: {other:?}"),
    }
}

/// Pseudorandom words (xorshift64), the same for every run of the study.
struct Words(u64);

impl Default for Words {
    fn default() -> Self {
        Self(88_172_645_463_325_252)
    }
}

impl Words {
    fn page(&mut self) -> [u64; PAGE_BYTES / 8] {
        let mut numbers = [0; PAGE_BYTES / 8];
        for number in &mut numbers {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            *number = self.0;
        }
        numbers
    }
}

/// Returns the CPU time of ksmd for each page that it merges, for two regions with the same bytes.
fn ksm_us_per_page(pages: u64, stop: &AtomicBool) -> anyhow::Result<f64> {
    let controls = Controls::default();
    ensure!(
        controls.settings()?.run != Some(1),
        "KSM runs on this host, and its work on other memory would be counted; stop KSM to measure (memfold ksm status)"
    );
    let ksmd = Ksmd::find().context("no ksmd thread runs: this kernel has no KSM")?;
    let regions = [
        Mapping::anonymous(pages, true)?,
        Mapping::anonymous(pages, true)?,
    ];
    for region in &regions {
        region.area().advise(Madvise::LinuxNoHugepage)?;
        let mut words = Words::default();
        for page in 0..pages {
            region.area().part(page, 1).write(&words.page());
        }
        region
            .area()
            .advise(Madvise::LinuxMergeable)
            .context("cannot mark memory as mergeable: this kernel has no KSM")?;
    }
    let sharing = || anyhow::Ok(Status::read(&controls)?.pages_sharing.unwrap_or(0));
    let (merged_before, cpu_before) = (sharing()?, ksmd.cpu_time()?);
    // ksmd scans many pages each time, so that waking up counts little. The work for each page is
    // the same at any rate.
    let settings = Settings {
        pages_to_scan: Some(2000),
        sleep_millisecs: Some(1),
        ..Settings::kernel_default()
    };
    std::fs::create_dir_all(ksm::NOTES)?;
    let run = Run::start(&controls, ksm::NOTES.as_ref(), &settings)?;
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut merged = 0;
    while merged < pages * 98 / 100 {
        ensure!(!stop.load(Ordering::Relaxed), "interrupted");
        ensure!(
            Instant::now() < deadline,
            "ksmd merged {merged} of {pages} pages in 30 s: does something else change KSM's settings?"
        );
        std::thread::sleep(Duration::from_millis(2));
        merged = sharing()?.saturating_sub(merged_before);
    }
    let cpu = ksmd.cpu_time()?.saturating_sub(cpu_before);
    drop(regions);
    run.stop(false)?;
    Ok(cpu.as_secs_f64() * 1e6 / merged as f64)
}

/// Returns a flag that Ctrl-C and SIGTERM set instead of ending the process, so that KSM's settings
/// are restored.
fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (ready, is_ready) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        runtime.block_on(async {
            use tokio::signal::unix::{SignalKind, signal};
            let (Ok(mut interrupt), Ok(mut terminate)) = (
                signal(SignalKind::interrupt()),
                signal(SignalKind::terminate()),
            ) else {
                return;
            };
            let _ = ready.send(());
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            flag.store(true, Ordering::Relaxed);
        });
    });
    is_ready.recv().context(
        "cannot handle Ctrl-C, so an interrupted study could not restore KSM's settings",
    )?;
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folding_time_is_measured_at_every_run_length() {
        // Unit tests do not measure KSM, because its settings apply to the whole machine.
        let repeats = 3;
        let report = measure_all(repeats, 8192, 0).unwrap();
        println!(
            "{}",
            serde_json::to_string_pretty(&report["results"]).unwrap()
        );
        // The test does not check which way is cheaper: on a busy machine, one of three
        // measurements may be wrong.
        for length in LENGTHS {
            let us = &report["results"]["fold_us_per_page"][length.to_string()];
            assert!(us["min"].as_f64().unwrap() > 0.0, "{length}: {us}");
        }
        let samples = report["samples"].as_array().unwrap();
        assert_eq!(samples.len(), LENGTHS.len() * repeats);
        assert!(report["results"]["ratio_ksm_over_fold"].is_null());
    }

    #[test]
    fn the_ksmd_measurement_restores_the_ksm_settings() {
        // Only one test on the machine may use KSM at a time; tests/ksm_real.rs takes the same
        // lock.
        let lock = std::fs::File::create(std::env::temp_dir().join("memfold-ksm.lock")).unwrap();
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let controls = Controls::default();
        let before = match controls.settings() {
            Ok(before) if before.run == Some(0) && rustix::process::getuid().is_root() => before,
            other => {
                memfold_testkit::skip!("KSM is in use or not ours to set: {other:?}");
            }
        };
        let us = ksm_us_per_page(4096, &AtomicBool::new(false)).unwrap();
        assert!((0.1..1000.0).contains(&us), "{us} µs");
        assert_eq!(controls.settings().unwrap(), before);
        let interrupted = ksm_us_per_page(4096, &AtomicBool::new(true));
        assert!(interrupted.is_err());
        assert_eq!(controls.settings().unwrap(), before);
    }
}

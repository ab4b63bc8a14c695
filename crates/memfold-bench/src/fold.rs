//! The study `memfold bench fold`: measures the CPU time of folding runs of pages, by the length of
//! the runs. It is compared with the time of a plain comparison of the same bytes, and with the
//! time of KSM's thread (ksmd) on the same data.
//!
//! Folding runs in this process, with the code that runs in QEMU. Figures are CPU time of the
//! working thread (ksmd's from `/proc/PID/schedstat`), so other load on the machine matters little.
//! Runs are one page apart in RAM, so that the kernel does not merge their mappings; in a guest, it
//! cannot either. The page store is made and filled as the daemon does it. For the plain
//! comparison, both sides are mapped beforehand, so its time is a lower limit.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use memfold_ksm::{self as ksm, Controls, Settings, Status};
use memfold_store::{Source, Store};
use memfold_sys::cpu::thread_cpu_ns;
use memfold_sys::region::{Area, Mapping};
use memfold_units::{ByteSize, PAGE_BYTES, StorePage};
use memfold_wire::library::{Advice, FoldRun, Freeze, MAX_RUNS, Order, Outcome};
use rustix::mm::Advice as Madvise;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::figure::{self, Axis, Figure, Series, number};
use crate::folding::Library;
use crate::host::{check_ksm_is_off, ksmd, start_ksm};
use crate::random::Random;
use crate::record::{Found, median, spread};
use crate::study::Options;
use memfold_lab::wait_for;

/// Lengths of runs, in pages, that are measured.
const LENGTHS: [u64; 5] = [1, 4, 16, 64, 512];

/// Number of pages that are folded for a measurement, and that ksmd merges.
const PAGES: u64 = 16384;

/// Number of pages that are copied to the page store together, as in a batch of the engine.
const FILL_PAGES: u64 = 2048;

/// Runs the study `fold`. Returns its JSON record; times are CPU time in microseconds.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    // Ctrl-C leaves no settings of KSM behind.
    memfold_lab::clean_up_at_interrupt();
    Ok(json!(measure_all(options.pick(5, 7), PAGES, PAGES)?))
}

/// Measures folding and KSM. `repeats`: how often each run length is measured. `pages`: number of
/// pages folded for each measurement of runs of 16 pages and more, at least 2048; shorter runs take
/// fewer. `ksm_pages`: number of pages in each of the two regions that ksmd merges; with 0, KSM is
/// not used, and its figures are `null`.
pub fn measure_all(repeats: usize, pages: u64, ksm_pages: u64) -> anyhow::Result<Found> {
    let library = Library::new()?;
    let mut all = Vec::new();
    for length in LENGTHS {
        for _ in 0..repeats.max(1) {
            let store = u32::try_from(all.len() + 1)?;
            all.push(measure(&library, store, length, pages.max(2048))?);
        }
    }
    let ksm_us = if ksm_pages > 0 {
        Some(ksm_us_per_page(ksm_pages)?)
    } else {
        None
    };
    let of = |length: u64, what: fn(&Sample) -> f64| {
        let samples = all.iter().filter(move |sample| sample.run_pages == length);
        samples.map(what)
    };
    let by_length = |what: fn(&Sample) -> f64| -> Map<String, Value> {
        let spreads = LENGTHS.map(|length| (length.to_string(), spread(of(length, what))));
        spreads.into_iter().collect()
    };
    let fold_64 = median(of(64, |sample| sample.fold_us_per_page));
    Ok(Found {
        results: json!({
            "fold_us_per_page": by_length(|sample| sample.fold_us_per_page),
            "append_us_per_page": by_length(|sample| sample.append_us_per_page),
            "compare_us_per_page": spread(of(64, |sample| sample.compare_us_per_page)),
            "ratio_fold_over_compare": median(of(64, |sample| sample.fold_us_per_page / sample.compare_us_per_page)),
            "ksm_us_per_merged_page": ksm_us,
            "ratio_ksm_over_fold": ksm_us.map(|ksm| ksm / fold_64),
        }),
        samples: all.iter().map(|sample| json!(sample)).collect(),
        ..Found::default()
    })
}

/// Draws the figure of the study `fold` from its record: CPU time per page over the length of runs.
pub fn figures(study: &Value) -> Vec<Figure> {
    let results = &study["results"];
    let line = |name: &str, dashed, us: &dyn Fn(u64) -> f64| Series {
        name: name.into(),
        points: LENGTHS.map(|length| (length as f64, us(length))).into(),
        dashed,
    };
    let fold = &results["fold_us_per_page"];
    let ksm = number(&results["ksm_us_per_merged_page"]);
    let compare = number(&results["compare_us_per_page"]["median"]);
    let series = [
        line("fold", false, &|length| {
            number(&fold[length.to_string()]["median"])
        }),
        line("ksmd, a merged page", true, &|_| ksm),
        line("bare compare, runs of 64", true, &|_| compare),
    ];
    let (x, y) = (Axis::Log("pages in a run"), Axis::Log("µs of CPU a page"));
    let drawn = figure::drawn("fold-cost", "CPU for each shared page", x, y, &series);
    drawn.into_iter().collect()
}

/// A run of memory, and the first page of its copy in the page store.
pub type Place = (Area, u64);

/// CPU times in microseconds per page.
#[derive(Serialize)]
struct Sample {
    run_pages: u64,
    fold_us_per_page: f64,
    compare_us_per_page: f64,
    fold_wall_us_per_page: f64,
    append_us_per_page: f64,
}

/// Writes pseudorandom words to an area, the same for every area.
pub fn fill_random(area: Area) {
    let mut random = Random::new(88_172_645_463_325_252);
    for page in 0..area.pages() {
        let words: [u64; PAGE_BYTES / 8] = std::array::from_fn(|_| random.number());
        area.part(page, 1).write(&words);
    }
}

/// Folds fresh memory in runs of `length` pages, after comparing the same runs in the same order
/// without folding. `number`: number of the page store, which no other measurement has used.
fn measure(library: &Library, number: u32, length: u64, pages: u64) -> anyhow::Result<Sample> {
    let pages = if length < 16 { pages / 4 } else { pages };
    let runs = pages / (length + 1);
    let ram = Mapping::anonymous(runs * (length + 1), true)?;
    let area = ram.area();
    area.advise(Madvise::LinuxNoHugepage)?;
    fill_random(area);
    let (store, places, append_ns) = fill(number, area, length, length + 1)?;

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

    let (hva, pages) = (area.start().0, area.pages());
    let advice = Advice {
        nohugepage: true,
        dontfork: true,
        noreserve: true,
        ..Advice::default()
    };
    library.give(&Order::AddRam { hva, pages, advice }, None)?;
    let result = fold_all(library, number, &store, &places);
    library.give(&Order::RemoveRam { hva }, None)?;
    library.give(&Order::RemoveStore { store: number }, None)?;
    let (fold_ns, wall) = result?;
    let us = |nanoseconds: u64| nanoseconds as f64 / 1000.0 / total as f64;
    Ok(Sample {
        run_pages: length,
        fold_us_per_page: us(fold_ns),
        compare_us_per_page: us(compare_ns),
        fold_wall_us_per_page: wall.as_secs_f64() * 1e6 / total as f64,
        append_us_per_page: us(append_ns),
    })
}

/// Makes a page store with a copy of each run of `area`, filled like the daemon does, in batches of
/// [`FILL_PAGES`]. A run of `length` pages begins every `distance` pages. Returns the store, the
/// place of each run, and nanoseconds of CPU.
pub fn fill(
    number: u32,
    area: Area,
    length: u64,
    distance: u64,
) -> anyhow::Result<(Store, Vec<Place>, u64)> {
    let cap = ByteSize(2 * area.bytes() + ByteSize::mib(2).0);
    let mut store = Store::create(&format!("bench-{}-{number}", std::process::id()), cap)?;
    let mut places = Vec::new();
    let began = thread_cpu_ns();
    let mut batch: Option<(StorePage, Vec<Source>)> = None;
    let runs = area.pages() / distance;
    for run in 0..runs {
        let from = area.part(run * distance, length);
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
            let is_whole = filled.missing.is_empty();
            ensure!(is_whole, "memory of this process ends early");
            batch = None;
        }
        places.push((from, first.0));
    }
    Ok((store, places, thread_cpu_ns() - began))
}

/// Folds every run onto its copy in the page store. Returns nanoseconds of CPU, and the elapsed
/// time.
pub fn fold_all(
    library: &Library,
    number: u32,
    store: &Store,
    places: &[Place],
) -> anyhow::Result<(u64, Duration)> {
    let add = Order::AddStore {
        store: number,
        max_pages: store.frontier().0,
    };
    library.give(&add, Some(store.read_only().try_clone_to_owned()?))?;
    let run = |(from, first): &Place| FoldRun {
        hva: from.start().0,
        pages: u32::try_from(from.pages()).unwrap_or(1),
        store: number,
        store_page: *first,
    };
    let orders = places.chunks(MAX_RUNS).map(|places| Order::Fold {
        freeze: Freeze::Move,
        runs: places.iter().map(run).collect(),
    });
    let orders: Vec<Order> = orders.collect();
    let wall = Instant::now();
    let mut fold_ns = 0;
    for order in &orders {
        let (outcomes, cpu_ns) = library.outcomes(order)?;
        if let Some(other) = outcomes.iter().find(|o| **o != Outcome::Done) {
            bail!("the fold library did not fold a range of pages: {other:?}");
        }
        fold_ns += cpu_ns;
    }
    Ok((fold_ns, wall.elapsed()))
}

/// Returns the CPU time of ksmd for each page that it merges, for two regions with the same bytes.
fn ksm_us_per_page(pages: u64) -> anyhow::Result<f64> {
    let controls = Controls::default();
    check_ksm_is_off()?;
    let ksmd = ksmd()?;
    let regions = [(); 2].map(|()| Mapping::anonymous(pages, true));
    let regions: Vec<Mapping> = regions.into_iter().collect::<Result<_, _>>()?;
    for region in &regions {
        region.area().advise(Madvise::LinuxNoHugepage)?;
        fill_random(region.area());
        let marked = region.area().advise(Madvise::LinuxMergeable);
        marked.context("cannot mark memory as mergeable: this kernel has no KSM")?;
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
    let run = start_ksm(&settings)?;
    let limits = (Duration::from_secs(30), Duration::from_millis(2));
    let late =
        format!("ksmd did not merge {pages} pages (does something else change KSM's settings?)");
    let merged = wait_for(late, limits, || {
        let merged = sharing()?.saturating_sub(merged_before);
        Ok((merged >= pages * 98 / 100).then_some(merged))
    })?;
    let cpu = ksmd.cpu_time()?.saturating_sub(cpu_before);
    drop(regions);
    run.stop(false)?;
    Ok(cpu.as_secs_f64() * 1e6 / merged as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fold_benchmark_measures_the_folding_time_at_every_run_length() {
        // Unit tests do not measure KSM, because its settings apply to the whole machine.
        let repeats = 3;
        let report = measure_all(repeats, 8192, 0).unwrap();
        println!("{}", serde_json::to_string_pretty(&report.results).unwrap());
        // The test does not check which way is cheaper: on a busy machine, one of three
        // measurements may be wrong.
        for length in LENGTHS {
            let us = &report.results["fold_us_per_page"][length.to_string()];
            assert!(us["min"].as_f64().unwrap() > 0.0, "{length}: {us}");
        }
        assert_eq!(report.samples.len(), LENGTHS.len() * repeats);
        assert!(report.results["ratio_ksm_over_fold"].is_null());
    }

    #[test]
    fn after_the_benchmark_of_ksmd_the_previous_ksm_settings_are_restored() {
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
        let us = ksm_us_per_page(4096).unwrap();
        assert!((0.1..1000.0).contains(&us), "{us} µs");
        assert_eq!(controls.settings().unwrap(), before);
        // An interrupt ends the process without unwinding.
        let settings = Settings::kernel_default();
        let run = start_ksm(&settings).unwrap();
        assert_ne!(controls.settings().unwrap(), before);
        assert!(ksm::restore_own(ksm::NOTES.as_ref()).unwrap());
        assert_eq!(controls.settings().unwrap(), before);
        std::mem::forget(run);
    }
}

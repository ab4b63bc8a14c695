//! Study: what folding costs, by run length, next to a bare compare of the same bytes and to ksmd on the same data.
//!
//! Folding runs in this process, by the code that runs in QEMU. Figures are CPU time of the thread that works (ksmd's from
//! `/proc/PID/schedstat`), so other load on the machine matters little. Runs are one page apart, in RAM and in the store, so
//! that their mappings don't merge: a guest's runs don't either.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use memfold_qemu::Folder;
use memfold_qemu::folder::thread_cpu_ns;
use memfold_sys::region::{Area, Mapping};
use memfold_units::{PAGE_BYTES, PAGE_SIZE};
use memfold_wire::library::{Advice, FoldRun, Freeze, MAX_RUNS, Order, Outcome, Reply, VERSION};
use rustix::mm::Advice as Madvise;
use serde_json::{Value, json};

use super::figure::{self, Axis, Series};

/// Run lengths in pages.
const LENGTHS: [u64; 5] = [1, 4, 16, 64, 512];

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Times that each run length is measured.
    pub repeats: usize,
    /// Pages folded for each measurement of runs of 16 pages and more; shorter runs take fewer. At least 2048.
    pub pages: u64,
    /// Pages in each of the two regions that ksmd merges. 0: KSM is left alone and its figures are `null`.
    pub ksm_pages: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            repeats: 7,
            pages: 16384,
            ksm_pages: 16384,
        }
    }
}

impl Options {
    /// Less of everything: about 5 seconds.
    #[must_use]
    pub fn quick() -> Self {
        Self {
            repeats: 5,
            ..Self::default()
        }
    }
}

/// Runs the study: `{"results": {...}, "samples": [...]}`, times in µs of CPU.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    let stop = stop_flag()?;
    let folder = Folder::new(None);
    match folder.execute(&Order::Hello { version: VERSION }, None) {
        Reply::Hello { problem: None, .. } => {}
        Reply::Hello {
            problem: Some(problem),
            ..
        } => bail!(problem),
        other => bail!("unexpected answer {other:?}"),
    }
    let mut samples = Vec::new();
    let mut by_length = serde_json::Map::new();
    let mut fold_64 = 0.0;
    let mut compare = Vec::new();
    let mut ratios = Vec::new();
    for length in LENGTHS {
        let mut us = Vec::new();
        for _ in 0..options.repeats.max(1) {
            ensure!(!stop.load(Ordering::Relaxed), "interrupted");
            let sample = measure(&folder, length, options.pages.max(2048))?;
            samples.push(json!({
                "run_pages": length,
                "fold_us_per_page": sample.folding,
                "compare_us_per_page": sample.comparing,
                "fold_wall_us_per_page": sample.wall,
            }));
            if length == 64 {
                compare.push(sample.comparing);
                ratios.push(sample.folding / sample.comparing);
            }
            us.push(sample.folding);
        }
        if length == 64 {
            fold_64 = median(&us);
        }
        by_length.insert(length.to_string(), spread(&us));
    }
    let ksm_us = if options.ksm_pages > 0 {
        Some(ksm_us_per_page(options.ksm_pages, &stop)?)
    } else {
        None
    };
    Ok(json!({
        "results": {
            "fold_us_per_page": by_length,
            "compare_us_per_page": spread(&compare),
            "ratio_fold_over_compare": median(&ratios),
            "ksm_us_per_merged_page": ksm_us,
            "ratio_ksm_over_fold": ksm_us.map(|ksm| ksm / fold_64),
        },
        "samples": samples,
    }))
}

/// The study's figure, by name: CPU for each page over the length of runs.
#[must_use]
pub fn figures(study: &Value) -> Vec<(String, String)> {
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

/// Microseconds per page.
struct Sample {
    folding: f64,
    comparing: f64,
    wall: f64,
}

/// Folds fresh memory in runs of `length` pages, after a bare compare of the same runs in the same order.
fn measure(folder: &Folder, length: u64, pages: u64) -> anyhow::Result<Sample> {
    let pages = if length < 16 { pages / 4 } else { pages };
    let runs = pages / (length + 1);
    let total = runs * (length + 1);
    let ram = Mapping::anonymous(total, true)?;
    let area = ram.area();
    area.advise(Madvise::LinuxNoHugepage)?;
    let store = fill(area)?;
    let window = Mapping::window(&store, total)?;
    window.area().advise(Madvise::LinuxPopulateRead)?;

    let began = thread_cpu_ns();
    for run in 0..runs {
        let first = run * (length + 1);
        let equal = area
            .part(first, length)
            .equal_pages(window.area().part(first, length));
        ensure!(equal == length, "memory differs from what was written");
    }
    let compare_ns = thread_cpu_ns() - began;
    drop(window);

    let hva = area.start().0;
    expect_ok(folder.execute(
        &Order::AddRam {
            hva,
            pages: total,
            advice: Advice {
                nohugepage: true,
                dontfork: true,
                noreserve: true,
                ..Advice::default()
            },
        },
        None,
    ))?;
    // Each measurement has a store of its own; numbers are never used for another file.
    let number = u32::try_from(rustix::fs::fstat(&store)?.st_ino & 0xFFFF_FFFF)?;
    let result = (|| {
        expect_ok(folder.execute(
            &Order::AddStore {
                store: number,
                max_pages: total,
            },
            Some(store.try_clone()?),
        ))?;
        let orders: Vec<Order> = (0..runs)
            .map(|run| FoldRun {
                hva: hva + run * (length + 1) * PAGE_SIZE,
                pages: u32::try_from(length).unwrap_or(1),
                store: number,
                store_page: run * (length + 1),
            })
            .collect::<Vec<_>>()
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
                Reply::Outcomes { outcomes, cpu_ns } => {
                    if let Some(other) = outcomes.iter().find(|o| **o != Outcome::Done) {
                        bail!("a run was not folded: {other:?}");
                    }
                    fold_ns += cpu_ns;
                }
                other => bail!("unexpected answer {other:?}"),
            }
        }
        Ok((fold_ns, wall.elapsed()))
    })();
    expect_ok(folder.execute(&Order::RemoveRam { hva }, None))?;
    expect_ok(folder.execute(&Order::RemoveStore { store: number }, None))?;
    let (fold_ns, wall) = result?;
    let count = (runs * length) as f64;
    Ok(Sample {
        folding: fold_ns as f64 / 1000.0 / count,
        comparing: compare_ns as f64 / 1000.0 / count,
        wall: wall.as_secs_f64() * 1e6 / count,
    })
}

fn expect_ok(reply: Reply) -> anyhow::Result<()> {
    match reply {
        Reply::Ok => Ok(()),
        Reply::Error { reason } => bail!(reason),
        other => bail!("unexpected answer {other:?}"),
    }
}

/// Fills `area` with words that no other page has, and gives a memfd with the same bytes.
fn fill(area: Area) -> anyhow::Result<OwnedFd> {
    let file = fs::File::from(rustix::fs::memfd_create(
        "memfold-bench",
        rustix::fs::MemfdFlags::CLOEXEC,
    )?);
    let mut words = Words::default();
    for page in 0..area.pages() {
        let (numbers, bytes) = words.page();
        area.part(page, 1).write(&numbers);
        file.write_all_at(&bytes, page * PAGE_SIZE)?;
    }
    Ok(file.into())
}

/// xorshift64: the same pages in every run.
struct Words(u64);

impl Default for Words {
    fn default() -> Self {
        Self(88_172_645_463_325_252)
    }
}

impl Words {
    fn page(&mut self) -> ([u64; PAGE_BYTES / 8], Vec<u8>) {
        let mut numbers = [0; PAGE_BYTES / 8];
        for number in &mut numbers {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            *number = self.0;
        }
        let bytes = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
        (numbers, bytes)
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn spread(values: &[f64]) -> Value {
    json!({
        "min": values.iter().copied().fold(f64::INFINITY, f64::min),
        "median": median(values),
        "max": values.iter().copied().fold(0.0, f64::max),
    })
}

/// CPU time of ksmd for each page that it merges of two regions with the same bytes.
fn ksm_us_per_page(pages: u64, stop: &AtomicBool) -> anyhow::Result<f64> {
    let settings = KsmSettings::save(Path::new("/sys/kernel/mm/ksm"))?;
    let regions = [
        Mapping::anonymous(pages, true)?,
        Mapping::anonymous(pages, true)?,
    ];
    for region in &regions {
        region.area().advise(Madvise::LinuxNoHugepage)?;
        let mut words = Words::default();
        for page in 0..pages {
            region.area().part(page, 1).write(&words.page().0);
        }
        region
            .area()
            .advise(Madvise::LinuxMergeable)
            .context("the kernel has no KSM")?;
    }
    let ksmd = ksmd_schedstat()?;
    let merged_before = settings.counter("pages_sharing")?;
    let cpu_before = cpu_ns(&ksmd)?;
    // In big steps, so that waking up counts little; the work for each page is the same at any rate.
    settings.write("pages_to_scan", "2000")?;
    settings.write("sleep_millisecs", "1")?;
    settings.write("run", "1")?;
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut merged = 0;
    while merged < pages * 98 / 100 {
        ensure!(!stop.load(Ordering::Relaxed), "interrupted");
        ensure!(
            Instant::now() < deadline,
            "ksmd merged {merged} of {pages} pages in 30 s: does something else change KSM's settings?"
        );
        std::thread::sleep(Duration::from_millis(2));
        merged = settings
            .counter("pages_sharing")?
            .saturating_sub(merged_before);
    }
    let cpu = cpu_ns(&ksmd)? - cpu_before;
    Ok(cpu as f64 / 1000.0 / merged as f64)
}

/// The kernel's own merging as it was; put back on drop.
struct KsmSettings {
    folder: PathBuf,
    saved: Vec<(&'static str, String)>,
}

impl KsmSettings {
    fn save(folder: &Path) -> anyhow::Result<Self> {
        let mut saved = Vec::new();
        for name in ["pages_to_scan", "sleep_millisecs", "run"] {
            let path = folder.join(name);
            let value = fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            saved.push((name, value.trim().to_owned()));
        }
        Ok(Self {
            folder: folder.to_owned(),
            saved,
        })
    }

    fn write(&self, name: &str, value: &str) -> anyhow::Result<()> {
        let path = self.folder.join(name);
        fs::write(&path, value).with_context(|| format!("cannot write {}", path.display()))
    }

    fn counter(&self, name: &str) -> anyhow::Result<u64> {
        let path = self.folder.join(name);
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(text.trim().parse()?)
    }
}

impl Drop for KsmSettings {
    fn drop(&mut self) {
        for (name, value) in &self.saved {
            if let Err(error) = self.write(name, value) {
                tracing::error!("KSM keeps a setting of this measurement: {error:#}");
            }
        }
    }
}

fn ksmd_schedstat() -> anyhow::Result<PathBuf> {
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
        if name.trim() == "ksmd" {
            return Ok(path.join("schedstat"));
        }
    }
    bail!("no ksmd: the kernel has no KSM")
}

/// First field of `/proc/PID/schedstat`: time on the CPU in nanoseconds (`Documentation/scheduler/sched-stats.rst`).
fn cpu_ns(schedstat: &Path) -> anyhow::Result<u64> {
    let text = fs::read_to_string(schedstat)
        .with_context(|| format!("cannot read {}", schedstat.display()))?;
    let first = text.split_ascii_whitespace().next().unwrap_or_default();
    Ok(first.parse()?)
}

/// A flag that Ctrl-C and SIGTERM set instead of ending the process, so that KSM's settings go back.
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
    is_ready
        .recv()
        .context("cannot listen for Ctrl-C, which is needed to put KSM's settings back")?;
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_go_back_when_a_measurement_fails() {
        let folder = tempfile::tempdir().unwrap();
        for (name, value) in [
            ("pages_to_scan", "100"),
            ("sleep_millisecs", "20"),
            ("run", "0"),
        ] {
            fs::write(folder.path().join(name), value).unwrap();
        }
        let path = folder.path().to_owned();
        let panicked = std::panic::catch_unwind(move || {
            let settings = KsmSettings::save(&path).unwrap();
            settings.write("run", "1").unwrap();
            settings.write("pages_to_scan", "2000").unwrap();
            panic!("the measurement fails");
        });
        assert!(panicked.is_err());
        let read = |name| fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(
            (read("run").as_str(), read("pages_to_scan").as_str()),
            ("0", "100")
        );
    }

    #[test]
    fn folding_is_measured_at_every_length() {
        // KSM belongs to the whole machine: the study measures it, not the unit tests.
        let options = Options {
            repeats: 3,
            pages: 8192,
            ksm_pages: 0,
        };
        let report = run(&options).unwrap();
        println!(
            "{}",
            serde_json::to_string_pretty(&report["results"]).unwrap()
        );
        let us = |length: &str| {
            report["results"]["fold_us_per_page"][length]["median"]
                .as_f64()
                .unwrap()
        };
        assert!(us("1") > us("16") && us("16") > us("512") && us("512") > 0.0);
        assert!(report["results"]["ratio_ksm_over_fold"].is_null());
    }
}

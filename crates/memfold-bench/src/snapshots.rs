//! The study `memfold bench snapshots`, which repeats a published study (study E): measures how
//! long saving and restoring a VM takes, and how large the snapshot is, compared with QEMU's own
//! ways to save a VM. memfold leaves out the guest's page cache.
//!
//! Programs in the VM use 200 MB; page cache of files with random bytes fills the rest of its RAM.
//! The VM is saved in each of these ways in turn, in three rounds, and restored from each save:
//!
//! | way | what it does |
//! |---|---|
//! | `qemu` | VM stopped, `migrate file:` with mapped-ram and multifd (2 channels), VM goes on |
//! | `qemu_stream` | the same without mapped-ram and multifd: the stream meant for another host |
//! | `qemu_savevm` | `savevm`, into the disk's overlay; once, the last one |
//! | `auto` | `snapshot save`: memfold chooses between the next two, or saves all |
//! | `hot` | `--keep hot`: page cache is compared with the disk and saved by reference |
//! | `none` | `--keep none`: cache dropped, free pages listed, VM stopped, RAM image, VM goes on |
//! | `live` | `--keep none --live`, five times, while a program writes to memory: the VM's pause |
//!
//! `--arm study-disk` measures `qemu`, `qemu_stream` and `auto` on a disk of 70 MB/s, as in the
//! original study ([`study_disk`]). The limits of this host's disk and memory are measured without
//! a VM ([`pipeline`](crate::pipeline)), and the throughput of restored VMs with another VM
//! ([`warmth`](crate::warmth)).
//!
//! The time of a save is from the command to its end, and includes dropping caches. The time of a
//! restore is until a new QEMU process is `running`. A program in the VM computes a checksum of its
//! memory before the save, and again in every restored VM. Before a restore, files stay in the
//! host's page cache as the save left them, and the daemon is the one that saved; `check_s` is the
//! time in which another daemon verifies a snapshot before its first restore. Sizes are without
//! disks. Percentages compare `auto` with `qemu` in the same round.

mod figures;
mod measure;
mod study_disk;

use anyhow::Context as _;
use memfold_fold::EngineSettings;
use memfold_lab::Lab;
use memfold_snapshot::Manifest;
use memfold_units::{ByteSize, PAGE_SIZE};
use serde_json::{Map, Value, json};

use self::measure::{Arm, Case, Measured, measure};
use crate::figure::number;
use crate::qemu_way::Way;
use crate::record::{Found, median, mib, ratios, sorted, spread};
use crate::study::Options;

pub use figures::figures;

/// The measurements that the study makes.
#[derive(Clone, Debug)]
struct Scale {
    /// RAM sizes of the VMs in which programs use 200 MB, in MiB.
    sizes_mib: Vec<u64>,
    /// Amounts of memory that programs use in VMs of 2 GiB, in MiB.
    used_mib: Vec<u64>,
    /// Number of times that each way to save is measured.
    rounds: usize,
    /// Number of times that the throughput of restored VMs is measured.
    warmth_rounds: usize,
    /// Memory of the process that is saved without a VM, in MiB.
    pipeline_mib: u64,
}

/// Names of the parts of the study that can be measured alone.
const PIPELINE: &str = "pipeline";
const VMS: &str = "vms";
const WARMTH: &str = "warmth";

const PIPELINE_ROUNDS: usize = 5;

impl Scale {
    fn of(options: &Options) -> Self {
        let (sizes_mib, used_mib) = options.pick(
            (vec![1024, 2048], Vec::new()),
            (vec![512, 1024, 2048, 4096, 8192], vec![50, 800]),
        );
        let (sizes_mib, used_mib) = match options.memory {
            Some(memory) => (vec![memory.0 >> 20], Vec::new()),
            None => (sizes_mib, used_mib),
        };
        Self {
            sizes_mib,
            used_mib,
            rounds: 3,
            warmth_rounds: options.pick(1, 3),
            pipeline_mib: options.pick(512, 2048),
        }
    }

    fn case(&self, memory_mib: u64, used_mib: u64) -> Case {
        Case {
            memory: ByteSize::mib(memory_mib),
            used_mib,
            rounds: self.rounds,
            is_study_disk: false,
            is_brief: false,
            image: "trixie-a",
        }
    }

    fn cases(&self) -> Vec<Case> {
        let sizes = self.sizes_mib.iter().map(|&size| self.case(size, 200));
        let used = self.used_mib.iter().map(|&used| self.case(2048, used));
        sizes.chain(used).collect()
    }

    /// Returns the measurement of the largest VM on a disk as slow as that of the original study.
    fn on_study_disk(&self) -> Case {
        let largest = self.sizes_mib.iter().copied().max();
        Case {
            is_study_disk: true,
            ..self.case(largest.unwrap_or(2048), 200)
        }
    }
}

/// Runs the study `snapshots`. Returns its JSON record, with the parts `results` and `samples`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    let scale = Scale::of(options);
    options.check_arms("snapshots", &[PIPELINE, VMS, study_disk::ARM, WARMTH])?;
    let mut found = Found::default();
    if study_disk::is_inside() {
        let measured = measure_case(scale.on_study_disk())?;
        found.samples.push(sample(&measured));
        found.results = study_disk_results(&measured);
        return Ok(json!(found));
    }
    if options.is_wanted(PIPELINE) {
        let lab = Lab::new(EngineSettings::default())?;
        let size = ByteSize::mib(scale.pipeline_mib);
        let pipeline = crate::pipeline::run(size, PIPELINE_ROUNDS, lab.directory())
            .context("cannot measure the pipeline of a save without a VM")?;
        found.results[PIPELINE] = pipeline;
    }
    if options.is_wanted(VMS) {
        let all = scale.cases().into_iter().map(measure_case);
        let all = all.collect::<Result<Vec<Measured>, _>>()?;
        found.add(Found {
            results: vm_results(&all, &found.results[PIPELINE]),
            samples: all.iter().map(sample).collect(),
            ..Found::default()
        });
    }
    if options.is_wanted(study_disk::ARM) {
        found.add(study_disk::measure(&scale.on_study_disk(), options)?);
    }
    if options.is_wanted(WARMTH) {
        found.add(crate::warmth::run(scale.warmth_rounds)?);
    }
    Ok(json!(found))
}

/// Measures a VM of `memory_mib` MiB, `used_mib` of which a program uses, in the most important
/// ways to save. Returns `results` and `samples`.
pub fn measure_briefly(
    image: &'static str,
    (memory_mib, used_mib): (u64, u64),
    rounds: usize,
) -> anyhow::Result<Value> {
    let measured = measure_case(Case {
        memory: ByteSize::mib(memory_mib),
        used_mib,
        rounds,
        is_study_disk: false,
        is_brief: true,
        image,
    })?;
    Ok(json!({
        "results": brief_results(&measured),
        "samples": [sample(&measured)],
    }))
}

fn brief_results(m: &Measured) -> Value {
    let pages = (m.cached_kib * 1024 / PAGE_SIZE).max(1) as f64;
    let mut results = json!({
        "memory_mib": m.case.memory.0 >> 20,
        "cached_mib": m.cached_kib >> 10,
        "memory_checks": m.checks,
        "memory_errors": m.wrong,
        "drop_us_per_page": spread(m.drops_ms.iter().map(|ms| ms * 1e3 / pages)),
        "host_drop_us_per_page": m.host_drop_us,
        "pause_live_ms": spread(m.live.iter().map(|saved| saved.pause_ms)),
    });
    for (name, of) in [
        ("save_s", (|way| way.save_s) as fn(&Way) -> f64),
        ("pause_s", |way| way.pause_s),
        ("restore_s", |way| way.restore_s),
        ("size_mib", |way| mib(way.bytes as f64)),
    ] {
        for arm in [Arm::Qemu, Arm::Auto, Arm::None] {
            results[format!("{}_{name}", arm.key())] = spread(rounds(m, arm, of));
        }
    }
    for (key, percents) in reductions(m) {
        results[key] = spread(&percents);
    }
    results
}

fn measure_case(case: Case) -> anyhow::Result<Measured> {
    let measured = measure(case).with_context(|| {
        format!(
            "cannot measure a VM of {} with {} MiB used",
            case.memory, case.used_mib
        )
    })?;
    eprintln!("{}", in_short(&measured));
    Ok(measured)
}

/// Returns by how many percent `ours` is less than `theirs`.
fn reduction(ours: f64, theirs: f64) -> f64 {
    (1.0 - ours / theirs) * 100.0
}

/// Returns a value of each round of a way to save; empty if the way was not measured.
fn rounds(m: &Measured, arm: Arm, of: fn(&Way) -> f64) -> Vec<f64> {
    m.ways.get(&arm).into_iter().flatten().map(of).collect()
}

/// Returns, for each round, by how many percent time and size with memfold's default are less than
/// with QEMU's mapped-ram.
fn reductions(m: &Measured) -> [(&'static str, Vec<f64>); 3] {
    let with = |of| {
        let pairs = rounds(m, Arm::Auto, of)
            .into_iter()
            .zip(rounds(m, Arm::Qemu, of));
        pairs
            .map(|(ours, theirs)| reduction(ours, theirs))
            .collect()
    };
    [
        ("save_reduction_percent", with(|way| way.save_s)),
        ("restore_reduction_percent", with(|way| way.restore_s)),
        ("size_reduction_percent", with(|way| way.bytes as f64)),
    ]
}

/// Returns, for each round, the save time with memfold's default divided by that of QEMU's fastest
/// way.
fn over_fastest(m: &Measured) -> Vec<f64> {
    let [qemu, stream, ours] =
        [Arm::Qemu, Arm::QemuStream, Arm::Auto].map(|arm| rounds(m, arm, |way| way.save_s));
    let fastest = qemu.iter().zip(&stream).map(|(a, b)| a.min(*b));
    ratios(&ours, &fastest.collect::<Vec<_>>())
}

fn seconds(m: &Measured, arm: Arm, of: fn(&Way) -> f64) -> f64 {
    median(rounds(m, arm, of))
}

/// Inserts the median of values as the result `key`, and their minimum, median and maximum as
/// `KEY_rounds`.
fn insert(results: &mut Value, key: &str, values: &[f64]) {
    results[key] = median(values).into();
    results[format!("{key}_rounds")] = spread(values);
}

/// Computes the results of the VMs. The headline results are those of the largest VM.
fn vm_results(all: &[Measured], pipeline: &Value) -> Value {
    let mut results = json!({
        "memory_errors": all.iter().map(|m| m.wrong).sum::<u64>(),
        "memory_checks": all.iter().map(|m| m.checks).sum::<u64>(),
    });
    let sized = |m: &&Measured| m.case.used_mib == 200;
    let largest = all.iter().filter(sized).max_by_key(|m| m.case.memory.0);
    let of_1_gib = |m: &&Measured| sized(m) && m.case.memory == ByteSize::mib(1024);
    let base = all.iter().find(of_1_gib);
    if let Some(m) = largest {
        results["memory_mib"] = (m.case.memory.0 >> 20).into();
        for (key, percents) in reductions(m) {
            insert(&mut results, key, &percents);
        }
        for (base, arm) in base
            .into_iter()
            .flat_map(|base| [(base, Arm::Auto), (base, Arm::Hot)])
        {
            let ratio = |of| Value::from(seconds(m, arm, of) / seconds(base, arm, of));
            let key = |what| format!("{}_{what}_ratio_over_1_gib", arm.key());
            results[key("save")] = ratio(|way| way.save_s);
            results[key("restore")] = ratio(|way| way.restore_s);
        }
        results["limit"] = limit(m, pipeline);
        if let Some(&check_s) = m.check_s.get(&Arm::Auto) {
            results["restore_check_s"] = check_s.into();
        }
        results["pause_ms"] = (seconds(m, Arm::Auto, |way| way.pause_s) * 1e3).into();
    }
    let over: Vec<f64> = all.iter().flat_map(over_fastest).collect();
    insert(&mut results, "save_over_qemus_fastest", &over);
    if let Some(base) = base {
        let pauses = sorted(base.live.iter().map(|saved| saved.pause_ms));
        results["pause_ms_live"] = median(&pauses).into();
        results["pauses_ms_live"] = pauses.into();
    }
    results
}

/// Estimates, from measured speeds of this host, the best results that saves could reach. `drop_s`
/// and its reduction: for a save by `--keep none`, if the guest dropped its cache as fast as this
/// host drops its own. `compare_s` and its reduction: for a save by `--keep hot` that only reads,
/// once, the VM's memory and the files with which the memory is compared.
fn limit(m: &Measured, pipeline: &Value) -> Value {
    let qemu = seconds(m, Arm::Qemu, |way| way.save_s);
    let dropped = m.saved.get(&Arm::None).map(|saved| saved.steps.drop_ms);
    let dropped = dropped.unwrap_or(f64::NAN);
    let none = seconds(m, Arm::None, |way| way.save_s) - dropped / 1e3 + m.host_drop_s();
    let speed = |key: &str| number(&pipeline[key]["median"]) * 1e6;
    let bytes = |of: fn(&Manifest) -> u64| {
        let pages = m.saved.get(&Arm::Hot).map_or(0, of);
        (pages * PAGE_SIZE) as f64
    };
    let read = bytes(|saved| saved.counts.saved_pages) / speed("read_all_mb_per_s");
    let referred = bytes(referred_pages);
    let compare_s = read + referred / speed("file_all_mb_per_s");
    json!({
        "drop_s": m.host_drop_s(),
        "drop_save_reduction_percent": reduction(none, qemu),
        "compare_s": compare_s,
        "compare_save_reduction_percent": reduction(compare_s, qemu),
    })
}

/// Returns the number of pages that a snapshot refers to in files.
fn referred_pages(saved: &Manifest) -> u64 {
    saved.references.as_ref().map_or(0, |r| r.pages)
}

fn study_disk_results(m: &Measured) -> Value {
    let mut results = json!({
        "memory_mib_study_disk": m.case.memory.0 >> 20,
        "memory_errors_study_disk": m.wrong,
        "memory_checks_study_disk": m.checks,
    });
    let over = ("save_over_qemus_fastest", over_fastest(m));
    for (key, values) in reductions(m).into_iter().chain([over]) {
        insert(&mut results, &format!("{key}_study_disk"), &values);
    }
    results
}

fn sample(m: &Measured) -> Value {
    let ways = m.ways.keys().map(|&arm| {
        let (save, pause) = (rounds(m, arm, |w| w.save_s), rounds(m, arm, |w| w.pause_s));
        let (restore, bytes) = (
            rounds(m, arm, |w| w.restore_s),
            rounds(m, arm, |w| w.bytes as f64),
        );
        let way = json!({
            "save_s": median(&save), "restore_s": median(&restore), "bytes": median(&bytes),
            "rounds": { "save_s": save, "pause_s": pause, "restore_s": restore, "bytes": bytes },
        });
        (arm.key().to_owned(), way)
    });
    let saved = m.saved.iter().map(|(arm, saved)| {
        let said = json!({
            "keep": saved.keep, "keep_reason": saved.keep_reason, "pages": saved.counts, "pages_by_reference": referred_pages(saved),
            "free_kept": saved.free_kept, "steps": saved.steps, "check_s": m.check_s.get(arm),
        });
        (arm.key().to_owned(), said)
    });
    let percents = reductions(m).into_iter();
    let percents = percents.map(|(key, percents)| (key.to_owned(), percents.into()));
    json!({
        "memory_mib": m.case.memory.0 >> 20,
        "used_mib": m.case.used_mib,
        "study_disk": m.case.is_study_disk,
        "cached_mib": m.cached_kib >> 10,
        "host_drop_us_a_page": m.host_drop_us,
        "ways": ways.collect::<Map<_, _>>(),
        "saved": saved.collect::<Map<_, _>>(),
        "live": m.live.iter().map(|saved| json!({
            "pause_ms": saved.pause_ms, "save_ms": saved.save_ms, "kept_pages": saved.kept_pages, "steps": saved.steps,
        })).collect::<Vec<_>>(),
        "reductions": percents.collect::<Map<_, _>>(),
    })
}

fn in_short(m: &Measured) -> String {
    let Case {
        memory, used_mib, ..
    } = m.case;
    let cached = m.cached_kib >> 10;
    let place = if m.case.is_study_disk {
        ", on the study's disk"
    } else {
        ""
    };
    let wrong = if m.wrong > 0 { "; MEMORY DIFFERS" } else { "" };
    let mut lines = vec![format!(
        "VM of {memory}, {used_mib} MiB used, {cached} MiB cached{place}{wrong}"
    )];
    let list = |values: Vec<f64>, digits: usize| {
        let words = values.iter().map(|value| format!("{value:.digits$}"));
        words.collect::<Vec<_>>().join(" ")
    };
    for (&arm, ways) in &m.ways {
        let save = list(rounds(m, arm, |way| way.save_s), 2);
        let restore = list(rounds(m, arm, |way| way.restore_s), 2);
        let size = ByteSize(ways.last().map_or(0, |way| way.bytes));
        let way = arm.key();
        let times = format!("saved in {save} s, restored in {restore} s");
        lines.push(format!("  {way:12} {times}, {size}"));
        if let Some(saved) = m.saved.get(&arm) {
            let s = &saved.steps;
            lines.push(format!(
                "  {:12}   checked in {:.2} s; drop {:.0} ms, list {:.0}, devices {:.0}, RAM {:.0}, disks {:.0}; by reference {}; {}",
                "",
                m.check_s.get(&arm).unwrap_or(&f64::NAN),
                s.drop_ms,
                s.list_ms,
                s.devices_ms,
                s.ram_ms,
                s.disks_ms,
                ByteSize(referred_pages(saved) * PAGE_SIZE),
                saved.keep_reason.as_deref().unwrap_or("as asked"),
            ));
        }
    }
    if !m.live.is_empty() {
        let pauses = m.live.iter().map(|saved| saved.pause_ms).collect();
        let pauses = list(pauses, 0);
        lines.push(format!("  {:12} stood still for {pauses} ms", "live"));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn if_a_save_takes_a_tenth_of_the_time_a_reduction_of_90_percent_is_reported() {
        assert!((reduction(1.0, 10.0) - 90.0).abs() < 1e-9);
        assert!((reduction(3.0, 2.0) + 50.0).abs() < 1e-9);
    }

    #[test]
    fn the_charts_of_the_snapshot_benchmark_compare_qemu_with_memfold() {
        let way = json!({ "save_s": 9.0, "restore_s": 9.0, "bytes": 1_000_000 });
        let ways = json!({ "qemu": way, "qemu_stream": way, "qemu_savevm": way, "auto": way });
        let sample = |memory| json!({ "memory_mib": memory, "used_mib": 200, "study_disk": false, "ways": ways });
        let drawn = figures(&json!({ "samples": [sample(1024), sample(2048)] }));
        assert_eq!(drawn.len(), 2);
        for (_, svg) in drawn {
            assert!(svg.contains("QEMU, mapped-ram: ") && svg.contains("memfold: "));
        }
    }
}

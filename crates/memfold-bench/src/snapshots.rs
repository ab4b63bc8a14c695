//! Study E: time and size of saving and restoring a VM without its soft state (its page cache),
//! compared with QEMU's own ways.
//!
//! A VM's programs use 200 MB; page cache of files of random bytes fills the rest of its memory.
//! Then the same VM is saved in each of these ways in turn, three rounds of each, and restored from
//! each:
//!
//! | way | what it does |
//! |---|---|
//! | `qemu` | VM stopped, `migrate file:` with mapped-ram and multifd (2 channels), VM goes on |
//! | `qemu_stream` | the same without either: the stream that would go to another host |
//! | `qemu_savevm` | `savevm`, into the disk's overlay; once, the last one |
//! | `auto` | `snapshot save`: memfold chooses between the next two, or saves all |
//! | `hot` | `--keep hot`: page cache is compared with the disk and saved by reference |
//! | `none` | `--keep none`: cache dropped, free pages listed, VM stopped, RAM image, VM goes on |
//! | `live` | `--keep none --live`, five times, while a program writes to memory: how long the VM stands still |
//!
//! `--arm study-disk` is the same with the first, second and fourth way on a disk of 70 MB/s, as
//! the study had ([`study_disk`]). The limits of this host's disk and memory are measured without a
//! VM ([`pipeline`](super::pipeline)). The throughput of restored VMs is measured with another VM
//! ([`warmth`](super::warmth)).
//!
//! Save times are from the command to its end, dropping caches included; restore times are until a
//! new QEMU process is `running`. The VM's program computes a checksum of its memory, and again in
//! every restored VM. Before a restore, files stay in the host's page cache as the save left them,
//! and the daemon is the one that saved; `check_s` is what another daemon reads before its first
//! restore. Sizes are without disks. Percentages compare `auto` with `qemu` in the same round.

mod figures;
mod measure;
mod study_disk;

use anyhow::{Context as _, ensure};
use memfold_fold::EngineSettings;
use memfold_lab::Lab;
use memfold_snapshot::Manifest;
use memfold_units::{ByteSize, PAGE_SIZE};
use serde_json::{Map, Value, json};

use self::measure::{Arm, Case, Measured, measure};
use super::qemu_way::Way;
use super::record::{median, spread};
use super::study::Options;

pub use figures::figures;

/// What to measure.
#[derive(Clone, Debug)]
struct Scale {
    /// Memory sizes in MiB, with 200 MB used.
    sizes_mib: Vec<u64>,
    /// MiB used, at 2 GiB.
    used_mib: Vec<u64>,
    /// How often each way is measured.
    rounds: usize,
    /// How often the throughput behind a restore is measured.
    warmth_rounds: usize,
    /// RAM of the process that is saved without a VM, in MiB.
    pipeline_mib: u64,
}

/// Parts that can be measured alone.
const PIPELINE: &str = "pipeline";
const VMS: &str = "vms";
const WARMTH: &str = "warmth";

const PIPELINE_ROUNDS: usize = 5;

impl Scale {
    /// 1 and 2 GiB.
    fn quick() -> Self {
        Self {
            sizes_mib: vec![1024, 2048],
            used_mib: Vec::new(),
            rounds: 3,
            warmth_rounds: 1,
            pipeline_mib: 512,
        }
    }

    fn full() -> Self {
        Self {
            sizes_mib: vec![512, 1024, 2048, 4096, 8192],
            used_mib: vec![50, 800],
            rounds: 3,
            warmth_rounds: 3,
            pipeline_mib: 2048,
        }
    }

    fn cases(&self) -> Vec<Case> {
        let case = |memory_mib, used_mib| Case {
            memory: ByteSize::mib(memory_mib),
            used_mib,
            rounds: self.rounds,
            is_study_disk: false,
        };
        let sizes = self.sizes_mib.iter().map(|&size| case(size, 200));
        let used = self.used_mib.iter().map(|&used| case(2048, used));
        sizes.chain(used).collect()
    }

    /// The largest VM, on the study's disk.
    fn on_study_disk(&self) -> Case {
        Case {
            memory: ByteSize::mib(self.sizes_mib.iter().copied().max().unwrap_or(2048)),
            used_mib: 200,
            rounds: self.rounds,
            is_study_disk: true,
        }
    }
}

/// Runs the study: `results` and `samples`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    let mut scale = options.pick(Scale::quick(), Scale::full());
    if let Some(memory) = options.memory {
        (scale.sizes_mib, scale.used_mib) = (vec![memory.0 >> 20], Vec::new());
    }
    let parts = [PIPELINE, VMS, study_disk::ARM, WARMTH];
    for name in &options.arms {
        ensure!(
            parts.contains(&name.as_str()),
            "of 'snapshots' these parts can be had alone: {}",
            parts.join(", ")
        );
    }
    let is_wanted =
        |part: &str| options.arms.is_empty() || options.arms.iter().any(|name| name == part);
    let (mut results, mut samples) = (Map::new(), Vec::new());
    if study_disk::is_inside() {
        let measured = measure_case(scale.on_study_disk())?;
        let results = study_disk_results(&measured);
        return Ok(json!({ "samples": [sample(&measured)], "results": results }));
    }
    if is_wanted(PIPELINE) {
        let lab = Lab::new(EngineSettings::default())?;
        let size = ByteSize::mib(scale.pipeline_mib);
        let found = super::pipeline::run(size, PIPELINE_ROUNDS, lab.directory())
            .context("cannot measure the pipeline of a save without a VM")?;
        results.insert(PIPELINE.into(), found);
    }
    if is_wanted(VMS) {
        let all: Vec<Measured> = scale
            .cases()
            .into_iter()
            .map(measure_case)
            .collect::<Result<_, _>>()?;
        let found = vm_results(&all, results.get(PIPELINE));
        results.extend(found);
        samples.extend(all.iter().map(sample));
    }
    if is_wanted(study_disk::ARM) {
        let mut found = study_disk::measure(&scale.on_study_disk(), options)?;
        if let Value::Object(found) = found["results"].take() {
            results.extend(found);
        }
        if let Value::Array(found) = found["samples"].take() {
            samples.extend(found);
        }
    }
    if is_wanted(WARMTH) {
        results.extend(super::warmth::run(scale.warmth_rounds)?);
    }
    Ok(json!({ "samples": samples, "results": results }))
}

fn measure_case(case: Case) -> anyhow::Result<Measured> {
    let measured = measure(case)
        .with_context(|| format!("VM of {}, {} MiB used", case.memory, case.used_mib))?;
    eprintln!("{}", in_short(&measured));
    Ok(measured)
}

/// By how many percent `ours` is less.
fn reduction(ours: f64, theirs: f64) -> f64 {
    (1.0 - ours / theirs) * 100.0
}

/// A value of each round in which both ways were measured.
fn rounds(m: &Measured, (ours, theirs): (Arm, Arm), of: impl Fn(&Way, &Way) -> f64) -> Vec<f64> {
    let (Some(ours), Some(theirs)) = (m.ways.get(&ours), m.ways.get(&theirs)) else {
        return Vec::new();
    };
    ours.iter().zip(theirs).map(|(a, b)| of(a, b)).collect()
}

/// By how many percent memfold's default is less than mapped-ram, in each round.
fn reductions(m: &Measured) -> [(&'static str, Vec<f64>); 3] {
    let with =
        |of: fn(&Way) -> f64| rounds(m, (Arm::Auto, Arm::Qemu), |a, b| reduction(of(a), of(b)));
    [
        ("save_reduction_percent", with(|way| way.save_s)),
        ("restore_reduction_percent", with(|way| way.restore_s)),
        ("size_reduction_percent", with(|way| way.bytes as f64)),
    ]
}

/// Times of memfold's default over those of QEMU's fastest way in the same round.
fn over_fastest(m: &Measured) -> Vec<f64> {
    let of = |arm| m.ways.get(&arm).cloned().unwrap_or_default();
    let (qemu, stream) = (of(Arm::Qemu), of(Arm::QemuStream));
    let fastest = qemu
        .iter()
        .zip(&stream)
        .map(|(a, b)| a.save_s.min(b.save_s));
    let ours = of(Arm::Auto);
    ours.iter()
        .zip(fastest)
        .map(|(a, b)| a.save_s / b)
        .collect()
}

fn seconds(m: &Measured, arm: Arm, of: fn(&Way) -> f64) -> f64 {
    let ways = m.ways.get(&arm).map_or(&[][..], Vec::as_slice);
    median(&ways.iter().map(of).collect::<Vec<_>>())
}

/// The medians of each key, and as `KEY_rounds` their spread.
fn insert(results: &mut Map<String, Value>, key: &str, values: &[f64]) {
    results.insert(key.into(), median(values).into());
    results.insert(format!("{key}_rounds"), spread(values));
}

/// The headline is that of the largest VM.
fn vm_results(all: &[Measured], pipeline: Option<&Value>) -> Map<String, Value> {
    let mut results = Map::new();
    let sized = |m: &&Measured| m.case.used_mib == 200;
    let largest = all.iter().filter(sized).max_by_key(|m| m.case.memory.0);
    let of_1_gib = |m: &&Measured| sized(m) && m.case.memory == ByteSize::mib(1024);
    let base = all.iter().find(of_1_gib);
    if let Some(m) = largest {
        results.insert("memory_mib".into(), (m.case.memory.0 >> 20).into());
        for (key, percents) in reductions(m) {
            insert(&mut results, key, &percents);
        }
        if let Some(base) = base {
            for arm in [Arm::Auto, Arm::Hot] {
                let ratio = |of| seconds(m, arm, of) / seconds(base, arm, of);
                let key = |what| format!("{}_{what}_ratio_over_1_gib", arm.key());
                results.insert(key("save"), ratio(|way| way.save_s).into());
                results.insert(key("restore"), ratio(|way| way.restore_s).into());
            }
        }
        results.insert("limit".into(), limit(m, pipeline));
        if let Some(&check_s) = m.check_s.get(&Arm::Auto) {
            results.insert("restore_check_s".into(), check_s.into());
        }
        let pause = seconds(m, Arm::Auto, |way| way.pause_s) * 1e3;
        results.insert("pause_ms".into(), pause.into());
    }
    let over: Vec<f64> = all.iter().flat_map(over_fastest).collect();
    insert(&mut results, "save_over_qemus_fastest", &over);
    if let Some(base) = base {
        let mut pauses: Vec<f64> = base.live.iter().map(|saved| saved.pause_ms).collect();
        pauses.sort_by(f64::total_cmp);
        results.insert("pause_ms_live".into(), median(&pauses).into());
        results.insert("pauses_ms_live".into(), pauses.into());
    }
    let wrong: u64 = all.iter().map(|m| m.wrong).sum();
    let checks: u64 = all.iter().map(|m| m.checks).sum();
    results.insert("memory_errors".into(), wrong.into());
    results.insert("memory_checks".into(), checks.into());
    results
}

/// How far from the target this is, by measured speeds of this host. `drop_s` and its reduction:
/// the save by `--keep none`, if its guest had dropped its cache as fast as this host drops its
/// own. `compare_s` and its reduction: a save by `--keep hot` that does nothing but read the VM's
/// memory, and the files that it is compared with, once.
fn limit(m: &Measured, pipeline: Option<&Value>) -> Value {
    let qemu = seconds(m, Arm::Qemu, |way| way.save_s);
    let dropped = m
        .saved
        .get(&Arm::None)
        .map_or(f64::NAN, |saved| saved.steps.drop_ms);
    let none = seconds(m, Arm::None, |way| way.save_s) - dropped / 1e3 + m.host_drop_s();
    let speed = |key: &str| {
        let speed = pipeline.and_then(|found| found[key]["median"].as_f64());
        speed.unwrap_or(f64::NAN) * 1e6
    };
    let pages = |of: fn(&Manifest) -> u64| {
        let pages = m.saved.get(&Arm::Hot).map_or(0, of);
        (pages * PAGE_SIZE) as f64
    };
    let read = pages(|saved| saved.counts.saved_pages) / speed("read_all_mb_per_s");
    let referred = pages(|saved| saved.references.as_ref().map_or(0, |r| r.pages));
    let compare_s = read + referred / speed("file_all_mb_per_s");
    json!({
        "drop_s": m.host_drop_s(),
        "drop_save_reduction_percent": reduction(none, qemu),
        "compare_s": compare_s,
        "compare_save_reduction_percent": reduction(compare_s, qemu),
    })
}

fn study_disk_results(m: &Measured) -> Map<String, Value> {
    let mut results = Map::new();
    for (key, percents) in reductions(m) {
        insert(&mut results, &format!("{key}_study_disk"), &percents);
    }
    insert(
        &mut results,
        "save_over_qemus_fastest_study_disk",
        &over_fastest(m),
    );
    results.insert(
        "memory_mib_study_disk".into(),
        (m.case.memory.0 >> 20).into(),
    );
    results.insert("memory_errors_study_disk".into(), m.wrong.into());
    results.insert("memory_checks_study_disk".into(), m.checks.into());
    results
}

fn sample(m: &Measured) -> Value {
    let ways: Map<String, Value> = m
        .ways
        .iter()
        .map(|(arm, ways)| {
            let list = |of: fn(&Way) -> f64| ways.iter().map(of).collect::<Vec<_>>();
            let (save, pause) = (list(|way| way.save_s), list(|way| way.pause_s));
            let (restore, bytes) = (list(|way| way.restore_s), list(|way| way.bytes as f64));
            let way = json!({
                "save_s": median(&save), "restore_s": median(&restore), "bytes": median(&bytes),
                "rounds": { "save_s": save, "pause_s": pause, "restore_s": restore, "bytes": bytes },
            });
            (arm.key().to_owned(), way)
        })
        .collect();
    let saved: Map<String, Value> = m
        .saved
        .iter()
        .map(|(arm, saved)| {
            let said = json!({
                "keep": saved.keep, "keep_reason": saved.keep_reason, "pages": saved.counts,
                "pages_by_reference": saved.references.as_ref().map_or(0, |r| r.pages),
                "free_kept": saved.free_kept, "steps": saved.steps, "check_s": m.check_s.get(arm),
            });
            (arm.key().to_owned(), said)
        })
        .collect();
    let percents: Map<String, Value> = reductions(m)
        .into_iter()
        .map(|(key, percents)| (key.to_owned(), percents.into()))
        .collect();
    json!({
        "memory_mib": m.case.memory.0 >> 20,
        "used_mib": m.case.used_mib,
        "study_disk": m.case.is_study_disk,
        "cached_mib": m.cached_kib >> 10,
        "host_drop_us_a_page": m.host_drop_us,
        "ways": ways,
        "saved": saved,
        "live": m.live.iter().map(|saved| json!({
            "pause_ms": saved.pause_ms, "save_ms": saved.save_ms, "kept_pages": saved.kept_pages, "steps": saved.steps,
        })).collect::<Vec<_>>(),
        "reductions": percents,
    })
}

fn in_short(m: &Measured) -> String {
    let mut lines = vec![format!(
        "VM of {}, {} MiB used, {} MiB cached{}{}",
        m.case.memory,
        m.case.used_mib,
        m.cached_kib >> 10,
        if m.case.is_study_disk {
            ", on the study's disk"
        } else {
            ""
        },
        if m.wrong > 0 { "; MEMORY DIFFERS" } else { "" },
    )];
    for (arm, ways) in &m.ways {
        let of = |get: fn(&Way) -> f64| {
            let values: Vec<String> = ways.iter().map(|way| format!("{:.2}", get(way))).collect();
            values.join(" ")
        };
        let bytes = ways.last().map_or(0, |way| way.bytes);
        lines.push(format!(
            "  {:12} saved in {} s, restored in {} s, {}",
            arm.key(),
            of(|way| way.save_s),
            of(|way| way.restore_s),
            ByteSize(bytes)
        ));
        if let Some(saved) = m.saved.get(arm) {
            let s = &saved.steps;
            let referred = saved.references.as_ref().map_or(0, |r| r.pages);
            lines.push(format!(
                "  {:12}   checked in {:.2} s; drop {:.0} ms, list {:.0}, devices {:.0}, RAM {:.0}, disks {:.0}; by reference {}; {}",
                "",
                m.check_s.get(arm).unwrap_or(&f64::NAN),
                s.drop_ms,
                s.list_ms,
                s.devices_ms,
                s.ram_ms,
                s.disks_ms,
                ByteSize(referred * PAGE_SIZE),
                saved.keep_reason.as_deref().unwrap_or("as asked"),
            ));
        }
    }
    let live: Vec<String> = m
        .live
        .iter()
        .map(|saved| format!("{:.0}", saved.pause_ms))
        .collect();
    if !live.is_empty() {
        lines.push(format!(
            "  {:12} stood still for {} ms",
            "live",
            live.join(", ")
        ));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drop_to_a_tenth_of_the_time_is_reported_as_a_90_percent_reduction() {
        assert!((reduction(1.0, 10.0) - 90.0).abs() < 1e-9);
        assert!((reduction(3.0, 2.0) + 50.0).abs() < 1e-9);
    }

    #[test]
    fn figures_compare_snapshots_by_qemu_with_snapshots_by_memfold() {
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

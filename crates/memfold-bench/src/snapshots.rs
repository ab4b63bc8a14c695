//! Study E: time and size of saving and restoring a VM without its soft state (its page cache),
//! compared with QEMU's own ways.
//!
//! A VM's programs use 200 MB; page cache, read from a disk of random bytes, fills the rest of its
//! memory. Then the same VM is saved in each of these ways in turn, and restored from each:
//!
//! | way | what it does |
//! |---|---|
//! | `qemu` | VM stopped, `migrate file:` with mapped-ram and multifd (2 channels), VM goes on |
//! | `qemu_stream` | the same without either: the stream that would go to another host |
//! | `qemu_savevm` | `savevm`, into the disk's overlay; the last one, its cache full again |
//! | `memfold` | `snapshot save --keep none`: cache dropped, free pages listed, VM stopped, RAM image, VM goes on |
//! | `live` | the same with `--live`, five times, while a program writes to memory: how long the VM stands still |
//!
//! The limits of this host's disk and memory are measured without a VM
//! ([`pipeline`](super::pipeline)). The throughput of restored VMs is measured with another VM
//! ([`warmth`](super::warmth)).
//!
//! Save times are from the command to its end, dropping caches included; restore times are until a
//! new QEMU process is `running`. The VM's program computes a checksum of its memory, and again in
//! every restored VM. Before a restore, files stay in the host's page cache as the save left them.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use memfold_api::{RestoreRequest, SaveRequest};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_snapshot::Manifest;
use memfold_units::{ByteSize, PAGE_SIZE};
use memfold_vm::{Aio, CacheMode, DiskSpec};
use rustix::fs::{Advice, fadvise};
use serde_json::{Value, json};

use super::figure::{self, Axis, Figure, Series};
use super::qemu_way::{self, Form, Way};
use super::random::random;
use super::record::median;
use super::study::Options;

const BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// Time for one thing that a guest does.
const LIMIT: Duration = Duration::from_secs(900);

const VM: &str = "saved";

/// Holds `USED` MiB and writes their checksum to `/run/held`, again at SIGUSR1.
const HOLD: &str = r#"cat > /run/hold.py <<'END'
import hashlib, os, signal
held = bytearray(os.urandom(1 << 20) * USED)
for page in range(0, len(held), 4096):
    held[page:page + 8] = (page + 1).to_bytes(8, "little")
def tell(*_):
    open("/run/held.new", "w").write(hashlib.sha256(held).hexdigest())
    os.rename("/run/held.new", "/run/held")
signal.signal(signal.SIGUSR1, tell)
tell()
while True:
    signal.pause()
END
systemd-run -q --unit=hold python3 /run/hold.py
while [ ! -s /run/held ]; do sleep 0.2; done; cat /run/held"#;

/// Reads all of the second disk; prints the KiB of cache that the guest has then. A disk that
/// nobody has open is not cached.
const FILL: &str = "systemd-run -q --unit=open sh -c 'exec sleep infinity < /dev/vdb'; cat /dev/vdb > /dev/null; sync; awk '/^(Buffers|Cached):/ { sum += $2 } END { print sum }' /proc/meminfo";

/// The same again: the file is open.
const FILL_AGAIN: &str = "cat /dev/vdb > /dev/null; sync";

/// Writes to memory without end.
const WRITE: &str = "systemd-run -q --unit=write sh -c 'while :; do dd if=/dev/urandom of=/dev/shm/written bs=1M count=32 2> /dev/null; done'; while [ ! -s /dev/shm/written ]; do sleep 0.1; done";

/// The snapshot that is saved live, and how often.
const LIVE: &str = "live";
const LIVE_SAVES: u32 = 5;

const CHECK: &str = "rm -f /run/held; systemctl kill -s USR1 hold; while [ ! -s /run/held ]; do sleep 0.1; done; cat /run/held";

/// One VM to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    memory: ByteSize,
    /// MiB that a program holds.
    used_mib: u64,
}

/// What to measure.
#[derive(Clone, Debug)]
struct Scale {
    /// Memory sizes in MiB, with 200 MB used.
    sizes_mib: Vec<u64>,
    /// MiB used, at 2 GiB.
    used_mib: Vec<u64>,
    /// How often the throughput behind a restore is measured.
    rounds: usize,
    /// RAM of the process that is saved without a VM, in MiB.
    pipeline_mib: u64,
}

/// What can be measured alone, and how often it is measured.
const PIPELINE: &str = "pipeline";
const PIPELINE_ROUNDS: usize = 5;

impl Scale {
    /// 1 and 2 GiB.
    fn quick() -> Self {
        Self {
            sizes_mib: vec![1024, 2048],
            used_mib: Vec::new(),
            rounds: 1,
            pipeline_mib: 512,
        }
    }

    fn full() -> Self {
        Self {
            sizes_mib: vec![512, 1024, 2048, 4096, 8192],
            used_mib: vec![50, 800],
            rounds: 3,
            pipeline_mib: 2048,
        }
    }

    fn cases(&self) -> Vec<Case> {
        let case = |memory_mib, used_mib| Case {
            memory: ByteSize::mib(memory_mib),
            used_mib,
        };
        let sizes = self.sizes_mib.iter().map(|&size| case(size, 200));
        let used = self.used_mib.iter().map(|&used| case(2048, used));
        sizes.chain(used).collect()
    }
}

struct Measured {
    case: Case,
    cached_kib: u64,
    /// What it takes this host itself to drop a page of its cache, in microseconds.
    host_drop_us: f64,
    qemu: Way,
    stream: Way,
    savevm: Way,
    ours: Way,
    manifest: Manifest,
    /// Live saves of the same VM, while a program of it writes to memory.
    live: Vec<Manifest>,
    /// Restored VMs whose program's memory was not what it had been.
    wrong: u64,
}

impl Measured {
    /// How long this host would take to drop what the guest had cached, in seconds.
    fn host_drop_s(&self) -> f64 {
        self.host_drop_us * (self.cached_kib * 1024 / PAGE_SIZE) as f64 / 1e6
    }
}

/// Runs the study: `results` and `samples`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    let scale = options.pick(Scale::quick(), Scale::full());
    let pipeline_alone = options.is_only("snapshots", PIPELINE)?;
    let size = ByteSize::mib(scale.pipeline_mib);
    let lab = Lab::new(EngineSettings::default())?;
    let pipeline = super::pipeline::run(size, PIPELINE_ROUNDS, lab.directory())
        .context("the pipeline without a VM")?;
    drop(lab);
    if pipeline_alone {
        return Ok(json!({ "results": { PIPELINE: pipeline } }));
    }
    let mut all = Vec::new();
    for case in scale.cases() {
        let measured = measure(case)
            .with_context(|| format!("VM of {}, {} MiB used", case.memory, case.used_mib))?;
        eprintln!("{}", in_short(&measured));
        all.push(measured);
    }
    let warmth = super::warmth::run(scale.rounds)?;
    let mut results = results(&all);
    results.extend(warmth);
    results.insert(PIPELINE.into(), pipeline);
    Ok(json!({
        "samples": all.iter().map(sample).collect::<Vec<_>>(),
        "results": results,
    }))
}

fn measure(case: Case) -> anyhow::Result<Measured> {
    let lab = Lab::new(EngineSettings::default())?;
    // It goes with the laboratory, also when that is interrupted.
    let place = lab.directory();
    let data = place.join("data.img");
    write_random(&data, case.memory).with_context(|| format!("cannot fill {}", data.display()))?;
    let host_drop_us = drop_on_host(&data).context("the host's own page cache")?;
    let mut spec = Lab::spec(VM, "trixie-a", case.memory, DiskMode::Buffered)?;
    let mut disk = DiskSpec::new(&data);
    // The host has no use for a second copy of it.
    (disk.read_only, disk.cache, disk.aio) = (true, CacheMode::None, Aio::IoUring);
    spec.disks.push(disk);
    lab.start(spec.clone())?;
    lab.wait_ready(VM, BOOT_TIMEOUT)?;
    let held = lab.exec(VM, &HOLD.replace("USED", &case.used_mib.to_string()), LIMIT)?;
    let cached = lab.exec(VM, FILL, LIMIT)?;
    let cached_kib = cached.trim().parse().context("the guest's cache")?;

    let image = place.join("qemu.img");
    let disk = place.join("disk.qcow2");
    let (stream_image, savevm_disk) = (place.join("stream.img"), place.join("savevm.qcow2"));
    let mut qemu = qemu_way::save(&lab, VM, Form::MappedRam, &image, &disk)?;
    let mut stream = qemu_way::save(&lab, VM, Form::Stream, &stream_image, &disk)?;
    let began = Instant::now();
    let manifest = lab.daemon().snapshots().save(&SaveRequest::new(VM, VM))?;
    let save_s = began.elapsed().as_secs_f64();
    let shelf = lab.daemon().snapshots().list()?;
    let bytes = shelf.first().context("no snapshot")?.disk_bytes;
    let mut wrong = u64::from(lab.exec(VM, CHECK, LIMIT)? != held);
    let live = save_live(&lab)?;
    lab.exec(VM, FILL_AGAIN, LIMIT)?;
    let mut savevm = qemu_way::save_inside(&lab, VM, &savevm_disk)?;
    lab.stop(VM)?;
    lab.daemon()
        .snapshots()
        .restore(LIVE, &RestoreRequest::new("live"))?;
    wrong += u64::from(check(&lab, "live")? != held);

    let began = Instant::now();
    lab.daemon()
        .snapshots()
        .restore(VM, &RestoreRequest::new("restored"))?;
    let ours = Way {
        save_s,
        pause_s: manifest.pause_ms / 1000.0,
        restore_s: began.elapsed().as_secs_f64(),
        bytes,
    };
    wrong += u64::from(check(&lab, "restored")? != held);
    spec.name = "plain".into();
    for (way, form, image) in [
        (&mut qemu, Form::MappedRam, &image),
        (&mut stream, Form::Stream, &stream_image),
    ] {
        way.restore_s = qemu_way::restore(&lab, spec.clone(), &manifest, form, image, &disk)?;
        wrong += u64::from(check(&lab, "plain")? != held);
    }
    savevm.restore_s = qemu_way::restore_inside(&lab, spec, &savevm_disk)?;
    wrong += u64::from(check(&lab, "plain")? != held);
    Ok(Measured {
        case,
        cached_kib,
        host_drop_us,
        qemu,
        stream,
        savevm,
        ours,
        manifest,
        live,
        wrong,
    })
}

/// Saves the VM while it runs and writes, the first time with its cache full again; the last
/// snapshot stays, as [`LIVE`].
fn save_live(lab: &Lab) -> anyhow::Result<Vec<Manifest>> {
    lab.exec(VM, FILL_AGAIN, LIMIT)?;
    lab.exec(VM, WRITE, LIMIT)?;
    let mut saved = Vec::new();
    for round in 1..=LIVE_SAVES {
        let name = if round == LIVE_SAVES {
            LIVE.to_owned()
        } else {
            format!("{LIVE}-{round}")
        };
        let request = SaveRequest {
            live: true,
            ..SaveRequest::new(VM, name)
        };
        saved.push(lab.daemon().snapshots().save(&request)?);
    }
    lab.exec(VM, "systemctl stop write", LIMIT)?;
    Ok(saved)
}

fn check(lab: &Lab, name: &str) -> anyhow::Result<String> {
    lab.daemon().vms().wait_agent(name, BOOT_TIMEOUT)?;
    let held = lab.exec(name, CHECK, LIMIT)?;
    lab.stop(name)?;
    Ok(held)
}

/// Bytes that no page repeats and nothing compresses.
fn write_random(path: &Path, size: ByteSize) -> std::io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    random(size.0 / 8, |word| file.write_all(&word.to_ne_bytes()))?;
    file.flush()?;
    file.get_ref().sync_all()
}

/// How long this host takes to drop a page of its cache, in microseconds: what a guest's kernel
/// does too, when nothing is emulated. Of a file that nobody maps; single pages, as a guest's Linux
/// 6.12 caches ext4 and disks.
fn drop_on_host(path: &Path) -> std::io::Result<f64> {
    let file = File::open(path)?;
    let length = file.metadata()?.len().min(1 << 30);
    let drop_all = || fadvise(&file, 0, None, Advice::DontNeed);
    drop_all()?;
    // Without reading ahead, which would cache larger pieces.
    fadvise(&file, 0, None, Advice::Random)?;
    let mut bytes = vec![0; 1 << 20];
    for at in (0..length).step_by(bytes.len()) {
        file.read_at(&mut bytes, at)?;
    }
    let began = Instant::now();
    drop_all()?;
    Ok(began.elapsed().as_secs_f64() * 1e6 / (length / PAGE_SIZE) as f64)
}

/// By how many percent `ours` is less.
fn reduction(ours: f64, theirs: f64) -> f64 {
    (1.0 - ours / theirs) * 100.0
}

fn reductions(m: &Measured) -> [(&'static str, f64); 3] {
    [
        (
            "save_reduction_percent",
            reduction(m.ours.save_s, m.qemu.save_s),
        ),
        (
            "restore_reduction_percent",
            reduction(m.ours.restore_s, m.qemu.restore_s),
        ),
        (
            "size_reduction_percent",
            reduction(m.ours.bytes as f64, m.qemu.bytes as f64),
        ),
    ]
}

/// The headline is that of the largest VM.
fn results(all: &[Measured]) -> serde_json::Map<String, Value> {
    let mut results = serde_json::Map::new();
    let sized = |m: &&Measured| m.case.used_mib == 200;
    let largest = all.iter().filter(sized).max_by_key(|m| m.case.memory.0);
    let base = all
        .iter()
        .find(|m| sized(m) && m.case.memory == ByteSize::mib(1024));
    if let Some(m) = largest {
        results.insert("memory_mib".into(), (m.case.memory.0 >> 20).into());
        for (key, percent) in reductions(m) {
            results.insert(key.into(), percent.into());
        }
        if let Some(base) = base {
            let mut ratio = |key: &str, of: fn(&Way) -> f64| {
                results.insert(key.into(), (of(&m.ours) / of(&base.ours)).into());
            };
            ratio("save_ratio_over_1_gib", |way| way.save_s);
            ratio("restore_ratio_over_1_gib", |way| way.restore_s);
        }
        // How far from that this is: the same save, if its guest had dropped its cache as fast as
        // this host drops its own.
        let ours = m.ours.save_s - m.manifest.steps.drop_ms / 1e3 + m.host_drop_s();
        let percent = reduction(ours, m.qemu.save_s);
        let limit = json!({ "drop_s": m.host_drop_s(), "save_reduction_percent": percent });
        results.insert("limit".into(), limit);
        results.insert("pause_ms".into(), m.manifest.pause_ms.into());
    }
    if let Some(base) = base {
        let mut pauses: Vec<f64> = base.live.iter().map(|saved| saved.pause_ms).collect();
        pauses.sort_by(f64::total_cmp);
        results.insert("pause_ms_live".into(), median(&pauses).into());
        results.insert("pauses_ms_live".into(), pauses.into());
    }
    let wrong: u64 = all.iter().map(|m| m.wrong).sum();
    results.insert("memory_errors".into(), wrong.into());
    results.insert("memory_checks".into(), (all.len() * 6).into());
    results
}

fn sample(m: &Measured) -> Value {
    let way = |way: &Way| {
        json!({
            "save_s": way.save_s, "pause_s": way.pause_s, "restore_s": way.restore_s, "bytes": way.bytes,
        })
    };
    json!({
        "memory_mib": m.case.memory.0 >> 20,
        "used_mib": m.case.used_mib,
        "cached_mib": m.cached_kib >> 10,
        "host_drop_us_a_page": m.host_drop_us,
        "qemu": way(&m.qemu),
        "qemu_stream": way(&m.stream),
        "qemu_savevm": way(&m.savevm),
        "memfold": way(&m.ours),
        "pages": m.manifest.counts,
        "free_kept": m.manifest.free_kept,
        "steps": m.manifest.steps,
        "live": m.live.iter().map(|saved| json!({
            "pause_ms": saved.pause_ms, "save_ms": saved.save_ms, "kept_pages": saved.kept_pages, "steps": saved.steps,
        })).collect::<Vec<_>>(),
        "reductions": reductions(m).into_iter().collect::<std::collections::BTreeMap<_, _>>(),
    })
}

fn in_short(m: &Measured) -> String {
    let way = |way: &Way| {
        format!(
            "{:.2} s to save, {:.2} s to restore, {}",
            way.save_s,
            way.restore_s,
            ByteSize(way.bytes)
        )
    };
    let counts = &m.manifest.counts;
    let s = &m.manifest.steps;
    let live: Vec<String> = m
        .live
        .iter()
        .map(|saved| format!("{:.0}", saved.pause_ms))
        .collect();
    let steps = format!(
        "drop {:.0} ms, where this host itself would take {:.0}, list {:.0}, devices {:.0}, RAM {:.0}, disks {:.0}",
        s.drop_ms,
        m.host_drop_s() * 1e3,
        s.list_ms,
        s.devices_ms,
        s.ram_ms,
        s.disks_ms
    );
    format!(
        "VM of {}, {} MiB used, {} MiB cached\n  qemu     {}\n  stream   {}\n  savevm   {}\n  memfold  {} (saved {}, free {}; {}){}\n  live     stood still for {} ms",
        m.case.memory,
        m.case.used_mib,
        m.cached_kib >> 10,
        way(&m.qemu),
        way(&m.stream),
        way(&m.savevm),
        way(&m.ours),
        ByteSize(counts.saved_pages * PAGE_SIZE),
        ByteSize(counts.free_pages * PAGE_SIZE),
        steps,
        if m.wrong > 0 { "; MEMORY DIFFERS" } else { "" },
        live.join(", "),
    )
}

/// The study's figures, by name.
#[must_use]
pub fn figures(study: &Value) -> Vec<Figure> {
    let empty = Vec::new();
    let samples = study["samples"].as_array().unwrap_or(&empty);
    let series = |x: &str, way: &str, key: &str, step: &str, divisor: f64| {
        let of_sweep = samples.iter().filter(|s| match x {
            "memory_mib" => s["used_mib"] == 200,
            _ => s["memory_mib"] == 2048,
        });
        let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
        let mut points: Vec<(f64, f64)> = of_sweep
            .map(|s| (number(&s[x]), number(&s[way][key]) / divisor))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let who = match way {
            "qemu" => "QEMU, mapped-ram",
            "qemu_stream" => "QEMU, stream",
            "qemu_savevm" => "QEMU, savevm",
            _ => "memfold",
        };
        Series {
            name: format!("{who}: {step}"),
            points,
            dashed: way != "memfold",
        }
    };
    let times = |x| {
        vec![
            series(x, "qemu", "save_s", "save", 1.0),
            series(x, "qemu", "restore_s", "restore", 1.0),
            series(x, "qemu_stream", "save_s", "save", 1.0),
            series(x, "qemu_savevm", "save_s", "save", 1.0),
            series(x, "memfold", "save_s", "save", 1.0),
            series(x, "memfold", "restore_s", "restore", 1.0),
        ]
    };
    let sizes = |x| {
        let mib = f64::from(1 << 20);
        vec![
            series(x, "qemu", "bytes", "size", mib),
            series(x, "memfold", "bytes", "size", mib),
        ]
    };
    let memory = Axis::log("MiB of memory, 200 used by programs");
    let used = Axis::linear("MiB used by programs, of 2048");
    let seconds = Axis::log("seconds");
    let mib = Axis::log("MiB");
    let mut figures = vec![
        (
            "snapshots-time",
            figure::lines(
                "Saving and restoring by memory size",
                &memory,
                &seconds,
                &times("memory_mib"),
            ),
        ),
        (
            "snapshots-size",
            figure::lines(
                "Size of a snapshot by memory size",
                &memory,
                &mib,
                &sizes("memory_mib"),
            ),
        ),
    ];
    if samples.iter().any(|s| s["used_mib"] != 200) {
        figures.push((
            "snapshots-used-time",
            figure::lines(
                "Saving and restoring by used memory",
                &used,
                &seconds,
                &times("used_mib"),
            ),
        ));
        figures.push((
            "snapshots-used-size",
            figure::lines(
                "Size of a snapshot by used memory",
                &used,
                &mib,
                &sizes("used_mib"),
            ),
        ));
    }
    let named = figures.into_iter();
    named.map(|(name, svg)| (name.to_owned(), svg)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_of_the_time_is_a_reduction_by_ninety_percent() {
        assert!((reduction(1.0, 10.0) - 90.0).abs() < 1e-9);
        assert!((reduction(3.0, 2.0) + 50.0).abs() < 1e-9);
    }

    #[test]
    fn figures_show_both_ways() {
        let way = |save: f64| json!({ "save_s": save, "pause_s": save, "restore_s": save, "bytes": 1_000_000 });
        let sample = |memory| json!({ "memory_mib": memory, "used_mib": 200, "qemu": way(9.0), "qemu_stream": way(9.5), "qemu_savevm": way(9.9), "memfold": way(1.0) });
        let drawn = figures(&json!({ "samples": [sample(1024), sample(2048)] }));
        assert_eq!(drawn.len(), 2);
        for (_, svg) in drawn {
            assert!(svg.contains("QEMU, mapped-ram: ") && svg.contains("memfold: "));
        }
    }
}

//! The study `memfold bench fork`: measures how long a running VM stands still while it is forked,
//! how soon the fork runs, and how much the fork writes to disk and uses of memory.
//!
//! A Debian VM boots and is saved. A clone of it, the *parent*, is forked again and again, each
//! time after a program in it has written a number of MiB. Forks of forks are measured, too. For
//! comparison, memfold saves the parent with all pages, and QEMU saves it (`migrate file:` with
//! mapped-ram and multifd).
//!
//! | key | meaning |
//! |---|---|
//! | `dirty_N.pause_ms` | how long the parent stood still for the fork, after N MiB were written |
//! | `dirty_N.shares_ms` | from the request until the parent shared its memory, too (the fork started meanwhile) |
//! | `dirty_N.returns_ms` | from the request until the layer was complete: forks can be started |
//! | `dirty_N.child_runs_ms` | from the request until guest code of the fork has written a byte to its console |
//! | `dirty_N.changed_mib` | private memory of the parent's RAM just before the fork (`Anonymous` and `Swap` of its mappings in `smaps`) |
//! | `dirty_N.written_mib` | what the layer takes on disk |
//! | `dirty_N.written_over_changed` | the second over the first |
//! | `dirty_N.write_ms` | the least for `returns_ms`: the time to write as many bytes into a new file beside the layer |
//! | `dirty_N.pss_over_before` | PSS of parent and fork when the fork runs, over the parent's before; also without code that the emulator translated |
//! | `whole_save_s`, `qemu_save_s` | a save of all pages, and QEMU's own, with the VM stopped |
//! | `fan_out` | forks of one layer, one after the other: number that hold the parent's memory, and their start times |
//! | `depth_ratio` | time to restore the last generation, over that of the first, alternately |
//! | `streamed.over_local` | from the request until guest code of a VM runs whose snapshot is fetched meanwhile, over a link of 1 Gbit/s with 1 ms, over the same of a VM whose snapshot is here |
//! | `streamed.chunks_over_local` | the same if the store does not have the pages that VMs touch at once together |
//! | `streamed.link_over_local` | the part of it that the link alone needs for what was sent by then |
//! | `streamed.fetched_percent` | part of the snapshot that the store had sent by then |
//! | `streamed.complete_s` | from the request until the whole snapshot was here |

use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use memfold_api::{ForkRequest, KeepChoice, PullBody, PushBody, RestoreRequest, SaveRequest};
use memfold_fold::EngineSettings;
use memfold_ksm::ranges::{self, Mapping};
use memfold_lab::{DiskMode, HttpStore, Lab, wait_for};
use memfold_snapshot::{Renew, working_set};
use memfold_units::{ByteSize, PAGE_SIZE};
use serde_json::{Map, Value, json};

use crate::clones::{HOLD, percentile, sizes, start};
use crate::qemu_way::{self, Form};
use crate::record::{self, ratios, spread};
use crate::study::Options;

const BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// Time limit of one operation in a guest.
const LIMIT: Duration = Duration::from_secs(300);

/// Bytes a second of a link of 1 Gbit/s.
const GIGABIT: f64 = 125e6;

const TEMPLATE: &str = "template";
const PARENT: &str = "parent";

/// Tells the checksum of the program's memory anew.
const TELL: &str = "rm -f /run/held; systemctl kill -s USR1 hold; while [ ! -s /run/held ]; do sleep 0.1; done; cat /run/held";

/// What to measure.
pub struct Scale {
    /// Guest image of the VM.
    pub image: String,
    pub memory: ByteSize,
    /// MiB written before a fork.
    pub dirty_mib: Vec<u64>,
    pub rounds: usize,
    pub fan_out: usize,
    /// Number of generations of forks of forks. With 0, neither these are measured, nor other ways
    /// to save the VM, nor VMs whose snapshots are fetched meanwhile.
    pub generations: usize,
}

impl Scale {
    fn of(options: &Options) -> Self {
        Self {
            image: "trixie-a".into(),
            memory: options
                .memory
                .unwrap_or(options.pick(ByteSize::mib(512), ByteSize::mib(2048))),
            dirty_mib: options.pick(vec![0, 57], vec![0, 57, 512]),
            rounds: options.pick(3, 5),
            fan_out: options.pick(5, 30),
            generations: options.pick(4, 10),
        }
    }
}

/// Measurements of one fork.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    pause_ms: f64,
    returns_ms: f64,
    shares_ms: f64,
    child_runs_ms: f64,
    changed_mib: f64,
    written_mib: f64,
    write_ms: f64,
    pss_over_before: f64,
    pss_over_before_without_code: f64,
}

/// Runs the study. Returns `results` and `samples`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    measure_all(&Scale::of(options))
}

/// Measures forks as `scale` says. Returns `results` and `samples`.
pub fn measure_all(scale: &Scale) -> anyhow::Result<Value> {
    let lab = Lab::new(EngineSettings::default())?;
    let spec = Lab::spec(TEMPLATE, &scale.image, scale.memory, DiskMode::Buffered)?;
    lab.boot(vec![spec], BOOT_TIMEOUT)?;
    lab.exec(TEMPLATE, HOLD, LIMIT)?;
    let snapshots = lab.daemon().snapshots();
    snapshots.save(&SaveRequest::new(TEMPLATE, TEMPLATE))?;
    lab.stop(TEMPLATE)?;
    start(&lab, TEMPLATE, PARENT, Renew::Network)?;
    lab.daemon().vms().wait_agent(PARENT, BOOT_TIMEOUT)?;
    // The parent settles: a fork right after its start would count what its start has changed.
    fork_once(&lab, PARENT)?;

    let (mut results, mut samples) = (Map::new(), Map::new());
    for &mib in &scale.dirty_mib {
        let all = (0..scale.rounds).map(|round| measure(&lab, mib, round));
        let all = all.collect::<anyhow::Result<Vec<Sample>>>()?;
        let key = format!("dirty_{mib}");
        results.insert(key.clone(), summary(&all, |of| spread(of)));
        samples.insert(key, summary(&all, |of| json!(of)));
    }
    results.insert("memory_mib".into(), json!(scale.memory.0 >> 20));
    if scale.generations == 0 {
        results.insert("fan_out".into(), fan_out(&lab, scale.fan_out)?);
        return Ok(json!({ "samples": samples, "results": results }));
    }
    let (whole_s, qemu_s) = other_ways(&lab, scale.rounds)?;
    let fan_out = fan_out(&lab, scale.fan_out)?;
    let (depth, restored) = generations(&lab, scale.generations, scale.rounds)?;
    results.insert("whole_save_s".into(), spread(&whole_s));
    results.insert("qemu_save_s".into(), spread(&qemu_s));
    results.insert("fan_out".into(), fan_out);
    results.insert("generations".into(), json!(scale.generations));
    results.insert("depth_ratio".into(), spread(&depth));
    results.insert("streamed".into(), streamed(&lab, scale.rounds)?);
    samples.insert("restore_s".into(), restored);
    Ok(json!({ "samples": samples, "results": results }))
}

fn summary(samples: &[Sample], of: impl Fn(&[f64]) -> Value) -> Value {
    let part = |part: fn(&Sample) -> f64| of(&samples.iter().map(part).collect::<Vec<f64>>());
    json!({
        "pause_ms": part(|s| s.pause_ms),
        "returns_ms": part(|s| s.returns_ms),
        "shares_ms": part(|s| s.shares_ms),
        "child_runs_ms": part(|s| s.child_runs_ms),
        "changed_mib": part(|s| s.changed_mib),
        "written_mib": part(|s| s.written_mib),
        "write_ms": part(|s| s.write_ms),
        "written_over_changed": part(|s| s.written_mib / s.changed_mib),
        "pss_over_before": part(|s| s.pss_over_before),
        "pss_over_before_without_code": part(|s| s.pss_over_before_without_code),
    })
}

fn fork_once(lab: &Lab, vm: &str) -> anyhow::Result<String> {
    let request = ForkRequest {
        keep: true,
        wait: true,
    };
    Ok(lab.daemon().snapshots().fork(vm, &request)?.snapshot)
}

/// Writes to the parent's memory, forks it, and starts one fork.
fn measure(lab: &Lab, mib: u64, round: usize) -> anyhow::Result<Sample> {
    let child = format!("child-{mib}-{round}");
    if mib > 0 {
        let write = format!("head -c {mib}M /dev/urandom > /dev/shm/written; sync");
        lab.exec(PARENT, &write, LIMIT)?;
    }
    let before = *sizes(lab)?
        .get(PARENT)
        .context("the VM that is forked has ended")?;
    let changed = changed_bytes(lab.pid(PARENT)?)?;
    let request = ForkRequest::default();
    let began = Instant::now();
    let report = lab.daemon().snapshots().fork(PARENT, &request)?;
    let returns_ms = began.elapsed().as_secs_f64() * 1000.0;
    let started = start(lab, &report.snapshot, &child, Renew::Network)?;
    // Waits for the end of sharing.
    lab.daemon().snapshots().shared(PARENT);
    let shares_ms = began.elapsed().as_secs_f64() * 1000.0;
    let both = sizes(lab)?;
    let after = [PARENT, &child].map(|vm| both.get(vm).copied());
    let [Some(parent), Some(forked)] = after else {
        anyhow::bail!("the forked VM or its fork has ended");
    };
    let place = lab.directory().join("snapshots").join(&report.snapshot);
    let written: u64 = files_bytes(&place)?;
    lab.stop(&child)?;
    Ok(Sample {
        pause_ms: report.pause_ms,
        returns_ms,
        shares_ms,
        child_runs_ms: returns_ms + started.ms,
        changed_mib: record::mib(changed as f64),
        written_mib: record::mib(written as f64),
        write_ms: write_ms(&place, written)?,
        pss_over_before: (parent.pss + forked.pss) / before.pss,
        pss_over_before_without_code: (parent.pss - parent.emulated_code + forked.pss
            - forked.emulated_code)
            / (before.pss - before.emulated_code),
    })
}

/// Returns the bytes of a VM's RAM that are private to its process: pages of mapped images and
/// disks that the VM has changed, and memory mapped between them in place of pages that the guest
/// freed.
fn changed_bytes(pid: i32) -> anyhow::Result<u64> {
    let mappings = ranges::parse(&std::fs::read_to_string(format!("/proc/{pid}/smaps"))?);
    // QEMU surrounds each RAM block with a page that cannot be accessed.
    let blocks = mappings.chunk_by(|a, b| a.end == b.start && a.permissions == b.permissions);
    let is_image = |of: &Mapping| {
        let ends = ["/ram", ".qcow2", ".img"];
        ends.iter().any(|end| of.path.ends_with(end))
    };
    let images = blocks.filter(|block| block.iter().any(is_image)).flatten();
    let pages: u64 = images.map(|of| of.anonymous_pages + of.swapped_pages).sum();
    ensure!(pages > 0, "the VM does not run from an image");
    Ok(pages * PAGE_SIZE)
}

/// Returns the milliseconds that it takes to write `bytes` bytes into a new file of a directory.
fn write_ms(place: &std::path::Path, bytes: u64) -> anyhow::Result<f64> {
    let piece = vec![0xa5; 1 << 20];
    let mut file = tempfile::tempfile_in(place)?;
    let began = Instant::now();
    for _ in 0..bytes.div_ceil(1 << 20) {
        file.write_all(&piece)?;
    }
    Ok(began.elapsed().as_secs_f64() * 1000.0)
}

/// Returns the bytes that the files of a directory take on disk.
fn files_bytes(place: &std::path::Path) -> anyhow::Result<u64> {
    use std::os::unix::fs::MetadataExt as _;
    let mut bytes = 0;
    for entry in std::fs::read_dir(place).with_context(|| place.display().to_string())? {
        bytes += entry?.metadata()?.blocks() * 512;
    }
    Ok(bytes)
}

/// Seconds of saves of all pages, and of QEMU's own saves.
fn other_ways(lab: &Lab, rounds: usize) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    let (mut whole, mut qemu) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let request = SaveRequest {
            whole: true,
            keep: KeepChoice::All,
            ..SaveRequest::new(PARENT, format!("whole-{round}"))
        };
        let saved = lab.daemon().snapshots().save(&request)?;
        whole.push(saved.save_ms / 1000.0);
        let (image, disk) = (
            lab.directory().join("qemu.ram"),
            lab.directory().join("qemu.disk"),
        );
        let way = qemu_way::save(lab, PARENT, Form::MappedRam, &image, &disk)?;
        qemu.push(way.save_s);
        std::fs::remove_file(&image)?;
        std::fs::remove_file(&disk)?;
    }
    Ok((whole, qemu))
}

/// Starts forks of one layer, all of which keep running.
fn fan_out(lab: &Lab, number: usize) -> anyhow::Result<Value> {
    let held = lab.exec(PARENT, TELL, LIMIT)?;
    let layer = fork_once(lab, PARENT)?;
    let (mut times, mut names) = (Vec::new(), Vec::new());
    for number in 0..number {
        let name = format!("fan-{number}");
        times.push(start(lab, &layer, &name, Renew::Network)?.ms);
        // The next one starts when this one is quiet.
        lab.wait_ready(&name, BOOT_TIMEOUT)?;
        lab.exec(&name, "systemctl stop tick", LIMIT)?;
        names.push(name);
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let said = lab.exec_all(&names, TELL, LIMIT)?;
    let ok = said.iter().filter(|said| **said == held).count();
    names.iter().try_for_each(|name| lab.stop(name))?;
    Ok(json!({
        "forks": number,
        "forks_ok": ok,
        "p50_ms": percentile(&times, 50),
        "p95_ms": percentile(&times, 95),
        "max_ms": percentile(&times, 100),
    }))
}

/// Starts VMs from a snapshot in an object store while it is fetched over a link of 1 Gbit/s with
/// 1 ms, and from the same snapshot here, in turn.
fn streamed(lab: &Lab, rounds: usize) -> anyhow::Result<Value> {
    let snapshots = lab.daemon().snapshots();
    // A VM ran from the snapshot, so memfold knows which pages VMs touch first.
    let set = lab
        .directory()
        .join("snapshots")
        .join(TEMPLATE)
        .join(working_set::FILE);
    wait_for(
        "no working set was recorded",
        (LIMIT, Duration::from_millis(100)),
        || Ok(set.exists().then_some(())),
    )?;
    let objects = lab.directory().join("objects");
    std::fs::create_dir(&objects)?;
    let url = format!("file://{}", objects.display());
    let to_directory = PushBody {
        url,
        ..PushBody::default()
    };
    let pushed = snapshots.push(TEMPLATE, to_directory)?;
    let chunks_only = forget_first_pages(&objects)?;
    let store = HttpStore::start(&objects, GIGABIT, Duration::from_millis(1))?;
    let (mut over, mut chunks_over, mut link, mut fetched, mut complete) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let local = start(lab, TEMPLATE, "local", Renew::Network)?.ms;
        lab.daemon().vms().wait_agent("local", BOOT_TIMEOUT)?;
        let held = lab.exec("local", TELL, LIMIT)?;
        lab.stop("local")?;
        let names = (format!("streamed-{round}"), format!("chunks-{round}"));
        let of = streamed_start(lab, &store, (TEMPLATE, &names.0), &held)?;
        let chunks = streamed_start(lab, &store, (&chunks_only, &names.1), &held)?;
        over.push(of.ms / local);
        chunks_over.push(chunks.ms / local);
        link.push(of.sent as f64 / GIGABIT * 1000.0 / local);
        fetched.push(of.sent as f64 / pushed.sent_bytes as f64 * 100.0);
        complete.push(of.complete_s);
        eprintln!("streamed: {local:.0} ms local, {of}; chunks only: {chunks}");
    }
    Ok(json!({
        "over_local": spread(&over),
        "chunks_over_local": spread(&chunks_over),
        "link_over_local": spread(&link),
        "fetched_percent": spread(&fetched),
        "complete_s": spread(&complete),
        "snapshot_mib": pushed.sent_bytes >> 20,
    }))
}

/// Writes another description of the snapshot [`TEMPLATE`] into a store: one that does not name the
/// pages that VMs touch at once. Returns its name.
fn forget_first_pages(objects: &Path) -> anyhow::Result<String> {
    let name = format!("{TEMPLATE}-chunks");
    let place = objects.join("snapshots");
    let text = std::fs::read(place.join(format!("{TEMPLATE}.json")))?;
    let mut description: Value = serde_json::from_slice(&text)?;
    let first = description
        .as_object_mut()
        .and_then(|of| of.remove("first_pages"));
    ensure!(first.is_some(), "the push stored no first pages");
    description["name"] = name.clone().into();
    std::fs::write(place.join(format!("{name}.json")), description.to_string())?;
    Ok(name)
}

/// Start of a VM whose snapshot was fetched meanwhile.
#[derive(Clone, Copy, Debug)]
struct StreamedStart {
    /// Milliseconds until VMs could be started.
    pulled_ms: f64,
    /// Milliseconds until guest code ran.
    ms: f64,
    /// Bytes that the store had sent by then.
    sent: u64,
    /// Seconds until the whole snapshot was here.
    complete_s: f64,
}

impl std::fmt::Display for StreamedStart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.0} until it can start, {:.0} ms in all, {} sent",
            self.pulled_ms,
            self.ms,
            ByteSize(self.sent)
        )
    }
}

/// Starts a VM from a snapshot that is fetched meanwhile, and waits until it is here. `held`: what
/// the VM must have in memory.
fn streamed_start(
    lab: &Lab,
    store: &HttpStore,
    (from, name): (&str, &str),
    held: &str,
) -> anyhow::Result<StreamedStart> {
    let snapshots = lab.daemon().snapshots();
    let body = PullBody {
        url: store.url(),
        from: Some(from.into()),
        allow_arguments: true,
        stream: true,
        ..PullBody::default()
    };
    let (sent, began) = (store.sent_bytes(), Instant::now());
    snapshots.pull(name, body)?;
    let pulled_ms = began.elapsed().as_secs_f64() * 1000.0;
    let ms = pulled_ms + start(lab, name, "remote", Renew::Network)?.ms;
    let sent = store.sent_bytes() - sent;
    let is_here = || {
        let list = snapshots.list()?.into_iter();
        let mut found = list.filter(|info| info.name == name);
        Ok(found.any(|info| info.problem.is_none()).then_some(()))
    };
    wait_for(
        "the snapshot is not complete",
        (LIMIT, Duration::from_millis(20)),
        is_here,
    )?;
    let complete_s = began.elapsed().as_secs_f64();
    lab.daemon().vms().wait_agent("remote", BOOT_TIMEOUT)?;
    let is_same = lab.exec("remote", TELL, LIMIT)? == held;
    ensure!(is_same, "the memory differs");
    lab.stop("remote")?;
    Ok(StreamedStart {
        pulled_ms,
        ms,
        sent,
        complete_s,
    })
}

/// Forks a fork of a fork, and restores the first and the last generation in turn. Returns the
/// ratios of both times, and the times.
fn generations(lab: &Lab, number: usize, rounds: usize) -> anyhow::Result<(Vec<f64>, Value)> {
    let mut layers = vec![fork_once(lab, PARENT)?];
    for generation in 1..number {
        let vm = format!("generation-{generation}");
        start(lab, &layers[generation - 1], &vm, Renew::Network)?;
        lab.daemon().vms().wait_agent(&vm, BOOT_TIMEOUT)?;
        lab.exec(&vm, "head -c 16M /dev/urandom > /dev/shm/own", LIMIT)?;
        layers.push(fork_once(lab, &vm)?);
        lab.stop(&vm)?;
    }
    let (mut first, mut last) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        for (layer, times) in [(&layers[0], &mut first), (&layers[number - 1], &mut last)] {
            let vm = format!("restored-{round}-{}", times.len());
            let began = Instant::now();
            lab.daemon()
                .snapshots()
                .restore(layer, &RestoreRequest::new(&vm))?;
            times.push(began.elapsed().as_secs_f64());
            lab.stop(&vm)?;
        }
    }
    Ok((
        ratios(&last, &first),
        json!({ "first": first, "last": last }),
    ))
}

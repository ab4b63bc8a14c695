//! The study `memfold bench segments`, which repeats a published study (study A): measures the
//! memory of VMs that execute files in place from one shared image (a segment), compared with VMs
//! that read these files from disks.
//!
//! | arm | the VMs | sharing in study A's plan |
//! |---|---|---|
//! | `none` | boot from disks of their own | no sharing |
//! | `tree` | as `none`, with one segment of `/usr` and `/opt` mounted over the VM's own files | DCSS |
//! | `segment` | as `tree`, but only with the files that save most, ranked by the page caches of the first arm's VMs (`--top-files`) | DCSS; the plan leaves the choice of files open |
//! | `root` | boot from a segment of the whole system, and write to their disks | DCSS |
//! | `clone` | run from one snapshot of a VM of `none` | NSS, and more: all of memory, not only the kernel |
//! | `both` | run from one snapshot of a VM of `segment` | both |
//!
//! DCSS and NSS, which the arms imitate, are shared segments and shared kernels of z/VM.
//!
//! In each arm, several VMs run at once, and nothing else. A VM's *attributable memory* is its RAM
//! in memory (for shared pages, its share) and its share of segments' pages. Its RAM includes the
//! descriptions of segments (`struct page`) and I/O buffers. The memory is measured when the VMs
//! are idle, and then while apache2 serves pages in all of them. Then a program's cold start (its
//! files not cached in the guest) is timed, side by side in a VM that reads the files from its disk
//! and in a VM that executes them from a segment. In every arm, guests report free memory in pieces
//! of 64 KiB.
//!
//! Without `--quick`, the study also shares one directory at a time.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use memfold_api::{BuildRequest, KeepChoice, RestoreRequest, SaveRequest};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab, guest_image};
use memfold_segment::Manifest;
use memfold_snapshot::Renew;
use memfold_units::ByteSize;
use memfold_vm::SegmentSpec;
use memfold_vm::segments::SMALL_REPORTS;
use serde_json::{Value, json};

use crate::host::numbers_said;
use crate::record::{Found, median, mib, ratios, spread};
use crate::study::Options;
use crate::wait::wait_steady;

const BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// Time limit of one operation in a guest.
pub(super) const LIMIT: Duration = Duration::from_secs(900);

const MEMORY: ByteSize = ByteSize::mib(512);

const IMAGE: &str = "trixie-a";

/// Trust domain of the segments, which is also that of the lab's VMs.
const DOMAIN: &str = "lab";

/// Time between two measurements that must agree. Guests give freed memory back seconds later.
const REST: Duration = Duration::from_secs(15);

/// Longest wait until memory no longer changes.
const LONGEST_REST: Duration = Duration::from_secs(180);

/// Largest part of the memory that may change between two measurements that agree.
const SAME: f64 = 0.005;

/// Shell script that starts apache2 and fetches pages, as many as a small site serves.
const APACHE: &str = r"set -e
systemctl start apache2
for n in $(seq 100); do curl -fs http://127.0.0.1/ > /dev/null; done";

/// Shell script that prints the milliseconds of a cold start of apache2, until it has served a
/// page.
const COLD_APACHE: &str = r"set -e
systemctl stop apache2
sync; echo 3 > /proc/sys/vm/drop_caches; sleep 1
began=$(date +%s%N)
systemctl start apache2
until curl -fs http://127.0.0.1/ > /dev/null; do :; done
echo $(( ($(date +%s%N) - began) / 1000000 ))";

/// Returns a shell command that prints how many page faults a systemd unit has had since its start
/// (`memory.stat`, `Documentation/admin-guide/cgroup-v2.rst`).
fn faults_of(unit: &str) -> String {
    format!(
        r#"awk '$1 == "pgfault" {{ print $2 }}' /sys/fs/cgroup/system.slice/{unit}.service/memory.stat"#
    )
}

/// Shell command that prints the use of a guest's memory.
const GUEST: &str = r"awk '/^(MemTotal|MemFree|Cached|Buffers|AnonPages|Mapped|Shmem|Slab|KernelStack|PageTables):/ { print $1, $2 }' /proc/meminfo
dmesg | sed -n 's/.*software IO TLB: mapped.*(\([0-9]*\)MB).*/SwiotlbMiB: \1/p'";

/// Directories that are shared one at a time, unless the study is a quick one.
const DIRECTORIES: [&str; 5] = [
    "/usr/bin",
    "/usr/sbin",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/systemd",
    "/usr/share",
];

/// Place from which the VMs of an arm read their files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Files {
    Disk,
    /// Disks of the VMs that bypass the host's page cache.
    DiskUncached,
    Laid(&'static str),
    Root,
}

/// Names of segments: of all files that can be mounted over, of the files that save most, of a
/// whole system.
const TREE: &str = "tree";
const BEST: &str = "best";
pub(super) const ROOT: &str = "root";

/// Arms of the study: name, and whether the VMs are clones. The others are compared with the first
/// one.
const ARMS: [(&str, Files, bool); 6] = [
    ("none", Files::Disk, false),
    ("tree", Files::Laid(TREE), false),
    ("segment", Files::Laid(BEST), false),
    ("root", Files::Root, false),
    ("clone", Files::Disk, true),
    ("both", Files::Laid(BEST), true),
];

/// Attributable memory of a VM in bytes: the mean over the running VMs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Memory {
    ram: f64,
    segments: f64,
}

impl Memory {
    pub(super) fn all(self) -> f64 {
        self.ram + self.segments
    }
}

/// Measurements of an arm of the study.
struct Measured {
    arm: &'static str,
    idle: Memory,
    apache: Memory,
    /// `/proc/meminfo` of one idle guest, in KiB.
    guest: Value,
}

impl Measured {
    fn added_by_apache(&self) -> f64 {
        self.apache.all() - self.idle.all()
    }

    fn sample(&self) -> Value {
        let memory = |m: Memory| json!({ "ram_mib": mib(m.ram), "segments_mib": mib(m.segments) });
        json!({
            "arm": self.arm,
            "idle": memory(self.idle),
            "with_apache": memory(self.apache),
            "guest_kib": self.guest,
        })
    }
}

pub(super) fn saving_percent(with: f64, without: f64) -> f64 {
    (1.0 - with / without) * 100.0
}

/// Runs the study `segments`. Returns its JSON record, with the parts `results` and `samples`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    // Number of VMs at once in each arm, and number of cold starts.
    let (vms, starts) = options.pick((4, 3), (6, 5));
    let lab = Lab::new(EngineSettings::default())?;
    let mut found = Found::default();
    let mut arms = Vec::new();
    let mut built = None;
    for (arm, files, clone) in ARMS {
        let context = || format!("arm '{arm}'");
        let names = bring_up(&lab, (arm, files, clone), vms).with_context(context)?;
        let measured = measure(&lab, arm, &names).with_context(context)?;
        eprintln!(
            "{arm:8} idle {:4.0} MiB a VM, of it {:3.0} of segments; apache2 adds {:3.0} MiB",
            mib(measured.idle.all()),
            mib(measured.idle.segments),
            mib(measured.added_by_apache()),
        );
        found.samples.push(measured.sample());
        arms.push(measured);
        if built.is_none() {
            // The files are ranked by the page caches of these VMs.
            built = Some(build_all(&lab, vms)?);
        }
        names.iter().try_for_each(|name| lab.stop(name))?;
    }
    let [all, best] = built.context("no arm of the study was measured")?;
    // The sources are left out, because they are paths of this machine.
    let facts = |m: &Manifest| {
        json!({
            "name": m.name, "files": m.files, "content_bytes": m.content_bytes, "image_bytes": m.image_bytes,
        })
    };
    let segments = json!({ "segments": [facts(&all), facts(&best)] });
    found.samples.push(segments);
    found.results = savings(&arms, &all, &best)?;
    found.add(cold_starts(&lab, starts)?);
    for directory in options.pick(&[][..], &DIRECTORIES) {
        let alone = one_directory(&lab, directory, arms[0].idle)?;
        eprintln!("{directory} alone: {alone}");
        found.samples.push(alone);
    }
    Ok(json!(found))
}

fn savings(arms: &[Measured], all: &Manifest, best: &Manifest) -> anyhow::Result<Value> {
    let named = |name: &str| {
        let found = arms.iter().find(|measured| measured.arm == name);
        found.with_context(|| format!("the study has no arm '{name}'"))
    };
    let none = named("none")?;
    let idle = |m: &Measured| saving_percent(m.idle.all(), none.idle.all());
    let apache = |m: &Measured| saving_percent(m.added_by_apache(), none.added_by_apache());
    let saved = |m: &Measured| mib(none.apache.all() - m.apache.all());
    let (tree, segment) = (saved(named("tree")?), saved(named("segment")?));
    let bytes = best.image_bytes as f64 / all.image_bytes as f64;
    let mut results = json!({
        // Study A gives this saving.
        "idle_saving_percent": idle(named("both")?),
        "apache_saving_percent": apache(named("segment")?),
        "tree_saving_mib": tree,
        "top_files_saving_mib": segment,
        "top_files_saving_percent": segment / tree * 100.0,
        "top_files_bytes_percent": bytes * 100.0,
    });
    for measured in arms {
        let name = measured.arm;
        results[format!("idle_mib_{name}")] = mib(measured.idle.all()).into();
        results[format!("apache_mib_{name}")] = mib(measured.added_by_apache()).into();
        if name != "none" {
            results[format!("idle_saving_percent_{name}")] = idle(measured).into();
            results[format!("apache_saving_percent_{name}")] = apache(measured).into();
        }
    }
    Ok(results)
}

/// Builds the segment `name` from the files in the guest image `image`. `change` adapts the
/// request.
pub(super) fn build(
    lab: &Lab,
    (name, image): (&str, &str),
    change: impl FnOnce(&mut BuildRequest),
) -> anyhow::Result<Manifest> {
    let image = guest_image(image)?;
    let mut request = BuildRequest {
        name: name.into(),
        domain: DOMAIN.into(),
        from: vec![image.disk.display().to_string()],
        include: Vec::new(),
        exclude: Vec::new(),
        top_files_bytes: None,
        for_vms: None,
        root: false,
        pinned: false,
    };
    change(&mut request);
    Ok(lab.daemon().segments().build(&request)?.segment)
}

/// Builds the segments of all arms: one of all files, and one of the files that save most, in at
/// most a quarter of its bytes.
fn build_all(lab: &Lab, vms: usize) -> anyhow::Result<[Manifest; 2]> {
    let all = build(lab, (TREE, IMAGE), |_| ())?;
    let best = build(lab, (BEST, IMAGE), |request| {
        request.top_files_bytes = Some(all.content_bytes / 4);
        request.for_vms = Some(vms as u64);
    })?;
    build(lab, (ROOT, IMAGE), |request| request.root = true)?;
    Ok([all, best])
}

pub(super) fn start(
    lab: &Lab,
    name: &str,
    (image, memory): (&str, ByteSize),
    files: Files,
) -> anyhow::Result<()> {
    let mode = if files == Files::DiskUncached {
        DiskMode::Direct
    } else {
        DiskMode::Buffered
    };
    let mut spec = Lab::spec(name, image, memory, mode)?;
    // All guests get the kernel parameters that memfold gives to guests with segments.
    if let Some(cmdline) = &mut spec.boot.cmdline {
        cmdline.push(' ');
        cmdline.push_str(SMALL_REPORTS);
    }
    match files {
        Files::Disk | Files::DiskUncached => {}
        Files::Laid(segment) => spec.segments.push(SegmentSpec::new(segment)),
        Files::Root => {
            let mut root = SegmentSpec::new(ROOT);
            root.root = true;
            spec.segments.push(root);
        }
    }
    lab.start(spec)
}

/// Starts the VMs of an arm, and waits until they are idle. Returns their names.
fn bring_up(
    lab: &Lab,
    (arm, files, clone): (&str, Files, bool),
    number: usize,
) -> anyhow::Result<Vec<String>> {
    let names: Vec<String> = (1..=number).map(|n| format!("vm{n}")).collect();
    let trixie = (IMAGE, MEMORY);
    let mut all = names.iter();
    if !clone {
        all.try_for_each(|name| start(lab, name, trixie, files))?;
        names.iter().try_for_each(|name| booted(lab, name))?;
        return Ok(names);
    }
    start(lab, "template", trixie, files)?;
    booted(lab, "template")?;
    std::thread::sleep(REST);
    let snapshot = format!("template-{arm}");
    let request = SaveRequest {
        keep: KeepChoice::None,
        ..SaveRequest::new("template", &snapshot)
    };
    lab.daemon().snapshots().save(&request)?;
    lab.stop("template")?;
    for name in &names {
        let request = RestoreRequest {
            renew: Renew::Identity,
            ..RestoreRequest::new(name.as_str())
        };
        lab.daemon().snapshots().restore(&snapshot, &request)?;
        lab.daemon().vms().wait_agent(name, BOOT_TIMEOUT)?;
    }
    Ok(names)
}

/// Waits until a guest has started all its services, which takes much longer than the start of its
/// agent.
pub(super) fn booted(lab: &Lab, name: &str) -> anyhow::Result<()> {
    lab.wait_ready(name, BOOT_TIMEOUT)?;
    // The exit code is ignored: it says whether every service runs.
    let wait = "systemctl is-system-running --wait > /dev/null; true";
    lab.exec(name, wait, LIMIT).map(drop)
}

fn measure(lab: &Lab, arm: &'static str, names: &[String]) -> anyhow::Result<Measured> {
    let idle = memory(lab)?;
    let first = names.first().context("the arm has no VM to measure")?;
    let guest = guest(lab, first)?;
    for name in names {
        lab.exec(name, APACHE, LIMIT)?;
    }
    Ok(Measured {
        arm,
        idle,
        apache: memory(lab)?,
        guest,
    })
}

/// Waits until the attributable memory of the lab's VMs is steady, and returns it.
pub(super) fn memory(lab: &Lab) -> anyhow::Result<Memory> {
    let times = LONGEST_REST.as_secs() / REST.as_secs();
    let now = || memory_now(lab);
    let (memory, is_steady) = wait_steady((REST, times, SAME), now, |memory| memory.all())?;
    if !is_steady {
        eprintln!("memory still changes after {} s", LONGEST_REST.as_secs());
    }
    Ok(memory)
}

fn memory_now(lab: &Lab) -> anyhow::Result<Memory> {
    let report = lab.report()?;
    let vms = &report.ledger.vms;
    ensure!(!vms.is_empty(), "no VM runs");
    let mean = |of: fn(&memfold_ledger::VmAccount) -> ByteSize| {
        vms.iter().map(|vm| of(vm).0 as f64).sum::<f64>() / vms.len() as f64
    };
    Ok(Memory {
        ram: mean(|vm| vm.ram_pss_bytes),
        segments: mean(|vm| vm.segment_pss_bytes),
    })
}

fn guest(lab: &Lab, name: &str) -> anyhow::Result<Value> {
    let said = lab.exec(name, GUEST, LIMIT)?;
    let mut facts = json!({});
    for (key, value) in said.lines().filter_map(|line| line.split_once(": ")) {
        facts[key] = value.trim().parse::<u64>()?.into();
    }
    Ok(facts)
}

/// Measurements of a program's starts in several VMs. Each list is in the order of the VMs.
pub(super) struct Starts {
    /// Milliseconds of each start of the program.
    pub ms: Vec<Vec<f64>>,
    /// Page faults of the program during each start.
    pub faults: Vec<Vec<f64>>,
}

/// Measures starts of a program, in each VM in turn. `unit`: the program's systemd unit; `script`:
/// starts the program, and prints the milliseconds.
pub(super) fn measure_starts(
    lab: &Lab,
    vms: &[&str],
    (unit, script): (&str, &str),
    rounds: usize,
) -> anyhow::Result<Starts> {
    let script = format!("{script}\n{}", faults_of(unit));
    let mut found = Starts {
        ms: vec![Vec::new(); vms.len()],
        faults: vec![Vec::new(); vms.len()],
    };
    for _ in 0..rounds {
        for (at, vm) in vms.iter().enumerate() {
            let [ms, faults] = numbers_said(&lab.exec(vm, &script, LIMIT)?)?;
            found.ms[at].push(ms);
            found.faults[at].push(faults);
        }
    }
    Ok(found)
}

/// Measures cold starts of apache2, whose files are in no guest's cache, in a VM of each kind in
/// turn.
fn cold_starts(lab: &Lab, rounds: usize) -> anyhow::Result<Found> {
    let vms = ["disk", "place"];
    for (name, files) in vms.into_iter().zip([Files::Disk, Files::Root]) {
        start(lab, name, (IMAGE, MEMORY), files)?;
    }
    for name in vms {
        booted(lab, name)?;
        lab.exec(name, APACHE, LIMIT)?;
    }
    let Starts { ms, faults } = measure_starts(lab, &vms, ("apache2", COLD_APACHE), rounds)?;
    vms.iter().try_for_each(|name| lab.stop(name))?;
    eprintln!(
        "cold start of apache2: {:.0} ms and {:.0} page faults from a disk, {:.0} ms and {:.0} from a segment",
        median(&ms[0]),
        median(&faults[0]),
        median(&ms[1]),
        median(&faults[1])
    );
    Ok(Found {
        results: json!({
            "apache_cold_start_ratio": spread(ratios(&ms[0], &ms[1])),
            "apache_cold_start_faults_disk": spread(&faults[0]),
            "apache_cold_start_faults_segment": spread(&faults[1]),
        }),
        samples: vec![json!({
            "cold_start_ms": { "disk": ms[0], "segment": ms[1] },
            "cold_start_faults": { "disk": faults[0], "segment": faults[1] },
        })],
        ..Found::default()
    })
}

/// Measures two idle VMs with one directory from a segment mounted over their own: study A's
/// table 2.
fn one_directory(lab: &Lab, directory: &str, none: Memory) -> anyhow::Result<Value> {
    const ONE: &str = "one";
    let built = build(lab, (ONE, IMAGE), |request| {
        request.include = vec![format!("{directory}/**")];
    })?;
    let names = bring_up(lab, (ONE, Files::Laid(ONE), false), 2)?;
    let with = memory(lab)?;
    names.iter().try_for_each(|name| lab.stop(name))?;
    let saved = none.all() - with.all();
    Ok(json!({
        "directory": directory,
        "saved_mib": mib(saved),
        "percent_of_its_size": saved / built.content_bytes as f64 * 100.0,
        "content_mib": mib(built.content_bytes as f64),
    }))
}

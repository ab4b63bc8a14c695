//! The study `memfold bench rightsize`: VMs with changing work in one memory budget, sized by
//! nobody, by free page reporting alone, by Proxmox VE's rule for balloons, and by memfold.
//!
//! | VM | work |
//! |---|---|
//! | `idle` | reads files once, then does nothing |
//! | `build` | compiles again and again |
//! | `db` | `PostgreSQL` with pgbench |
//! | `web` | Apache under load |
//! | `leak` | a program that takes more and more memory, and ends |
//! | `spike` | a program that takes much memory at once |
//!
//! Before, each VM has read its whole disk once, as a backup does, so its page cache is as full as
//! that of a VM that has run for a day. Each VM then works for a while, rests, and works again, the
//! VMs one after the other. Meanwhile the study samples the memory that the VMs take on the host:
//! the proportional set size of their QEMU processes (`Pss` of `smaps`), without the code that the
//! emulator has translated, which does not exist under KVM. With `--quick`, only `build`, `web` and
//! `spike` run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use memfold_api::{DebtRequest, RightsizeMode};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab, at_once};
use memfold_ledger::GuestMemory;
use memfold_ledger::read::Proc;
use memfold_rightsize::sim::{BalloonedVm, autoballoon};
use memfold_units::ByteSize;
use serde_json::{Value, json};

use crate::figure::{self, Axis, Figure, Series, number};
use crate::record::{Found, mib};
use crate::study::Options;

/// Ways to size VMs, in the order in which they are measured.
const ARMS: [&str; 4] = ["nothing", "reporting", "proxmox", "memfold"];

const IMAGE: &str = "trixie-a";

/// Time between two samples of the host's memory.
const SAMPLE: Duration = Duration::from_secs(2);

/// Samples of the host's memory from one sample of the guests' own reports to the next.
const SAMPLES_A_REPORT: usize = 5;

/// Part of the budget that the VMs are to take at most, by Proxmox VE's rule (`pvestatd`) and by
/// memfold.
const GOAL: f64 = 0.8;

/// Time between two runs of Proxmox VE's rule, and its largest change of a balloon.
const PROXMOX_EVERY: Duration = Duration::from_secs(10);
const PROXMOX_CHANGE: f64 = 100.0 * 1024.0 * 1024.0;

/// Longest time that a guest may need for anything.
const LIMIT: Duration = Duration::from_secs(1800);

/// Reads the counters that each VM is compared by.
const COUNTERS: &str = "awk '/^workingset_refault_file |^pswpin |^pswpout |^oom_kill / \
    {n[$1] = $2} END {print n[\"workingset_refault_file\"] + 0, n[\"pswpin\"] + n[\"pswpout\"] + 0, \
    n[\"oom_kill\"] + 0}' /proc/vmstat";

/// Sizes of a study.
#[derive(Clone, Copy, Debug)]
struct Plan {
    vms: &'static [&'static str],
    memory: ByteSize,
    /// Memory of all VMs together, as a part of their RAM.
    budget: f64,
    rounds: u32,
    work_s: u64,
    rest_s: u64,
    spike_mib: u64,
}

const QUICK: Plan = Plan {
    vms: &["build", "web", "spike"],
    memory: ByteSize::mib(512),
    budget: 0.75,
    rounds: 1,
    work_s: 60,
    rest_s: 60,
    spike_mib: 128,
};

const FULL: Plan = Plan {
    vms: &["idle", "build", "db", "web", "leak", "spike"],
    memory: ByteSize::mib(1024),
    budget: 0.75,
    rounds: 2,
    work_s: 150,
    rest_s: 150,
    spike_mib: 512,
};

/// What one VM did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Done {
    /// Work in units of its own kind.
    work: f64,
    /// 99th percentile of the time of a transaction, or the time of a spike, in milliseconds.
    p99_ms: Option<f64>,
    refaults: f64,
    swapped_pages: f64,
    oom_kills: f64,
}

/// Runs the study `rightsize`. Returns its JSON record, with the parts `results` and `samples`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    options.check_arms("rightsize", &ARMS)?;
    let plan = options.pick(QUICK, FULL);
    let mut found = Found::default();
    for arm in ARMS.into_iter().filter(|arm| options.is_wanted(arm)) {
        found.add(measure(arm, plan).with_context(|| format!("arm '{arm}'"))?);
    }
    compare(&mut found.results);
    let vms = plan.vms.iter();
    found.vms = vms
        .map(
            |name| json!({"name": name, "image": IMAGE, "memory_bytes": plan.memory.0, "vcpus": 1}),
        )
        .collect();
    Ok(json!(found))
}

/// Measures one way to size VMs.
fn measure(arm: &'static str, plan: Plan) -> anyhow::Result<Found> {
    let lab = Lab::new(EngineSettings::default())?;
    if arm == "memfold" {
        // As after installation, until the operator turns right-sizing on.
        lab.daemon().rightsizing().set_mode(RightsizeMode::Watch);
    }
    for name in plan.vms {
        let mut spec = Lab::spec(name, IMAGE, plan.memory, DiskMode::Buffered)?;
        spec.balloon = arm != "nothing";
        lab.start_warm(spec)?;
    }
    for name in plan.vms {
        lab.wait_ready(name, LIMIT)?;
        lab.exec(name, prepare(name), LIMIT)?;
    }
    at_once(plan.vms, |name| lab.exec(name, BACKUP, LIMIT))?;
    let ram = plan.memory.0 as f64 * plan.vms.len() as f64;
    let budget = ram * plan.budget;
    if arm == "memfold" {
        set_reserve(&lab, plan, budget)?;
        lab.daemon().rightsizing().set_mode(RightsizeMode::On);
    }
    let (over, began) = (AtomicBool::new(false), Instant::now());
    let (samples, traces, done) = std::thread::scope(|scope| {
        let sampler = scope.spawn(|| sample(&lab, plan, &over, began));
        let sizer = scope.spawn(|| match arm {
            "proxmox" => follow_proxmox(&lab, plan, budget, &over),
            _ => Ok(()),
        });
        let done = at_once(plan.vms.iter().enumerate(), |(index, name)| {
            work(&lab, name, index as u64, plan)
        });
        over.store(true, Ordering::Relaxed);
        let panicked = |_| anyhow::anyhow!("a thread of the study panicked");
        sizer.join().map_err(panicked)??;
        let (samples, traces) = sampler.join().map_err(panicked)??;
        anyhow::Ok((samples, traces, done?))
    })?;
    let mean_of = |part: &dyn Fn(&Sample) -> f64| {
        samples.iter().map(part).sum::<f64>() / samples.len().max(1) as f64
    };
    let mean = mean_of(&Sample::bytes);
    let sum = |part: fn(&Done) -> f64| done.iter().map(part).sum::<f64>();
    eprintln!("{arm}: {:.0} MiB on average", mib(mean));
    let mut results = json!({
        format!("{arm}_mean_memory_mib"): mib(mean),
        format!("{arm}_refaults"): sum(|done| done.refaults),
        format!("{arm}_swapped_pages"): sum(|done| done.swapped_pages),
        format!("{arm}_oom_kills"): sum(|done| done.oom_kills),
    });
    for (index, (name, done)) in plan.vms.iter().zip(&done).enumerate() {
        let own = mean_of(&|sample| sample.vms[index]);
        results[format!("{arm}_mean_memory_{name}_mib")] = json!(mib(own));
        results[format!("{arm}_work_{name}")] = json!(done.work);
        if let Some(ms) = done.p99_ms {
            results[format!("{arm}_p99_{name}_ms")] = json!(ms);
        }
    }
    let traces = plan.vms.iter().zip(&traces);
    let traces: Value = traces.map(|(vm, trace)| trace.json(vm)).collect();
    Ok(Found {
        samples: vec![json!({
            "arm": arm,
            "budget_bytes": budget,
            "at_s": samples.iter().map(|sample| sample.at_s).collect::<Vec<f64>>(),
            "memory_bytes": samples.iter().map(Sample::bytes).collect::<Vec<f64>>(),
            "orders": orders(&lab),
            "traces": traces,
        })],
        results,
        ..Found::default()
    })
}

/// Compares memfold with the other arms: memory and refaults of each, and the least work of a VM.
fn compare(results: &mut Value) {
    let of = |key: &str| results[key].as_f64();
    let mut ratios = Vec::new();
    for other in ARMS.into_iter().filter(|arm| *arm != "memfold") {
        let less =
            |key: &str| Some(of(&format!("memfold_{key}"))? / of(&format!("{other}_{key}"))?);
        if let Some(ratio) = less("mean_memory_mib").filter(|ratio| ratio.is_finite()) {
            ratios.push((
                format!("memory_saving_percent_vs_{other}"),
                (1.0 - ratio) * 100.0,
            ));
        }
        let works = FULL
            .vms
            .iter()
            .filter_map(|name| less(&format!("work_{name}")));
        let works: Vec<f64> = works.filter(|ratio| ratio.is_finite()).collect();
        if let Some(least) = works.iter().copied().reduce(f64::min) {
            ratios.push((format!("least_work_ratio_vs_{other}"), least));
        }
        if let Some(ratio) = less("p99_db_ms").filter(|ratio| ratio.is_finite()) {
            ratios.push((format!("p99_db_ratio_vs_{other}"), ratio));
        }
    }
    for (key, value) in ratios {
        results[key] = json!(value);
    }
}

/// Sets memfold's reserve, so that the host has room if the VMs take at most [`GOAL`] of `budget`
/// bytes. The host has room above a reserve and a quarter.
fn set_reserve(lab: &Lab, plan: Plan, budget: f64) -> anyhow::Result<()> {
    let report = lab.report()?.ledger;
    let used: f64 = vms_bytes(lab, plan)?.iter().sum();
    let reserve = (report.host.mem_available_bytes.0 as f64 + used - budget * GOAL) / 1.25;
    // The reserve is below the host's memory.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let reserve = reserve.max(0.0) as u64;
    let request = DebtRequest {
        reserve: Some(reserve.to_string()),
        cover_percent: None,
    };
    lab.daemon().brake().set_debt(&request)?;
    Ok(())
}

/// Memory of the VMs at one moment.
#[derive(Clone, Debug)]
struct Sample {
    at_s: f64,
    /// Bytes of each VM, in the plan's order.
    vms: Vec<f64>,
}

impl Sample {
    fn bytes(&self) -> f64 {
        self.vms.iter().sum()
    }
}

/// Returns the memory that each VM takes on the host, without translated code of the emulator
/// (writable and executable memory of QEMU), in bytes.
fn vms_bytes(lab: &Lab, plan: Plan) -> anyhow::Result<Vec<f64>> {
    let of_vm = |name: &&str| {
        let mappings = Proc::default().smaps(lab.pid(name)?)?;
        let is_code = |vma: &memfold_ledger::read::Vma| vma.write && vma.execute;
        let mappings = mappings.iter().filter(|mapping| !is_code(&mapping.vma));
        Ok(mappings.map(|mapping| mapping.pss_bytes.0 as f64).sum())
    };
    plan.vms.iter().map(of_vm).collect()
}

/// Returns how many orders right-sizing has given, by kind and reason, and the changes of the rung.
fn orders(lab: &Lab) -> Value {
    let report = lab.daemon().rightsizing().report(usize::MAX);
    for event in &report.events {
        let result = event.result.as_deref().unwrap_or("in progress");
        eprintln!(
            "  {}: {}: {result}; {}",
            event.vm, event.order, event.reason
        );
    }
    json!({ "counts": report.orders, "rungs": report.rungs })
}

/// What one guest reported, in the order of time.
#[derive(Clone, Debug, Default)]
struct Trace(Vec<(f64, GuestMemory)>);

impl Trace {
    /// Returns the trace of the VM `vm` as columns: one array for each figure.
    fn json(&self, vm: &str) -> Value {
        let column = |part: &dyn Fn(&GuestMemory) -> Option<u64>| {
            let values = self.0.iter().map(|(_, guest)| part(guest));
            values.collect::<Vec<_>>()
        };
        let bytes = |part: fn(&GuestMemory) -> Option<ByteSize>| {
            column(&move |guest| part(guest).map(|bytes| bytes.0))
        };
        json!({
            "vm": vm,
            "at_s": self.0.iter().map(|(at_s, _)| *at_s).collect::<Vec<f64>>(),
            "anonymous_bytes": bytes(|guest| guest.anon_pages_bytes),
            "shared_bytes": bytes(|guest| guest.shmem_bytes),
            "file_cache_bytes": bytes(|guest| guest.cached_bytes),
            "dirty_bytes": bytes(|guest| guest.dirty_bytes),
            "available_bytes": bytes(|guest| Some(guest.mem_available_bytes)),
            "refaults_file": column(&|guest| guest.workingset_refault_file),
            "major_faults": column(&|guest| guest.pgmajfault),
        })
    }
}

/// Samples the memory of all VMs until `over`, and what their guests report.
fn sample(
    lab: &Lab,
    plan: Plan,
    over: &AtomicBool,
    began: Instant,
) -> anyhow::Result<(Vec<Sample>, Vec<Trace>)> {
    let mut samples = Vec::new();
    let mut traces = vec![Trace::default(); plan.vms.len()];
    while !over.load(Ordering::Relaxed) {
        let at_s = began.elapsed().as_secs_f64();
        if samples.len() % SAMPLES_A_REPORT == 0 {
            let accounts = lab.report()?.ledger.vms;
            for (trace, name) in traces.iter_mut().zip(plan.vms) {
                let account = accounts.iter().find(|vm| vm.name == *name);
                let guest = account.and_then(|vm| vm.guest.clone());
                trace.0.extend(guest.map(|guest| (at_s, guest)));
            }
        }
        samples.push(Sample {
            at_s,
            vms: vms_bytes(lab, plan)?,
        });
        std::thread::sleep(SAMPLE);
    }
    Ok((samples, traces))
}

/// Sizes the VMs by Proxmox VE's rule until `over`.
fn follow_proxmox(lab: &Lab, plan: Plan, budget: f64, over: &AtomicBool) -> anyhow::Result<()> {
    let mut next = Instant::now();
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(200));
        if Instant::now() < next {
            continue;
        }
        next = Instant::now() + PROXMOX_EVERY;
        let accounts = lab.report()?.ledger.vms;
        let mut vms = Vec::new();
        for name in plan.vms {
            let account = accounts.iter().find(|vm| vm.name == *name);
            let guest = account.and_then(|vm| vm.guest.as_ref());
            let free = guest.and_then(|guest| guest.mem_free_bytes);
            vms.push(BalloonedVm {
                balloon: lab.daemon().vms().balloon_size(name)?.0 as f64,
                min: plan.memory.0 as f64 / 4.0,
                max: plan.memory.0 as f64,
                shares: 1000.0,
                free: free.map_or(0.0, |bytes| bytes.0 as f64),
            });
        }
        let used: f64 = vms_bytes(lab, plan)?.iter().sum();
        let goal = budget * GOAL - used;
        let new = autoballoon(&vms, goal, PROXMOX_CHANGE);
        for ((name, vm), size) in plan.vms.iter().zip(&vms).zip(new) {
            // Sizes are between `min` and `max`.
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let target = ByteSize((size as u64) & !0xfff);
            if (size - vm.balloon).abs() >= 4096.0 {
                lab.daemon().vms().set_balloon(name, Some(target))?;
            }
        }
    }
    Ok(())
}

/// Lets one VM rest and work, and says what it did. VMs begin one after the other.
fn work(lab: &Lab, name: &str, index: u64, plan: Plan) -> anyhow::Result<Done> {
    let before = counters(lab, name)?;
    let mut done = Done::default();
    let step = plan.work_s / plan.vms.len() as u64;
    std::thread::sleep(Duration::from_secs(index * step));
    for _ in 0..plan.rounds {
        std::thread::sleep(Duration::from_secs(plan.rest_s));
        let said = lab.exec(name, &script(name, plan), LIMIT)?;
        let (work, p99_ms) = parse(&said).with_context(|| format!("VM '{name}' said {said:?}"))?;
        done.work += work;
        done.p99_ms = match (done.p99_ms, p99_ms) {
            (Some(before), Some(now)) => Some(f64::max(before, now)),
            (before, now) => before.or(now),
        };
    }
    let after = counters(lab, name)?;
    let grown = |index: usize| after[index] - before[index];
    (done.refaults, done.swapped_pages, done.oom_kills) = (grown(0), grown(1), grown(2));
    eprintln!("  {name}: {done:?}");
    Ok(done)
}

/// Reads refaults, swapped pages and killed processes of a guest.
fn counters(lab: &Lab, name: &str) -> anyhow::Result<[f64; 3]> {
    let said = lab.exec(name, COUNTERS, LIMIT)?;
    let numbers: Vec<f64> = said.split_whitespace().flat_map(str::parse).collect();
    let all = <[f64; 3]>::try_from(numbers).ok();
    all.with_context(|| format!("VM '{name}' has no counters: {said:?}"))
}

/// Parses the last line of a script: its work, and a time in milliseconds or `-`.
fn parse(said: &str) -> Option<(f64, Option<f64>)> {
    let (work, ms) = said.lines().last()?.split_once(' ')?;
    Some((work.parse().ok()?, ms.trim().parse().ok()))
}

/// Returns the script that prepares a VM for its work.
fn prepare(name: &str) -> &'static str {
    match name {
        "build" => BUILD,
        "db" => {
            "systemctl start postgresql@17-main && cd /tmp && su postgres -c 'createdb bench && pgbench -q -i -s 10 bench'"
        }
        "web" => {
            "for n in $(seq 96); do head -c 1048576 /dev/urandom > /var/www/html/$n; done && sync && systemctl start apache2"
        }
        _ => "cat /usr/lib/x86_64-linux-gnu/*.so* > /dev/null",
    }
}

/// Reads all files of the disk once.
const BACKUP: &str = "find / -xdev -type f -exec cat {} + > /dev/null 2>&1; sync";

/// Writes a program of 200 functions.
const BUILD: &str = r#"{ echo '#include <stdio.h>'; echo '#include <stdlib.h>'
for n in $(seq 200); do echo "int f$n(int x) { for (int i = 0; i < x; i++) x += i * $n; return x; }"; done
} > /var/tmp/work.c"#;

/// Takes memory at once, again and again, and prints how often, and the longest time in ms.
const SPIKE: &str = r"python3 - <<'END'
import mmap, time
times, end = [], time.monotonic() + SECONDS
while time.monotonic() < end:
    began = time.monotonic()
    held = mmap.mmap(-1, MIB << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    times.append((time.monotonic() - began) * 1000)
    held.close()
    time.sleep(20)
print(len(times), max(times))
END";

/// Returns the script with which a VM works. Its last line is what [`parse`] reads.
fn script(name: &str, plan: Plan) -> String {
    let seconds = plan.work_s;
    let until = format!("end=$(( $(date +%s) + {seconds} )); n=0; while [ $(date +%s) -lt $end ]");
    match name {
        "build" => format!(
            "{until}; do gcc -O2 -c /var/tmp/work.c -o /var/tmp/work.o; n=$((n+1)); done; echo $n -"
        ),
        "web" => format!(
            "{until}; do curl -s -o /dev/null http://127.0.0.1/$(( n % 96 + 1 )) || exit 1; n=$((n+1)); done; echo $n -"
        ),
        "db" => format!(
            "rm -f /tmp/pgl.*; cd /tmp && n=$(su postgres -c 'pgbench -T {seconds} -c 2 -l --log-prefix=/tmp/pgl bench'              | awk '/transactions actually processed/ {{print $6 + 0}}');              ms=$(cat /tmp/pgl.* | awk '{{print $3}}' | sort -n | awk '{{a[NR] = $1}} END {{print a[int(NR * 0.99 + 0.5)] / 1000}}');              echo $n $ms"
        ),
        "leak" => {
            let steps = plan.memory.0 >> 21;
            let pause = seconds as f64 / steps as f64;
            format!(
                "python3 - <<'END'\nimport time\nheld = []\nfor step in range({steps}):\n    \
                 held.append(b'x' * 1048576)\n    time.sleep({pause:.3})\nprint(len(held), '-')\nEND"
            )
        }
        "spike" => SPIKE
            .replace("SECONDS", &seconds.to_string())
            .replace("MIB", &plan.spike_mib.to_string()),
        _ => format!("sleep {seconds}; echo 0 -"),
    }
}

/// Draws the figure of the study `rightsize` from its record `study`: the memory of all VMs over
/// time.
pub fn figures(study: &Value) -> Vec<Figure> {
    let lines = figure::samples(study).iter().filter_map(|sample| {
        let (at, bytes) = (
            sample["at_s"].as_array()?,
            sample["memory_bytes"].as_array()?,
        );
        let points = at.iter().zip(bytes);
        let points = points.map(|(at, bytes)| (number(at) / 60.0, mib(number(bytes))));
        Some(Series {
            name: sample["arm"].as_str()?.to_owned(),
            points: points.collect(),
            dashed: sample["arm"] != "memfold",
        })
    });
    let (x, y) = (Axis::Linear("minutes"), Axis::Linear("MiB of all VMs"));
    let lines: Vec<Series> = lines.collect();
    figure::drawn(
        "rightsize",
        "Memory of VMs with changing work",
        x,
        y,
        &lines,
    )
    .into_iter()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_a_guests_output_has_its_work_and_a_time_if_it_measures_one() {
        assert_eq!(parse("noise\n12 -\n"), Some((12.0, None)));
        assert_eq!(parse("7 3.5\n"), Some((7.0, Some(3.5))));
        assert_eq!(parse(""), None);
        assert_eq!(parse("nothing\n"), None);
        for name in FULL.vms {
            assert!(!prepare(name).is_empty());
            let script = script(name, FULL);
            assert!(
                !script.contains("SECONDS") && !script.contains("MIB"),
                "{script}"
            );
        }
    }

    #[test]
    fn a_trace_has_a_column_for_each_figure_and_null_where_the_guest_says_nothing() {
        let guest = |anonymous| GuestMemory {
            mem_available_bytes: ByteSize(7),
            anon_pages_bytes: anonymous,
            ..GuestMemory::default()
        };
        let reports = [(0.0, guest(Some(ByteSize(4096)))), (10.0, guest(None))];
        let trace = Trace(reports.to_vec()).json("web");
        assert_eq!(trace["vm"], "web");
        assert_eq!(trace["at_s"], json!([0.0, 10.0]));
        assert_eq!(trace["anonymous_bytes"], json!([4096, null]));
        assert_eq!(trace["available_bytes"], json!([7, 7]));
    }

    #[test]
    fn memfold_is_compared_with_each_arm_that_was_measured() {
        let mut results = json!({
            "reporting_mean_memory_mib": 1000.0, "memfold_mean_memory_mib": 650.0,
            "reporting_work_web": 200.0, "memfold_work_web": 198.0,
            "reporting_work_idle": 0.0, "memfold_work_idle": 0.0,
            "reporting_p99_db_ms": 10.0, "memfold_p99_db_ms": 10.5,
        });
        compare(&mut results);
        let of = |key: &str| results[key].as_f64().unwrap();
        assert!((of("memory_saving_percent_vs_reporting") - 35.0).abs() < 1e-9);
        assert!((of("least_work_ratio_vs_reporting") - 0.99).abs() < 1e-9);
        assert!((of("p99_db_ratio_vs_reporting") - 1.05).abs() < 1e-9);
        assert!(results["memory_saving_percent_vs_nothing"].is_null());
    }

    #[test]
    fn the_chart_of_the_rightsize_study_has_one_line_for_each_arm() {
        let sample = |arm| json!({ "arm": arm, "at_s": [0.0, 60.0], "memory_bytes": [1e9, 2e9] });
        let drawn = figures(&json!({ "samples": [sample("reporting"), sample("memfold")] }));
        assert_eq!(drawn.len(), 1);
        assert!(drawn[0].1.contains("reporting") && drawn[0].1.contains("memfold"));
        assert!(figures(&json!({ "samples": [] })).is_empty());
    }
}

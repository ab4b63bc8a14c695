//! Test of `memfold estimate` on real guests: its result is compared with the savings of KSM at
//! full speed, and of folding.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use memfold_api::{Client, FoldRequest, FullReport, VmInfo};
use memfold_ksm::{Controls, NOTES, Settings, Status, merging_pages, restore_leftover};
use memfold_lab::{DiskMode, Lab};
use memfold_ledger::estimate::mechanisms::Way;
use memfold_ledger::estimate::{Domains, EstimateReport, VmFacts, targets};
use memfold_sys::pagemap::{Filter, Pagemap, category};
use memfold_units::{ByteSize, Hva};
use rustix::process::Pid;
use serde_json::Value;

use crate::ksm_explain::take;
use crate::served::{Served, exec};
use crate::support;

const MEMORY: ByteSize = ByteSize::mib(512);
const NAMES: [&str; 4] = ["one", "two", "three", "four"];
const IMAGES: [&str; 4] = ["trixie-a", "trixie-b", "trixie-a", "trixie-b"];

/// Shell script that loads programs and libraries into page cache, and takes memory that is the
/// same in all guests, and memory that is twice in each.
const WORK: &str = r#"cat /usr/bin/* /usr/lib/*-linux-gnu/*.so* > /dev/null
cat > /run/hold.py <<'END'
import os, time
same = b"".join(b"%015d\n" % page * 256 for page in range(16 << 8))
own = os.urandom(8 << 20)
twice = [bytes(own), bytearray(own)]
open("/run/held", "w").close()
time.sleep(3600)
END
systemd-run -q --unit=hold python3 /run/hold.py
while [ ! -e /run/held ]; do sleep 0.2; done"#;

/// Restores the settings that a failing test leaves.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        let _ = restore_leftover(Path::new(NOTES));
    }
}

fn folding(client: &Client, on: bool) {
    let request = FoldRequest {
        paused: Some(!on),
        ..FoldRequest::default()
    };
    client.put::<_, Value>("/v1/fold", &request).unwrap();
}

/// Starts four guests that run the same programs, and a daemon that does not fold.
fn guests<'a>(state: &'a Path, names: &'a [&'a str]) -> (Served<'a>, Client) {
    let mut served = Served::new(state, names);
    served.start();
    let client = served.answers();
    folding(&client, false);
    for (name, image) in NAMES.iter().zip(IMAGES) {
        served.run(&Lab::spec(name, image, MEMORY, DiskMode::Buffered).unwrap());
    }
    let end = Instant::now() + support::BOOT;
    loop {
        let vms: Vec<VmInfo> = client.get("/v1/vms").unwrap();
        if vms.iter().all(|vm| vm.agent.is_some()) {
            break;
        }
        assert!(Instant::now() < end, "agents don't answer: {vms:?}");
        std::thread::sleep(Duration::from_millis(250));
    }
    std::thread::scope(|scope| {
        for name in NAMES {
            scope.spawn(move || exec(&Client::new(&state.join("s")).unwrap(), name, WORK));
        }
    });
    // After this time, the guests are idle, and the agents have reported the page cache.
    std::thread::sleep(Duration::from_secs(8));
    (served, client)
}

/// Returns the CPU time of children that were waited for, in seconds (fields 16 and 17 of
/// `proc_pid_stat(5)`).
fn children_cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    let ticks: u64 = fields[13..15]
        .iter()
        .map(|f| f.parse::<u64>().unwrap())
        .sum();
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// Runs the command like an operator does. A daemon on the socket, if any, provides its facts.
fn look(socket: &Path, arguments: &[&str]) -> EstimateReport {
    let before = children_cpu_s();
    let output = Command::new(env!("CARGO_BIN_EXE_memfold"))
        .arg("--socket")
        .arg(socket)
        .args(["estimate", "--json"])
        .args(arguments)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let cpu = children_cpu_s() - before;
    let report: EstimateReport = serde_json::from_slice(&output.stdout).unwrap();
    let how = report.how;
    println!("{how:?}, {cpu:.2} s of CPU by the kernel's count");
    assert!((how.read_percent - 100.0).abs() < 1e-9);
    assert!(how.cpu_percent <= 10.0, "{how:?}");
    // CPU time is counted in ticks of 10 ms, and includes the start of the program.
    assert!(
        cpu <= how.seconds * 0.10 + 0.08,
        "{cpu} s in {} s",
        how.seconds
    );
    report
}

/// Returns the number of page frames that hold private pages of these processes, from the page
/// tables alone.
fn frames(pids: &[i32]) -> u64 {
    let selected: Vec<String> = pids.iter().map(ToString::to_string).collect();
    let domains = Domains::default();
    let found = targets::find(Path::new("/proc"), &selected, &domains, &VmFacts::default());
    let mut frames = BTreeSet::new();
    let private = Filter {
        all_of: category::PRESENT,
        none_of: category::FILE | category::ZERO,
        ..Filter::default()
    };
    for target in found.unwrap() {
        let pagemap = Pagemap::open(Pid::from_raw(target.pid).unwrap()).unwrap();
        for range in target.ranges {
            let regions = pagemap.scan(Hva(range.start), Hva(range.end), private);
            for region in regions.unwrap() {
                let count = usize::try_from(region.pages()).unwrap();
                let of_region = pagemap.frames(region.start, count).unwrap();
                frames.extend(of_region.into_iter().flatten());
            }
        }
    }
    frames.len() as u64
}

/// Runs KSM at full speed until it merges nothing more. Returns the number of page frames that this
/// saved in these processes. `pages_sharing` is not used: when ksmd splits a huge page, its pages
/// of zeroes are mapped to the kernel's zero page at once (Linux 6.12), and no counter includes
/// them.
fn converge(pids: &[i32]) -> u64 {
    let controls = Controls::default();
    let settings = Settings {
        run: Some(1),
        pages_to_scan: Some(50_000),
        sleep_millisecs: Some(1),
        smart_scan: Some(0),
        ..Settings::default()
    };
    controls.apply(&settings).unwrap();
    let scans = || Status::read(&controls).unwrap().full_scans.unwrap_or(0);
    let (before, mut then) = (frames(pids), scans());
    let (end, mut last) = (
        Instant::now() + memfold_testkit::patience(Duration::from_secs(120)),
        0,
    );
    loop {
        assert!(Instant::now() < end, "KSM doesn't converge: {last}");
        std::thread::sleep(Duration::from_millis(250));
        if scans() < then + 2 {
            continue;
        }
        then = scans();
        let now = before.saturating_sub(frames(pids));
        if now.abs_diff(last) * 200 <= now {
            break;
        }
        last = now;
    }
    controls.write("run", &0).unwrap();
    let status = Status::read(&controls).unwrap();
    println!(
        "after {} full scans: {status:?}, merging {:?}",
        status.full_scans.unwrap_or(0),
        merging_pages(Path::new("/proc"))
    );
    before.saturating_sub(frames(pids))
}

#[track_caller]
fn within_percent(what: &str, estimated: u64, found: u64, percent: u64) {
    let off = (estimated as f64 - found as f64) * 100.0 / found as f64;
    println!(
        "{what}: estimated {} MiB, found {} MiB: {off:+.1} %",
        estimated >> 20,
        found >> 20
    );
    assert!(
        estimated.abs_diff(found) * 100 <= found * percent,
        "{what}: {off:+.1} %"
    );
}

fn saving(report: &EstimateReport, way: Way) -> u64 {
    let found = report.mechanisms.iter().find(|m| m.way == way);
    found.and_then(|m| m.saved).map_or(0, |saved| saved.bytes)
}

#[test]
fn an_estimate_is_within_ten_percent_of_the_later_savings_of_ksm_and_folding() {
    let Some(_turn) = support::turn() else { return };
    let directory = tempfile::Builder::new()
        .prefix("memfold-estimate.")
        .tempdir()
        .unwrap();
    let state = directory.path();
    let _restore = Restore;
    let (_served, client) = guests(state, &NAMES);
    let vms: Vec<VmInfo> = client.get("/v1/vms").unwrap();
    let pids: Vec<i32> = vms.iter().map(|vm| vm.pid).collect();

    let report = look(&state.join("s"), &NAMES);
    println!("{}", memfold_ledger::estimate::table::render(&report));
    assert_eq!(report.domains.len(), 1);
    assert_eq!(report.domains[0].domain.as_deref(), Some("lab"));
    let numbers: Vec<String> = pids.iter().map(ToString::to_string).collect();
    let numbers: Vec<&str> = numbers.iter().map(String::as_str).collect();
    // No daemon knows these VMs, so each is alone in its domain.
    let alone = look(&state.join("nobody"), &numbers);
    assert_eq!((alone.domains.len(), alone.daemon), (NAMES.len(), false));
    // Both estimates read all memory; one of them may have been disturbed.
    let quickest = report.how.seconds.min(alone.how.seconds);
    assert!(quickest <= 20.0, "{quickest} s");
    let apart: u64 = alone
        .domains
        .iter()
        .map(|domain| domain.between.bytes)
        .sum();
    assert_eq!(apart, 0);
    assert!(
        alone.across_domains.bytes > 16 << 20,
        "{:?}",
        alone.across_domains
    );

    if let Some(ksm) = take() {
        let merged = converge(&pids) << 12;
        within_percent("KSM", saving(&report, Way::Ksm), merged, 10);
        // Memory that was saved already cannot be saved again.
        let after = look(&state.join("s"), &NAMES);
        println!("{}", memfold_ledger::estimate::table::render(&after));
        assert!(after.saved.bytes < merged / 10, "{:?}", after.saved);
        Controls::default().unmerge(0).unwrap();
        drop(ksm);
    }

    let promised = saving(&look(&state.join("s"), &NAMES), Way::Fold);
    folding(&client, true);
    let (end, mut last) = (
        Instant::now() + memfold_testkit::patience(Duration::from_secs(90)),
        0,
    );
    let folded = loop {
        std::thread::sleep(Duration::from_secs(5));
        let report: FullReport = client.get("/v1/report").unwrap();
        let now = report.ledger.host.saved_by_folding_bytes;
        if now > 0 && (now - last).abs() * 100 <= now {
            break u64::try_from(now).unwrap();
        }
        assert!(
            Instant::now() < end,
            "folding doesn't come to an end: {last} {now}"
        );
        last = now;
    };
    within_percent("folding", promised, folded, 10);
}

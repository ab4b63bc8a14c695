//! Test of the dashboard in a real Chromium, with a daemon and real VMs: the displayed values equal
//! those of `memfold report --json`.
//!
//! The steps in the browser are in `web/test/walk.mjs`. Screenshots are saved in
//! `results/dashboard` of the repository. Tests of single pages with a daemon that only pretends,
//! in states that real VMs seldom have, are in `web/test/pages.mjs`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfold_api::{
    Borrowed, Client, CodeRequest, FullReport, LeaseReport, LoginCode, RestoreRequest, Role,
    SaveRequest, SwapPlace, VersionInfo, VmInfo,
};
use memfold_fold::EngineStats;
use memfold_lab::{DiskMode, Lab};
use memfold_ledger::{DebtReport, shared_frames};
use memfold_snapshot::Renew;
use memfold_testkit::{dose, patience, reports_skip, wait_for};
use memfold_units::{ByteSize, PAGE_SIZE};
use serde_json::Value;

use super::figures::{Figures, compare, shown, told, wanted_of_plan};
use super::ksm::{Restore, paused};
use super::ksm_explain::take;
use super::served::{Served, exec, succeeds};
use super::support::{self, BOOT};

/// RAM of the VMs: the same size as in the tests of snapshots, so that one boot serves both.
const MEMORY: ByteSize = ByteSize::mib(384);
pub const NAMES: [&str; 3] = ["web", "warm-1", "warm-2"];
/// Environment variable: if it is 1, times are checked against their limits, which needs an
/// otherwise idle host. The browser script reads it, too.
const TIMES: &str = "MEMFOLD_DASHBOARD_TIMES";
/// Time for which the daemon's CPU time is measured. The dashboard stays open as long.
const HOLD: Duration = Duration::from_secs(20);
/// Name of a VM whose guest never runs, and whose swap disk is lent.
const BORROWER: &str = "borrower";
/// Trust domain of the other VMs, which are one kind of the plan.
pub const KIND: &str = "lab";
/// Name of a VM that is started on a page.
const MADE: &str = "made";
/// Names of a clone of a snapshot that is saved on a page, of a fork of this clone, and of a VM
/// restored from the snapshot.
const CLONE: &str = "second-1";
const FORK: &str = "second-1-fork-1";
const BACK: &str = "back";
/// Shell command that prints the boot id, which is different after each boot.
const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";
const ALL: [&str; 8] = ["web", "warm-1", "warm-2", BORROWER, MADE, CLONE, FORK, BACK];
/// Number of logins, of which the quickest counts if times are checked; else there are two.
const LOGINS: usize = 5;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns Chromium's path if the packages of the browser script are there, else what is missing.
fn browser() -> Result<PathBuf, String> {
    if !repository()
        .join("web/node_modules/playwright-core")
        .exists()
    {
        return Err("no web/node_modules; run 'make setup'".into());
    }
    let find = |name: &str| {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path)
            .map(|directory| directory.join(name))
            .find(|file| file.is_file())
            .ok_or_else(|| format!("no {name}; run 'make setup'"))
    };
    find("node")?;
    find("chromium")
}

fn browser_or_skip() -> Option<PathBuf> {
    browser().map_or_else(
        |why| {
            assert!(std::env::var_os("MEMFOLD_REAL").is_none(), "{why}");
            reports_skip(&why)
        },
        Some,
    )
}

/// The browser script, and the lines that it prints.
struct Walk {
    child: Child,
    began: Instant,
    said: BufReader<std::process::ChildStdout>,
}

impl Walk {
    fn begin(arguments: &[&str]) -> Self {
        Self::begin_with(arguments, &[])
    }

    fn begin_with(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut child = Command::new("node")
            .envs(environment.iter().copied())
            .arg(repository().join("web/test/walk.mjs"))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        let began = Instant::now();
        Self { child, began, said }
    }

    /// Returns the next line of the script, which must be of step `wanted`.
    #[track_caller]
    fn step(&mut self, wanted: &str) -> Value {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the walk ended before '{wanted}'");
        let said: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(said["step"], wanted, "{line}");
        println!("{:6.1} s  {wanted}", self.began.elapsed().as_secs_f64());
        said
    }

    /// Continues the browser script.
    fn on(&mut self) {
        self.on_with("on");
    }

    /// Continues the browser script by sending the line for which it waits.
    fn on_with(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().unwrap();
        stdin.write_all(format!("{line}\n").as_bytes()).unwrap();
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        // The script has ended already if all went well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the CPU that a process uses during `time` from now on, in percent of one core.
fn cpu_percent(pid: i32, time: Duration) -> f64 {
    let (before, since) = (cpu_s(pid), Instant::now());
    std::thread::sleep(time);
    (cpu_s(pid) - before) / since.elapsed().as_secs_f64() * 100.0
}

/// Returns the CPU time that a process has used, in seconds (`proc_pid_stat(5)`: `utime` and
/// `stime`).
fn cpu_s(pid: i32) -> f64 {
    let stat = procfs::process::Process::new(pid).unwrap().stat().unwrap();
    (stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64
}

/// Starts another host's daemon that lends, and moves the swap disk of a VM there.
fn lend(state: &Path, other: &Path) {
    succeeds(other, &["lend", "--max", "256M"]);
    let run = [
        "vm", "run", "--name", BORROWER, "--memory", "64M", "--swap", "64M", "--", "-S",
    ];
    succeeds(state, &run);
    let client = Client::new(&state.join("s")).unwrap();
    let end = Instant::now() + patience(Duration::from_secs(30));
    loop {
        let leases: LeaseReport = client.get("/v1/leases").unwrap();
        if leases.lenders.iter().any(|l| l.offered_bytes >= 64 << 20) {
            break;
        }
        assert!(Instant::now() < end, "nobody offers: {leases:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
    succeeds(state, &["borrow", BORROWER]);
}

/// Returns the JSON output of a command.
pub fn json(state: &Path, arguments: &[&str]) -> Value {
    let output = succeeds(state, &[arguments, &["--json"]].concat());
    serde_json::from_str(&output).unwrap()
}

pub fn report(state: &Path) -> FullReport {
    serde_json::from_value(json(state, &["report"])).unwrap()
}

/// Writes invented fingerprints of two hosts: two VMs with the same contents are on different
/// hosts. Contents have more digits than a script's numbers can hold.
fn fingerprints(directory: &Path) -> [PathBuf; 2] {
    let host = |name: &str, vms: &[(&str, u64)]| {
        let vms = vms.iter().map(|(vm, first)| {
            let contents: Vec<u64> = (0..4000).map(|n| (1 << 62) + 2 * n + first).collect();
            serde_json::json!({"name": vm, "domain": "d", "ram_bytes": 64 << 20, "beside_bytes": 8 << 20, "contents": contents})
        });
        let print = serde_json::json!({"format": 1, "host": name, "key": "k", "level": 0, "memory_bytes": 1_u64 << 33, "others_bytes": 1 << 30,
            "vms": vms.collect::<Vec<_>>()});
        let file = directory.join(format!("{name}.json"));
        std::fs::write(&file, print.to_string()).unwrap();
        file
    };
    // Odd and even contents, which become equal if they are rounded.
    [
        host("north", &[("a", 0), ("odd", 1)]),
        host("south", &[("b", 0)]),
    ]
}

/// Compares the plan's form and the proposal with the command line.
fn check_plans(walk: &mut Walk, state: &Path, prints: &[PathBuf; 2]) {
    let planned = walk.step("planned");
    let mut told = Figures::new();
    let asked = format!("{KIND}=9");
    wanted_of_plan(&mut told, &json(state, &["plan", "--vms", &asked]));
    let (compared, _) = compare("planned", &shown(&planned), &told, &told);
    assert!(compared >= 3 + 2 * 7, "{compared}");
    println!("{compared} figures are those of the plan");
    // No other program on this host changes this figure: the memory of six more VMs.
    let page = shown(&planned);
    let more = |of: &Figures| of["plan.predicted_bytes"] - of["plan.used_bytes"];
    let (said, wanted) = (more(&page), more(&told));
    assert!((said - wanted).abs() < 48 << 20, "{said}, {wanted}");
    assert_eq!(planned["fits"], told_fits(state, &asked).to_string());
    let many = walk.step("planned too many");
    assert_eq!(many["fits"], "false", "{many}");
    assert!(
        many["text"].as_str().unwrap().contains("too little"),
        "{many}"
    );
    let placed = walk.step("placed");
    let [north, south] = prints.each_ref().map(|file| file.to_str().unwrap());
    let place = ["plan", "--least", "1M", "--place", north, south];
    let proposal = json(state, &place);
    let shown = shown(&placed);
    for name in ["now_bytes", "then_bytes"] {
        let told: i128 = proposal[name].as_i64().unwrap().into();
        assert_eq!(shown[&format!("place.{name}")], told, "{proposal}");
    }
    let moves = proposal["moves"].as_array().unwrap();
    assert_eq!(moves.len(), 1, "{proposal}");
    let part = |name: &str| moves[0][name].as_str().unwrap().to_owned();
    let told = format!(
        "{} from {} to {}: saves ",
        part("vm"),
        part("from"),
        part("to")
    );
    assert!(
        placed["moves"][0].as_str().unwrap().starts_with(&told),
        "{placed}"
    );
    // Half of the contents are equal; the other half only look equal if they are rounded.
    assert_eq!(moves[0]["saves_bytes"], 4000 * 4096);
}

fn told_fits(state: &Path, asked: &str) -> bool {
    json(state, &["plan", "--vms", asked])["fits"] == true
}

fn login(client: &Client, role: Role) -> String {
    let code: LoginCode = client
        .post("/v1/session/codes", &CodeRequest { role })
        .unwrap();
    code.urls.last().unwrap().clone()
}

/// Prepares a booted VM and two clones of it, all of which are paused.
fn prepare(served: &Served<'_>, client: &Client, state: &Path) {
    served.run_warm(&Lab::spec(NAMES[0], "trixie-a", MEMORY, DiskMode::Buffered).unwrap());
    support::wait_stats(
        "the agent's inventory",
        BOOT,
        || client.get("/v1/fold").unwrap(),
        |stats: &EngineStats| stats.vms.iter().any(|vm| vm.agent_ready),
    );
    let _: Value = client
        .post("/v1/snapshots", &SaveRequest::new(NAMES[0], "warm"))
        .unwrap();
    for name in &NAMES[1..] {
        let restore = RestoreRequest {
            renew: Renew::Network,
            ..RestoreRequest::new(*name)
        };
        let _: VmInfo = client.post("/v1/snapshots/warm/restore", &restore).unwrap();
    }
    support::wait_stats(
        "the clones' agents",
        BOOT,
        || client.get("/v1/fold").unwrap(),
        |stats| stats.vms.len() == NAMES.len() && stats.vms.iter().all(|vm| vm.agent_ready),
    );
    // Some pages may be folded meanwhile; the figures are compared in any case.
    std::thread::sleep(Duration::from_secs(3));
    for name in NAMES {
        support::qmp(state, name)
            .execute("stop", Value::Null)
            .unwrap();
    }
    // Earlier commands are complete after this time.
    std::thread::sleep(Duration::from_secs(2));
}

/// Waits until the brake has read page tables after the guests were paused, because the borrower
/// was started after that. Until then, a page shows older figures.
fn wait_looked(client: &Client) {
    wait_for("the brake has looked", Duration::from_secs(60), || {
        let debt: DebtReport = client.get("/v1/debt").unwrap();
        let names: Vec<&str> = debt.vms.iter().map(|vm| vm.name.as_str()).collect();
        if names.contains(&BORROWER) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(200));
        Err(format!("{names:?}"))
    });
}

/// Compares the matrix of shared pages with page frame numbers, and the memory map with the ledger.
fn check_views(said: &BTreeMap<&str, BTreeMap<String, i128>>, state: &Path, now: &FullReport) {
    let (a, b) = (support::ram(state, NAMES[1]), support::ram(state, NAMES[2]));
    let frames = shared_frames((a.0, &a.1), (b.0, &b.1)).unwrap();
    let frames = i128::from(frames * PAGE_SIZE);
    let pair = said["sharing"][&format!("pair.{}.{}", NAMES[1], NAMES[2])];
    println!("clones have {pair} bytes in common, by page frames {frames}");
    assert!(frames > 16 << 20, "clones of one image share");
    // Store pages that neither VM has accessed since are in no page table.
    assert!(pair >= frames * 98 / 100, "{pair} {frames}");
    let own = &said["vm"];
    let vm = now
        .ledger
        .vms
        .iter()
        .find(|vm| vm.name == NAMES[2])
        .unwrap();
    for (state, bytes) in [
        ("private", vm.private_bytes),
        ("unfolded", vm.unfolded_bytes),
        ("folded", vm.folded_bytes),
        ("zero", vm.zero_bytes),
        ("free", vm.free_bytes),
    ] {
        let shown = own[&format!("map.{}.{state}", NAMES[2])];
        assert_eq!(shown, bytes.0.into(), "{state}");
    }
}

/// Tests further actions of an operator. Each is checked at the daemon, not only on the page.
fn more_actions(walk: &mut Walk, client: &Client, state: &Path) {
    walk.step("host added");
    assert_eq!(json(state, &["host", "list"]), serde_json::json!(["third"]));
    walk.on();
    walk.step("lends");
    let lending = || json(state, &["leases"])["lending"].clone();
    assert_eq!(lending()["max_bytes"], 32 << 20);
    assert_eq!(lending()["listens"], "127.0.0.1");
    walk.on();
    walk.step("lends no more");
    let lending = lending();
    assert!(
        lending.is_null() || lending["is_ending"] == true,
        "{lending}"
    );
    walk.on();
    walk.step("borrowed");
    assert_eq!(json(state, &["host", "list"]), serde_json::json!([]));
    let leases: LeaseReport = client.get("/v1/leases").unwrap();
    let places: Vec<SwapPlace> = leases.borrowed.iter().map(|b| b.place).collect();
    assert_eq!(places, [SwapPlace::Lent], "{leases:?}");
    walk.on();
    walk.step("built");
    let segments = json(state, &["segment", "list"]);
    assert_eq!(segments[0]["segment"]["name"], "tools", "{segments}");
    walk.on();
    walk.step("made");
    let vms: Vec<VmInfo> = client.get("/v1/vms").unwrap();
    let made = vms.iter().find(|vm| vm.name == MADE).unwrap();
    // The firmware takes a part of the RAM.
    assert!((60 << 20..=64 << 20).contains(&made.ram_bytes), "{made:?}");
    assert_eq!(made.domain, None);
    support::qmp(state, NAMES[0])
        .execute("cont", Value::Null)
        .unwrap();
    walk.on();
    let ran = walk.step("ran");
    let said = ran["ran"].as_str().unwrap();
    assert!(said.starts_with("exit code 3\n42\n"), "{ran}");
    let ram = format!("{} MiB", MEMORY.0 >> 20);
    assert!(ran["causes"].as_str().unwrap().contains(&ram), "{ran}");
    walk.on();
    for (step, wanted) in [("VM paused", "paused"), ("VM resumed", "running")] {
        walk.step(step);
        let vms: Vec<VmInfo> = client.get("/v1/vms").unwrap();
        let guest = vms.iter().find(|vm| vm.name == NAMES[0]).unwrap();
        assert_eq!(guest.state, wanted);
        walk.on();
    }
    walk.step("cloned");
    let users = || {
        let snapshots = json(state, &["snapshot", "list"]);
        let mut all = snapshots.as_array().unwrap().iter();
        all.find(|s| s["name"] == "second")
            .map(|s| s["users"].clone())
    };
    assert_eq!(users(), Some(serde_json::json!([CLONE])));
    let runs = |name: &str| {
        let vms: Vec<VmInfo> = client.get("/v1/vms").unwrap();
        vms.iter().any(|vm| vm.name == name)
    };
    assert!(runs(CLONE));
    walk.on();
    walk.step("restored");
    assert!(runs(BACK));
    let of_both = users().unwrap();
    assert_eq!(of_both.as_array().unwrap().len(), 2, "{of_both}");
    walk.on();
    walk.step("forked");
    let parent = |name: &str| {
        let snapshots = json(state, &["snapshot", "list"]);
        let mut all = snapshots.as_array().unwrap().iter();
        all.find(|s| s["name"] == name).unwrap()["parent"].clone()
    };
    // The forked VM's memory is a layer of its own.
    assert_ne!(parent("layer"), Value::Null);
    assert_eq!(parent("merged"), "second");
    walk.on();
    walk.step("made complete");
    assert_eq!(parent("layer"), Value::Null);
    walk.on();
    walk.step("removed");
    assert!(!runs(CLONE) && !runs(FORK) && !runs(BACK));
    assert_eq!(users(), None);
    assert_eq!(parent("merged"), Value::Null);
    let boot = || exec(client, NAMES[0], BOOT_ID).stdout;
    let before = boot();
    walk.on();
    walk.step("rebooted");
    assert_ne!(boot(), before);
    walk.on();
    let walked = walk.step("budget");
    let path = [
        "Budget …",
        "CPU, percent",
        "Pages a second (0: no limit)",
        "Cancel",
        "Set the budget",
        "Budget …",
    ];
    assert_eq!(walked["walked"], serde_json::json!(path));
    assert_eq!(json(state, &["fold", "status"])["cpu_share"], 0.12);
    support::qmp(state, NAMES[0])
        .execute("stop", Value::Null)
        .unwrap();
    walk.on();
}

#[test]
fn dashboard_pages_show_states_that_a_pretended_daemon_reports() {
    let Some(chromium) = browser_or_skip() else {
        return;
    };
    let mut tests = Command::new("node");
    tests.arg(repository().join("web/test/pages.mjs"));
    let ran = tests.arg(chromium).output().unwrap();
    println!("{}", String::from_utf8_lossy(&ran.stdout));
    let words = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "a page's test failed: {words}");
}

#[test]
fn ksm_is_started_for_a_trust_domain_and_stopped_on_the_dashboard() {
    // Only this test's VM may have mergeable memory on the host.
    let Some(_turn) = support::turn() else { return };
    let Some(chromium) = browser_or_skip() else {
        return;
    };
    // The guard is dropped here, because the daemon will use KSM.
    if take().is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path();
    let _restore = Restore;
    let mut served = Served::new(state, &[MADE]).with(&["--listen", "127.0.0.1:0"]);
    served.start();
    let client = served.answers();
    served.run(&paused(MADE, Some(KIND)));
    let url = login(&client, Role::Operate);
    let results = repository().join("results/dashboard");
    let arguments = [
        &url,
        results.to_str().unwrap(),
        MADE,
        chromium.to_str().unwrap(),
        BORROWER,
        KIND,
    ];
    let mut walk = Walk::begin_with(&arguments, &[("MEMFOLD_DASHBOARD_ONLY", "ksm")]);
    let steering = || json(state, &["ksm", "status"])["steering"].clone();
    walk.step("ksm steered");
    assert_eq!(steering()["domain"], KIND);
    walk.on();
    walk.step("ksm stopped");
    assert_eq!(steering(), Value::Null);
    walk.on();
    let end = walk.step("end");
    assert_eq!(end["faults"], serde_json::json!([]));
}

#[test]
fn every_dashboard_page_in_chromium_shows_the_figures_of_the_report() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let Some(chromium) = browser_or_skip() else {
        return;
    };
    let began = Instant::now();
    let directory = tempfile::Builder::new()
        .prefix("memfold-web.")
        .tempdir()
        .unwrap();
    let state = directory.path();
    let other = tempfile::tempdir().unwrap();
    let mut served = Served::new(state, &ALL).with(&["--listen", "127.0.0.1:0", "--host", "here"]);
    served.start();
    let client = served.answers();
    let registry = state.join("s");
    let more = [
        "--host",
        "neighbour",
        "--registry",
        registry.to_str().unwrap(),
    ];
    let mut lender = Served::new(other.path(), &[]).with(&more);
    lender.start();
    lender.answers();
    prepare(&served, &client, state);
    lend(state, other.path());
    println!("VMs are there after {:.0?}", began.elapsed());

    let times = dose(TIMES, 0) == 1;
    let pid = client.get::<VersionInfo>("/v1/version").unwrap().pid;
    let alone = times.then(|| cpu_percent(pid, HOLD));
    wait_looked(&client);

    let results = repository().join("results/dashboard");
    let prints = fingerprints(other.path());
    let (files, disk) = (other.path().join("files"), other.path().join("made.raw"));
    std::fs::create_dir(&files).unwrap();
    std::fs::write(files.join("tool"), vec![7; 100_000]).unwrap();
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let logins: Vec<String> = (0..if times { LOGINS } else { 2 })
        .map(|_| login(&client, Role::Operate))
        .collect();
    let walk = [
        &logins.join(" "),
        results.to_str().unwrap(),
        NAMES[2],
        chromium.to_str().unwrap(),
        BORROWER,
        KIND,
        NAMES[0],
        files.to_str().unwrap(),
        disk.to_str().unwrap(),
        prints[0].to_str().unwrap(),
        prints[1].to_str().unwrap(),
    ];
    let mut walk = Walk::begin(&walk);
    let load = walk.step("load");
    println!("load: {load}");
    // The guests are paused; other load of this host is not the page's fault.
    for name in ["usable_ms", "again_ms"] {
        let all = load[name].as_array().unwrap();
        assert_eq!(all.len(), logins.len());
        let best = all
            .iter()
            .filter_map(Value::as_f64)
            .fold(f64::MAX, f64::min);
        assert!(best < 1000.0 || !times, "{name}: {all:?}");
    }
    let bytes = load["bytes"].as_u64().unwrap();
    assert!(bytes <= 300_000, "the whole page has {bytes} bytes");
    let address = load["address"].as_str().unwrap();
    assert!(!address.contains("login"), "the code is not in the address");

    walk.step("ready");
    let before = told(state, &client);
    walk.on();
    let mut said = BTreeMap::new();
    let (mut compared, mut exact) = (0, 0);
    let mut pages = Vec::new();
    for page in [
        "host",
        "vms",
        "vm",
        "swap",
        "rightsize",
        "sharing",
        "snapshots",
        "segments",
        "leases",
        "estimate",
        "plan",
        "doctor",
        "events",
    ] {
        let figures = walk.step("figures");
        assert_eq!(figures["page"], page);
        pages.push((page, shown(&figures)));
        let text = figures["text"].as_str().unwrap();
        for words in match page {
            "swap" | "vms" => ["lent by neighbour", "64.0 MiB"],
            "host" => ["Copy-on-write debt", "brake: ok"],
            "doctor" => ["debt", "the brake is off"],
            "rightsize" => ["The ladder", "Watch: say what would be done"],
            "events" => ["swap disk is on 64.0 MiB of neighbour", "'warm' was made"],
            _ => continue,
        } {
            assert!(text.contains(words), "{page}: no '{words}' in {text}");
        }
    }
    check_plans(&mut walk, state, &prints);
    walk.step("read");
    let after = told(state, &client);
    for (page, figures) in pages {
        let (all, of_them) = compare(page, &figures, &before, &after);
        compared += all;
        exact += of_them;
        said.insert(page, figures);
    }
    println!("{compared} figures are the report's, {exact} of them to the byte");
    // At least the clones' figures are exact.
    assert!(exact >= 2 * 5 + 8, "{exact}");
    check_views(&said, state, &report(state));
    walk.on();
    walk.step("looks");

    let paused = |client: &Client| client.get::<EngineStats>("/v1/fold").unwrap().paused;
    walk.step("cancelled");
    assert!(!paused(&client));
    walk.on();
    walk.step("paused");
    assert!(paused(&client));
    walk.on();
    walk.step("limited");
    assert_eq!(json(state, &["debt"])["cover_percent"], 40.0);
    walk.on();
    let refusal = walk.step("refused");
    assert!(
        refusal["refusal"].as_str().unwrap().contains("warm"),
        "{refusal}"
    );
    let blast = walk.step("blast");
    let leases: LeaseReport = client.get("/v1/leases").unwrap();
    let hurt: Vec<&str> = leases
        .blast
        .iter()
        .flat_map(|blast| blast.vms.iter().map(|vm| &*vm.effect))
        .collect();
    let rows = blast["rows"].as_array().unwrap();
    assert!(rows.len() == hurt.len() && !rows.is_empty(), "{blast}");
    for (row, effect) in rows.iter().zip(hurt) {
        assert!(row.as_str().unwrap().ends_with(effect), "{blast} {effect}");
    }
    walk.step("returned");
    let leases: LeaseReport = client.get("/v1/leases").unwrap();
    let lent = |borrowed: &Borrowed| borrowed.place != SwapPlace::OnDisk;
    assert!(!leases.borrowed.iter().any(lent), "{leases:?}");
    walk.on();
    let refusal = walk.step("volume");
    let said = refusal["refusal"].as_str().unwrap();
    assert!(
        said.contains("volume") || said.contains("none/swap"),
        "{said}"
    );
    more_actions(&mut walk, &client, state);
    walk.step("stopped");
    let left: Vec<VmInfo> = client.get("/v1/vms").unwrap();
    let names: Vec<&str> = left.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(names, [BORROWER, MADE, NAMES[1], NAMES[0]]);
    walk.on();

    walk.step("hold begins");
    walk.on();
    let open = times.then(|| cpu_percent(pid, HOLD));
    walk.step("hold ends");
    if let (Some(open), Some(alone)) = (open, alone) {
        println!(
            "the daemon with one open dashboard: {open:.2} % of a core, without: {alone:.2} %"
        );
        assert!(open - alone <= 1.0, "{open} % - {alone} % of a core");
    }
    walk.on_with(&login(&client, Role::Read));

    let reader = walk.step("reader");
    assert_eq!(reader["buttons"], serde_json::json!([]), "{reader}");
    assert_eq!(reader["forced"], 403);
    let braked = walk.step("braked");
    for (card, words) in [
        ("braked", "No VM is started."),
        ("braked", "Missing"),
        ("did", "warning -> BRAKED"),
        ("did", "92 VMs more that owe less"),
    ] {
        let text = braked[card].as_str().unwrap();
        assert!(text.contains(words), "no '{words}' in {text}");
    }
    let hundred = walk.step("hundred");
    println!("{hundred}");
    // In one of three runs, there are 60 frames a second, and few of them take twice as long.
    let is_smooth = |run: &Value| {
        let ms = |name: &str| run[name].as_f64().unwrap();
        ms("median_ms") <= 17.5 && ms("p95_ms") <= 34.0
    };
    let runs = hundred["runs"].as_array().unwrap();
    assert!(runs.iter().any(is_smooth) || !times, "{hundred}");
    let end = walk.step("end");
    assert_eq!(end["faults"], serde_json::json!([]));
    let violations = end["violations"].as_array().unwrap();
    let serious = |v: &&Value| v["impact"] == "serious" || v["impact"] == "critical";
    let serious: Vec<&Value> = violations.iter().filter(serious).collect();
    assert!(serious.is_empty(), "{serious:#?}");
    println!(
        "{} faults below serious; {:.0?} in all",
        violations.len(),
        began.elapsed()
    );
}

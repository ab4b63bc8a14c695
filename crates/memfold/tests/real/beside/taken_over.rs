//! Tests what a QEMU can do to others after its guest has taken it over.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use memfold_api::VersionInfo;
use memfold_fold::EngineStats;
use memfold_host::qemu_users::DEFAULT_RANGE;
use memfold_lab::{DiskMode, Lab};
use memfold_units::ByteSize;
use memfold_vm::{Vm, VmDirectory};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::served::{Served, exec, succeeds, wait_agent};
use crate::support;

const NAMES: [&str; 2] = ["taken", "victim"];
const SNAPSHOT: &str = "of-victim";
const MEMORY: ByteSize = ByteSize::mib(512);

/// Script that makes two guests cache the same pages.
const READ: &str = "cat /usr/lib/*-linux-gnu/*.so* | md5sum";

/// One attempt of the program in QEMU's place.
#[derive(Debug, Deserialize)]
struct Attempt {
    what: String,
    on: String,
    /// Name of the error, or "done".
    result: String,
    /// Whether the attempt must succeed, which shows that the program has QEMU's place.
    allowed: bool,
}

fn field(status: &str, name: &str) -> String {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_default().trim().to_owned()
}

/// Checks the user and the sandbox of a QEMU. Returns its user's number.
fn check_process(pid: i32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let numbers = field(&status, "Uid:");
    let numbers: Vec<u32> = numbers.split('\t').map(|n| n.parse().unwrap()).collect();
    assert!(DEFAULT_RANGE.contains(&numbers[0]), "{status}");
    assert!(numbers.iter().all(|n| *n == numbers[0]), "{status}");
    assert_eq!(field(&status, "Groups:"), numbers[0].to_string());
    for capabilities in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_eq!(field(&status, capabilities), "0".repeat(16), "{status}");
    }
    // A seccomp filter is active.
    assert_eq!(field(&status, "Seccomp:"), "2", "{status}");
    numbers[0]
}

/// Returns the attempts of a program that has the user and the descriptors of a QEMU.
fn attempts(order: &Value) -> Vec<Attempt> {
    let mut child = Command::new("python3")
        .args(["-c", include_str!("taken_over.py")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(order.to_string().as_bytes()).unwrap();
    drop(input);
    let done = child.wait_with_output().unwrap();
    let said = String::from_utf8(done.stdout).unwrap();
    assert!(done.status.success(), "{said}");
    let lines = said.lines();
    lines.map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn a_qemu_that_was_taken_over_reaches_neither_the_page_store_nor_other_vms_nor_the_daemon() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::Builder::new()
        .prefix("memfold-taken.")
        .tempdir()
        .unwrap();
    let state = directory.path();
    // Paths must not protect more than they do in /run/memfold and /var/lib/memfold.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(state, open).unwrap();
    let mut served = Served::new(state, &NAMES);
    served.start();
    let client = served.answers();
    let version: VersionInfo = client.get("/v1/version").unwrap();
    for name in NAMES {
        let mut spec = Lab::spec(name, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
        spec.domain = Some("lab".into());
        served.run_warm(&spec);
    }
    for name in NAMES {
        wait_agent(&client, name);
        exec(&client, name, READ);
    }
    let stats = || client.get::<EngineStats>("/v1/fold").unwrap();
    let is_folded = |stats: &EngineStats| {
        let mut vms = NAMES.iter().map(|name| support::vm(stats, name));
        vms.all(|vm| vm.folded_pages > 1000)
    };
    let limit = std::time::Duration::from_secs(240);
    support::wait_stats("both VMs are folded", limit, stats, is_folded);
    succeeds(state, &["snapshot", "save", "victim", SNAPSHOT]);

    let vms = NAMES.map(|name| Vm::find(state, name).unwrap());
    let [taken, victim] = &vms;
    let pid = |vm: &Vm| vm.pid().as_raw_nonzero().get();
    assert_ne!(check_process(pid(taken)), check_process(pid(victim)));
    let overlays = |vm: &Vm| -> Vec<PathBuf> { vm.record().unwrap().overlays.clone() };
    let [own, theirs] = [taken, victim].map(|vm| {
        let now = Vm::find(state, vm.name()).unwrap();
        overlays(&now)
    });
    let place = VmDirectory::of(state, "victim");
    let saved = state.join("snapshots").join(SNAPSHOT);
    let mut files: Vec<(String, PathBuf)> = theirs
        .iter()
        .map(|path| ("victim's overlay".to_owned(), path.clone()))
        .collect();
    for (what, path) in [
        ("victim's console log", place.console_log()),
        ("victim's description", place.spec()),
        ("snapshot's memory", saved.join("ram")),
        ("snapshot's disk", saved.join("disk0.qcow2")),
        ("snapshot's devices", saved.join("devices")),
        ("daemon's log", state.join("daemon.log")),
    ] {
        if what != "daemon's log" {
            assert!(path.exists(), "{}", path.display());
            files.push((what.to_owned(), path));
        }
    }
    let sockets = [
        ("daemon's socket", state.join("s")),
        ("victim's monitor", place.qmp()),
        ("daemon's monitor of the victim", place.daemon_qmp()),
        ("victim's agent", place.agent()),
        ("victim's library", place.library()),
        ("victim's console", place.console()),
    ];
    let made = attempts(&json!({
        "taken": pid(taken), "victim": pid(victim), "daemon": version.pid,
        "own": own, "files": files, "sockets": sockets, "vms": state.join("vms"),
    }));
    println!("| attempt | on | result |\n|---|---|---|");
    for Attempt {
        what, on, result, ..
    } in &made
    {
        println!("| {what} | {on} | {result} |");
    }
    let (allowed, refused): (Vec<_>, Vec<_>) = made.iter().partition(|made| made.allowed);
    let has_place = |on: &str| allowed.iter().any(|a| a.on == on && a.result == "done");
    assert!(
        has_place("page store") && has_place("own overlay"),
        "{allowed:?}"
    );
    let is_refusal = |result: &str| ["EACCES", "EPERM", "EBADF", "EINVAL"].contains(&result);
    let done: Vec<_> = refused.iter().filter(|a| !is_refusal(&a.result)).collect();
    assert!(done.is_empty(), "{done:#?}");
    assert!(refused.len() > 40, "{} attempts", refused.len());
    // The victim has noticed nothing.
    exec(&client, "victim", READ);
}

#[test]
fn user_root_keeps_the_daemons_rights_in_qemu() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let mut spec = Lab::spec("rooted", "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    spec.user = Some("root".into());
    let vm = memfold_vm::start(directory.path(), spec).unwrap();
    let pid = vm.pid().as_raw_nonzero();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    vm.stop(std::time::Duration::ZERO).unwrap();
    assert_eq!(field(&status, "Uid:"), "0\t0\t0\t0");
    assert_eq!(vm.user(), None);
}

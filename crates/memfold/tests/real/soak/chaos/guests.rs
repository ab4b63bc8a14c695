//! VMs of the chaos test: the load in their guests, and the check of the guests' data at the end.

use std::os::unix::fs::FileExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use memfold_api::{Client, ExecRequest, ExecResult, VmInfo};
use memfold_lab::{DiskMode, Lab};
use memfold_testkit::{patience, wait_for};
use memfold_units::ByteSize;
use memfold_vm::{Qmp, Vm, VmDirectory};

use super::disturb::KEPT;
use super::testbed::{LENT_MIB, Testbed};
use crate::beside::lend::SWAPPER;
use crate::served::{self, exec, wait_agent};
use crate::support;

const PEST: &str = include_str!("../../guest/pest.sh");

/// File that ends the guests' programs.
const STOP: &str = "/run/chaos.stop";

/// Memory that the swapping program uses, in MiB; its guest has less.
const ARRAY_MIB: u64 = 384;

/// Time limit of the guests' final checks.
const CHECKS: Duration = Duration::from_secs(600);

/// Returns the shell script that runs a program in a guest which neither the agent nor the daemon
/// ends.
fn unit(name: &str, command: &str) -> String {
    format!(
        "systemd-run -q --unit={name} -p OOMScoreAdjust=-500 -p StandardOutput=file:/run/{name}.out -p StandardError=file:/run/{name}.err {command}\n"
    )
}

/// Starts `writer`, `swapper`, and `clone-1`, a clone of `writer` that continues all of its work.
pub fn begin(testbed: &Testbed, seed: u64) {
    let mut writer = Lab::spec("writer", "trixie-a", support::MEMORY, DiskMode::Buffered).unwrap();
    writer.segment_slots = 2;
    let mut swapper = Lab::spec(
        "swapper",
        "trixie-b",
        ByteSize::mib(320),
        DiskMode::Buffered,
    )
    .unwrap();
    swapper.swap = Some(ByteSize::mib(LENT_MIB));
    for spec in [&writer, &swapper] {
        served::run_warm(&testbed.daemon.socket(), testbed.state(), spec);
    }
    let client = testbed.client();
    for name in ["writer", "swapper"] {
        wait_agent(&client, name);
    }
    let pest = support::file("pest.sh", PEST)
        + &unit("pest", &format!("/opt/pest.sh {} {STOP}", seed % 32_768));
    let swap = format!(
        "{}gcc -O2 -o /opt/swapper /opt/swapper.c\n{}{pest}",
        support::file("swapper.c", SWAPPER),
        unit(
            "swapper",
            &format!("/opt/swapper {ARRAY_MIB} /run/swapper {STOP}")
        ),
    );
    exec(&client, "swapper", &swap);
    let write = format!(
        "{}\n{}\nsums /run/sums.before\n{}{pest}",
        support::install(),
        support::sums(),
        unit(
            "rewrite",
            &format!("/opt/rewrite.py /var/rewritten 1e9 {seed} {STOP}")
        ),
    );
    exec(&client, "writer", &write);
    for words in [
        &["snapshot", "save", "writer", "seed", "--keep", "hot"][..],
        &["clone", "seed", "--prefix", "clone"],
        &["borrow", "swapper"],
    ] {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        let done = testbed.command(&words).output().unwrap();
        assert!(
            done.status.success(),
            "{words:?}: {}",
            String::from_utf8_lossy(&done.stderr)
        );
    }
}

/// Copies programs of the guests' image, for segments.
pub fn copy_programs(testbed: &Testbed) {
    let usr = testbed.root.join("programs/usr");
    std::fs::create_dir_all(&usr).unwrap();
    let images = memfold_host::guest_images().unwrap();
    let copy = format!("rdump /usr/sbin {}", usr.display());
    let done = Command::new("debugfs")
        .args(["-R", &copy])
        .arg(&images["trixie-a"].disk)
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
}

/// Starts a QEMU that memfold does not know, paused. (KSM cannot be steered while memory of others
/// could be merged.)
pub fn foreign(testbed: &Testbed) -> std::process::Child {
    let monitor = format!(
        "unix:{},server=on,wait=off",
        testbed.root.join("foreign.sock").display()
    );
    Command::new("qemu-system-x86_64")
        .args([
            "-S",
            "-machine",
            "pc,mem-merge=off",
            "-nodefaults",
            "-display",
            "none",
            "-accel",
            "tcg",
            "-m",
            "64",
            "-qmp",
            &monitor,
        ])
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

fn list(client: &Client) -> Vec<VmInfo> {
    client.get("/v1/vms").unwrap_or_default()
}

/// Returns the end of a guest's console output, with the messages of its kernel and of `pest.sh`.
fn console_end(testbed: &Testbed, name: &str) -> String {
    let file = VmDirectory::of(testbed.state(), name).console_log();
    let said = std::fs::read(file).unwrap_or_default();
    String::from_utf8_lossy(&said[said.len().saturating_sub(4000)..]).into_owned()
}

/// Waits until all VMs of the test run and their agents answer. A VM that a full disk has stopped
/// is resumed.
pub fn settle(testbed: &Testbed) {
    let client = testbed.client();
    wait_for(
        "all VMs run and their agents answer",
        Duration::from_secs(240),
        || {
            let vms = list(&client);
            for vm in vms.iter().filter(|vm| vm.state == "io-error") {
                let resumed: Result<VmInfo, _> =
                    client.post(&format!("/v1/vms/{}/resume", vm.name), &());
                testbed.faults.note(&format!(
                    "'{}' is resumed: {:?}",
                    vm.name,
                    resumed.map(|vm| vm.state)
                ));
            }
            let is_well = |name: &&str| {
                vms.iter()
                    .any(|vm| vm.name == **name && vm.state == "running" && vm.agent.is_some())
            };
            let unwell: Vec<_> = KEPT.iter().filter(|name| !is_well(name)).collect();
            if unwell.is_empty() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(500));
            let seen = |vm: &VmInfo| {
                (
                    vm.name.clone(),
                    vm.state.clone(),
                    vm.state_cause.clone(),
                    vm.agent.clone(),
                )
            };
            let consoles: Vec<String> = unwell
                .iter()
                .map(|name| format!("{name}: {}", console_end(testbed, name)))
                .collect();
            Err((vms.iter().map(seen).collect::<Vec<_>>(), consoles))
        },
    );
}

/// Runs a script in a guest, and repeats that until the agent has done it, because the guest may be
/// stopped.
pub fn ask(client: &Client, name: &str, script: &str) -> String {
    let request = ExecRequest {
        script: script.to_owned(),
        timeout_s: 300.0,
    };
    let end = Instant::now() + patience(CHECKS);
    loop {
        let done: Result<ExecResult, _> = client.post(&format!("/v1/vms/{name}/exec"), &request);
        match done {
            Ok(done) if done.code == 0 => return done.stdout,
            Ok(done) => return format!("exit code {}: {}{}", done.code, done.stdout, done.stderr),
            Err(error) if Instant::now() > end => return format!("no answer: {error}"),
            Err(_) => std::thread::sleep(Duration::from_secs(1)),
        }
    }
}

/// Checks that the guests have found no wrong byte so far.
pub fn check_so_far(testbed: &Testbed) {
    let client = testbed.client();
    for name in ["writer", "clone-1"] {
        let said = ask(
            &client,
            name,
            "cat /run/rewrite.err; systemctl is-active rewrite",
        );
        if said.trim() != "active" {
            testbed.faults.add(format!("{name} before the end: {said}"));
        }
    }
    let said = ask(
        &client,
        "swapper",
        "tail -n 1 /run/swapper; systemctl is-active swapper",
    );
    let mut words = said.split_whitespace();
    if words.nth(2) != Some("0") || words.last() != Some("active") {
        testbed
            .faults
            .add(format!("swapper before the end: {said}"));
    }
}

/// Writes the first byte of each folded page of a stopped VM over itself, so that the kernel copies
/// all of these pages. Returns their number.
pub fn unfold(testbed: &Testbed, name: &str) -> u64 {
    let vm = Vm::find(testbed.state(), name).unwrap();
    let mut qmp = Qmp::connect(
        &VmDirectory::of(testbed.state(), name).qmp(),
        Duration::from_secs(60),
    )
    .unwrap();
    qmp.query("stop").unwrap();
    let pid = vm.pid().as_raw_nonzero();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let memory = std::fs::File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{pid}/mem"))
        .unwrap();
    let mut pages = 0;
    // The library's own views of the store are shared mappings, and are left out.
    let folded = |line: &&str| line.contains("memfold:lab") && line.contains(" rw-p ");
    for line in maps.lines().filter(folded) {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let [from, to] = [from, to].map(|n| u64::from_str_radix(n, 16).unwrap());
        for at in (from..to).step_by(4096) {
            let mut byte = [0];
            memory.read_exact_at(&mut byte, at).unwrap();
            memory.write_all_at(&byte, at).unwrap();
            pages += 1;
        }
    }
    qmp.query("cont").unwrap();
    pages
}

/// Checks the final output of a guest with `rewrite.py`.
fn check_writer(testbed: &Testbed, client: &Client, name: &str) {
    let script = format!(
        "{}\ntouch {STOP}; while systemctl is-active -q rewrite; do sleep 1; done; cat /run/rewrite.err /run/rewrite.out",
        support::sums()
    );
    let said = ask(client, name, &script);
    let operations = said.trim().strip_prefix("rewrite errors 0 operations ");
    let operations = operations.and_then(|count| count.parse::<u64>().ok());
    match operations {
        Some(count) if count > 0 => testbed
            .faults
            .note(&format!("{name}: {count} operations, no error")),
        _ => testbed.faults.add(format!("{name}: {said}")),
    }
}

/// Checks all data that the guests have written, and compares the data that they have read with the
/// originals.
pub fn check(testbed: &Testbed) {
    let client = testbed.client();
    std::thread::scope(|scope| {
        for name in ["writer", "clone-1"] {
            let testbed = &testbed;
            scope.spawn(move || {
                let client = testbed.client();
                check_writer(testbed, &client, name);
                let compare = format!(
                    "{}\nsums /run/sums.after; cmp /run/sums.before /run/sums.after",
                    support::sums()
                );
                let said = ask(&client, name, &compare);
                if !said.is_empty() {
                    testbed
                        .faults
                        .add(format!("{name}: files of /usr differ: {said}"));
                }
            });
        }
        let script = format!(
            "touch {STOP}; while systemctl is-active -q swapper; do sleep 1; done; tail -n 1 /run/swapper"
        );
        let said = ask(&client, "swapper", &script);
        if said.trim() != format!("end {} pages, 0 words wrong", ARRAY_MIB * 256) {
            testbed.faults.add(format!("swapper: {said}"));
        }
        let errors = ask(
            &client,
            "swapper",
            "dmesg | grep -iE 'I/O error|(read|write)-error' | head -n 3; true",
        );
        if !errors.is_empty() {
            testbed
                .faults
                .add(format!("swapper: its kernel has seen errors: {errors}"));
        }
    });
    for name in KEPT {
        let said = ask(&client, name, "sort /run/pest.out | uniq -c | tr '\\n' ' '");
        testbed.faults.note(&format!("agent of {name}: {said}"));
    }
}

/// Checks that VMs started from snapshots that were saved meanwhile have no wrong byte, either.
pub fn check_saved(testbed: &Testbed, snapshot: &str) {
    let client = testbed.client();
    let words = ["snapshot", "restore", snapshot, "--as", "t-saved"].map(str::to_owned);
    let done = testbed.command(&words).output().unwrap();
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        testbed
            .faults
            .add(format!("'{snapshot}' cannot be restored: {said}"));
        return;
    }
    check_writer(testbed, &client, "t-saved");
    let words = ["vm", "stop", "t-saved", "--timeout", "0"].map(str::to_owned);
    let done = testbed.command(&words).output().unwrap();
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        testbed
            .faults
            .add(format!("a VM of '{snapshot}' cannot be stopped: {said}"));
    }
}

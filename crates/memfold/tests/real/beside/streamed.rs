//! Test of VMs that run from a snapshot while it is being fetched from an HTTP server that is slow,
//! lies and goes away.

use std::fs::{read_dir, read_link, read_to_string};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memfold_api::{ErrorBody, SaveRequest, VerifyReport, VmInfo};
use memfold_lab::{DiskMode, HttpStore, Lab, StoreMode};
use memfold_snapshot::{Manifest, SnapshotInfo};
use memfold_testkit::{slowness, wait_until};
use memfold_transfer::{PullReport, PushReport};
use memfold_units::ByteSize;
use memfold_vm::{Qmp, Vm, VmDirectory, log_tail};

use super::disks::{CHECK_DISKS, write_to};
use super::object_store::memfold;
use crate::beside::snapshots::{VERIFY, rewrite_memory};
use crate::served::{Served, exec, wait_agent};
use crate::support;

const CLONES: [&str; 2] = ["copy-1", "copy-2"];

/// Bytes a second that the server sends.
const BYTES_PER_S: f64 = 20e6;

/// Returns what the list says of the snapshot. A daemon that has just started lists it when the
/// store answers.
fn problem(state: &Path) -> Option<String> {
    let all: Vec<SnapshotInfo> = memfold(state, &["snapshot", "list"]).unwrap();
    match all.as_slice() {
        [] => Some("not listed".into()),
        [snapshot] => snapshot.problem.clone(),
        more => panic!("{more:?}"),
    }
}

fn vms(state: &Path) -> Vec<VmInfo> {
    memfold(state, &["vm", "list"]).unwrap()
}

/// If the test fails, prints what can explain VMs that stand still: the daemon's warnings, QEMU's
/// state and log, and the numbers of threads that wait for pages.
struct Explain<'a>(&'a Path);

impl Drop for Explain<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let log = read_to_string(self.0.join("daemon.log")).unwrap_or_default();
        let is_warning = |line: &&str| line.contains("WARN") || line.contains("ERROR");
        for line in log.lines().filter(is_warning) {
            eprintln!("{line}");
        }
        for name in CLONES {
            let Ok(vm) = Vm::find(self.0, name) else {
                eprintln!("VM {name} does not run");
                continue;
            };
            // QEMU's main loop may be what stands still.
            let qmp = Qmp::connect(&VmDirectory::of(self.0, name).qmp(), Duration::from_secs(5));
            let status = qmp.and_then(|mut qmp| qmp.query("query-status"));
            eprintln!("VM {name}: query-status: {status:?}");
            if let Some(directory) = vm.directory() {
                eprintln!("VM {name}: QEMU said: {}", log_tail(directory));
            }
            let process = PathBuf::from(format!("/proc/{}", vm.pid().as_raw_nonzero()));
            for entry in read_dir(process.join("fd")).into_iter().flatten().flatten() {
                let file = read_link(entry.path()).unwrap_or_default();
                if !file.to_string_lossy().contains("userfaultfd") {
                    continue;
                }
                let facts = read_to_string(process.join("fdinfo").join(entry.file_name()));
                let facts = facts.unwrap_or_default();
                // `userfaultfd_show_fdinfo` in fs/userfaultfd.c: `pending` faults are not read yet.
                let waiting = facts.lines().filter(|line| {
                    ["pending:", "total:"]
                        .iter()
                        .any(|word| line.starts_with(word))
                });
                let waiting: Vec<&str> = waiting.collect();
                eprintln!(
                    "VM {name}: userfaultfd {:?}: {waiting:?}",
                    entry.file_name()
                );
            }
        }
    }
}

#[test]
fn vms_run_from_a_snapshot_while_it_is_fetched_from_a_store_that_lies_and_goes_away() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| {
        let place = directory.path().join(name);
        std::fs::create_dir(&place).unwrap();
        place
    };
    let (here, there, objects) = (place("here"), place("there"), place("store"));
    let mut first = Served::new(&here, &["web", "seen"]);
    let mut second = Served::new(&there, &CLONES);
    let _explain = Explain(&there);
    first.start();
    let client = first.answers();
    let spec = Lab::spec("web", "trixie-a", ByteSize::mib(384), DiskMode::Buffered).unwrap();
    first.run_warm(&spec);
    wait_agent(&client, "web");
    exec(&client, "web", &rewrite_memory());
    let disk = "truncate -s 48M /var/tmp/direct; ".to_owned() + &write_to("/var/tmp/direct");
    exec(&client, "web", &disk);
    let _: Manifest = memfold(&here, &["snapshot", "save", "web", "warm"]).unwrap();
    // This VM shows which pages VMs touch at once.
    let restore = ["snapshot", "restore", "warm", "--as", "seen"];
    let _: serde_json::Value = memfold(&here, &restore).unwrap();
    let set = here.join("snapshots/warm/working-set");
    let limit = Duration::from_secs(60);
    wait_until("touched pages are known", limit, || set.exists());
    let url = format!("file://{}", objects.display());
    let pushed: PushReport = memfold(&here, &["snapshot", "push", "warm", &url]).unwrap();
    drop(first);
    std::fs::remove_dir_all(here.join("snapshots")).unwrap();

    // A QEMU with a user cannot open the snapshot's files itself when they have arrived.
    let path = objects.join("snapshots/warm.json");
    let text = std::fs::read(&path).unwrap();
    let mut description: serde_json::Value = serde_json::from_slice(&text).unwrap();
    description["manifest"]["spec"]["user"] = "nobody".into();
    std::fs::write(&path, serde_json::to_vec(&description).unwrap()).unwrap();

    let store =
        HttpStore::start(&objects, BYTES_PER_S / slowness(), Duration::from_millis(1)).unwrap();
    let url = store.url();
    second.start();
    let client = second.answers();
    let began = Instant::now();
    // The laboratory starts its guests with an argument of its own.
    let pull = [
        "snapshot", "pull", "warm", &url, "--stream", "--domain", "shop",
    ];
    let pull = [&pull[..], &["--allow-arguments"]].concat();
    let pulled: PullReport = memfold(&there, &pull).unwrap();
    assert!(!pulled.complete && pulled.fetched_bytes < pulled.stored_bytes / 2);
    let clone = ["clone", "warm", "-n", "2", "--prefix", "copy", "--no-wait"];
    let _: serde_json::Value = memfold(&there, &clone).unwrap();
    println!(
        "two VMs run after {:.1} s, {} of {} sent; {pushed:?}",
        began.elapsed().as_secs_f64(),
        ByteSize(store.sent_bytes()),
        ByteSize(pushed.sent_bytes),
    );
    // Both VMs used the pages that are stored together, which were fetched once.
    let parts = std::fs::read_dir(objects.join("first-pages")).unwrap();
    let parts = parts.map(|part| part.unwrap().metadata().unwrap().len());
    let first_bytes: u64 = parts.sum();
    assert!(first_bytes > 0, "the push stored no first pages");
    assert_eq!(store.sent_first_bytes(), first_bytes);
    // Nothing of a chunk with a wrong byte is used.
    store.set(StoreMode::Lies);
    let is_told =
        || problem(&there).is_some_and(|why| why.contains("in the object store is damaged"));
    wait_until("the lie is told", Duration::from_secs(30), is_told);
    store.set(StoreMode::Gone);
    let waits = || {
        let all = vms(&there);
        let waits = |vm: &VmInfo| {
            vm.fold_problems
                .iter()
                .any(|p| p.contains("a VM waits since"))
        };
        all.len() == 2 && all.iter().all(waits)
    };
    wait_until("the VMs are told to wait", Duration::from_secs(60), waits);
    let refused =
        client.post::<_, Manifest>("/v1/snapshots", &SaveRequest::new(CLONES[0], "early"));
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("still being fetched"), "{refused}");
    let refused = memfold::<ErrorBody>(&there, &["snapshot", "remove", "warm"]).unwrap_err();
    assert!(refused.contains(CLONES[0]), "{refused}");
    // A killed daemon leaves VMs that wait; the next one goes on.
    second.kill();
    second.start();
    let client = second.answers();
    let refused = memfold::<PullReport>(&there, &["snapshot", "pull", "warm", &url]).unwrap_err();
    assert!(refused.contains("being fetched already"), "{refused}");
    std::thread::sleep(Duration::from_secs(2));
    store.set(StoreMode::Right);
    for vm in CLONES {
        wait_agent(&client, vm);
        for check in [VERIFY, CHECK_DISKS] {
            let said = exec(&client, vm, check).stdout;
            assert!(said.starts_with("errors 0 "), "{vm}: {said}");
        }
    }
    let is_complete = || {
        let is_ordinary = |vm: &VmInfo| !vm.fold_problems.iter().any(|p| p.contains("fetched"));
        problem(&there).is_none() && vms(&there).iter().all(is_ordinary)
    };
    wait_until("all is here", Duration::from_secs(120), is_complete);
    println!("all is here after {:.1} s", began.elapsed().as_secs_f64());
    // The second daemon knew them from the first one.
    assert_eq!(store.sent_first_bytes(), first_bytes);
    // The VMs are like any others: they share the snapshot's memory, and read its disks.
    for vm in vms(&there) {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", vm.pid)).unwrap();
        assert!(maps.contains("/snapshots/warm/ram"), "{}", vm.name);
        let nodes = support::qmp(&there, &vm.name)
            .execute(
                "query-named-block-nodes",
                serde_json::json!({ "flat": true }),
            )
            .unwrap();
        let drivers = nodes.as_array().unwrap().iter().map(|node| &node["drv"]);
        assert!(!drivers.clone().any(|driver| driver == "nbd"), "{nodes}");
        let status = std::fs::read_to_string(format!("/proc/{}/status", vm.pid)).unwrap();
        assert!(!status.contains("\nUid:\t0\t"), "{status}");
        let script = "echo 3 > /proc/sys/vm/drop_caches; find /usr/lib -type f -name '*.so*' | head -n 100 | xargs cat | sha256sum";
        exec(&client, &vm.name, script);
        let said = exec(&client, &vm.name, CHECK_DISKS).stdout;
        assert!(said.starts_with("errors 0 "), "{}: {said}", vm.name);
    }
    let problems: VerifyReport = memfold(&there, &["snapshot", "verify", "warm"]).unwrap();
    assert!(problems.problems.is_empty(), "{problems:?}");
    let saved: Manifest = memfold(&there, &["snapshot", "save", CLONES[0], "layer"]).unwrap();
    assert_eq!(saved.parent.map(|parent| parent.name), Some("warm".into()));
}

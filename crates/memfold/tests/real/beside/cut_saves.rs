//! Daemons and VMs are killed while a snapshot is made: the VM goes on as it was, and nothing half made is listed.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memfold_core::api::{Client, RestoreRequest, SaveRequest, VerifyReport, VmInfo};
use memfold_core::snapshot::{Keep, Manifest, SnapshotInfo};
use memfold_lab::{DiskMode, Lab};
use memfold_units::ByteSize;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::disks::{self, verify};
use super::snapshots::rewrite_memory;
use crate::served::{Random, Served, exec, wait_agent};
use crate::support;

const DEATHS: u64 = 8;
const VM: &str = "saved";

/// As it is, or hot and compressed: then the image is worked on longer, and laid out before anything runs from it.
fn save(client: &Client, name: &str, live: bool, hot: bool) -> Result<Manifest, String> {
    let request = SaveRequest {
        live,
        keep: if hot { Keep::Hot } else { Keep::None },
        compress: hot,
        ..SaveRequest::new(VM, name)
    };
    let saved = client.post("/v1/snapshots", &request);
    saved.map_err(|error| format!("{error:#}"))
}

/// Overlays in the test's directory for temporary files.
fn overlays(temporary: &Path) -> BTreeSet<PathBuf> {
    let entries = std::fs::read_dir(temporary).unwrap().flatten();
    let files = entries.map(|entry| entry.path());
    files
        .filter(|file| {
            file.to_string_lossy().contains("/memfold-")
                && file.extension().is_some_and(|e| e == "qcow2")
        })
        .collect()
}

/// What is listed is whole, and nothing else is there.
fn shelf_is_clean(client: &Client, state: &Path) -> Vec<String> {
    let list: Vec<SnapshotInfo> = client.get("/v1/snapshots").unwrap();
    for info in &list {
        assert_eq!(info.problem, None, "{}", info.name);
        let report: VerifyReport = client
            .post(&format!("/v1/snapshots/{}/verify", info.name), &())
            .unwrap();
        assert!(report.problems.is_empty(), "{report:?}");
    }
    let names: Vec<String> = list.into_iter().map(|info| info.name).collect();
    let there: BTreeSet<String> = std::fs::read_dir(state.join("snapshots"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    assert_eq!(there, names.iter().cloned().collect());
    names
}

fn wait_for(done: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !done() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Daemons are killed while they restore `copied`. Each next one finds a VM that is right, or nothing of it.
fn restores_killed(served: &mut Served, client: &Client, temporary: &Path, seed: u64) {
    let running = || {
        let list: Vec<VmInfo> = client.get("/v1/vms").unwrap();
        list.iter().any(|vm| vm.name == "copied")
    };
    let processes = || {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let lines = all.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
        let copy = |line: &Vec<u8>| {
            let mut words = line.split(|byte| *byte == 0);
            words.any(|word| word.starts_with(b"guest=copied,"))
        };
        lines.filter(copy).count()
    };
    let before = overlays(temporary);
    // As every daemon below, one that knows nothing yet.
    served.kill();
    served.start();
    served.answers();
    let request = RestoreRequest::new("copied");
    let restore = || client.post::<_, Value>("/v1/snapshots/last/restore", &request);
    let began = Instant::now();
    restore().unwrap();
    let span = u64::try_from(began.elapsed().as_millis()).unwrap();
    let stop = || {
        let now = serde_json::json!({ "timeout_s": 0.0 });
        client
            .post::<_, Value>("/v1/vms/copied/stop", &now)
            .unwrap()
    };
    stop();
    let mut random = Random(seed | 2);
    let (mut came, mut midway) = (0, 0);
    for death in 0..DEATHS {
        std::thread::scope(|scope| {
            let restoring = scope.spawn(restore);
            let first = Duration::from_millis(span * death / DEATHS);
            std::thread::sleep(first + random.below_ms(span / DEATHS + 1));
            served.kill();
            drop(restoring.join().unwrap());
        });
        midway += usize::from(processes() > 0);
        served.start();
        served.answers();
        if running() {
            came += 1;
            verify(client, "copied");
            stop();
        }
        assert_eq!(processes(), 0, "a half restored VM is left");
        assert_eq!(overlays(temporary), before, "its overlay is left");
    }
    println!("{midway} of {DEATHS} while there was a QEMU, {came} when it was done");
    assert!(midway > 0);
    // QEMU itself dies while it is filled: the restore fails or the VM has just ended, and the snapshot is as good as before.
    let pid_of = || {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
            .find(|pid| {
                let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let mut words = line.split(|byte| *byte == 0);
                words.any(|word| word.starts_with(b"guest=copied,"))
            })
            .and_then(Pid::from_raw)
    };
    let mut failed = 0;
    for death in 0..DEATHS {
        std::thread::scope(|scope| {
            let restoring = scope.spawn(restore);
            wait_for(|| pid_of().is_some() || restoring.is_finished());
            std::thread::sleep(Duration::from_millis(span * death / DEATHS / 2));
            if let Some(victim) = pid_of() {
                // It may have ended by itself.
                let _ = kill_process(victim, Signal::KILL);
            }
            failed += usize::from(restoring.join().unwrap().is_err());
        });
        wait_for(|| processes() == 0 && !running());
        assert!(!running() && processes() == 0);
        wait_for(|| overlays(temporary) == before);
        assert_eq!(overlays(temporary), before, "its overlay is left");
    }
    println!("{failed} of {DEATHS} restores failed as their QEMU died");
    assert!(failed > 0);
}

/// Daemons are killed while they remove snapshots of a VM that goes on. What lay there of its disk is its own again, or the snapshot's still.
fn removals_killed(served: &mut Served, client: &Client, state: &Path, temporary: &Path) {
    let remove = |name: &str| client.delete::<Value>(&format!("/v1/snapshots/{name}"));
    save(client, "gone", false, false).unwrap();
    let began = Instant::now();
    remove("gone").unwrap();
    let span = began.elapsed();
    let known = overlays(temporary).len();
    let mut cut = 0;
    for death in 0..DEATHS {
        let name = format!("gone-{death}");
        save(client, &name, death % 2 == 1, false).unwrap();
        std::thread::scope(|scope| {
            let removing = scope.spawn(|| remove(&name));
            std::thread::sleep(span * u32::try_from(death).unwrap() / 8);
            served.kill();
            cut += usize::from(removing.join().unwrap().is_err());
        });
        served.start();
        served.answers();
        verify(client, VM);
        let names = shelf_is_clean(client, state);
        println!(
            "removal {death}: listed afterwards: {}",
            names.contains(&name)
        );
        if names.contains(&name) {
            remove(&name).unwrap();
            verify(client, VM);
        }
    }
    println!(
        "a removal takes {} ms; {cut} of {DEATHS} were cut",
        span.as_millis()
    );
    assert!(cut > 0);
    // Each save has merged what the removal before it gave back.
    save(client, "after", false, false).unwrap();
    remove("after").unwrap();
    assert_eq!(overlays(temporary).len(), known);
    verify(client, VM);
}

#[test]
fn daemons_and_vms_are_killed_while_they_save_and_nothing_is_lost_or_left() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::Builder::new()
        .prefix("memfold-killed.")
        .tempdir()
        .unwrap();
    let state = directory.path();
    // Not in the state directory, which may be RAM.
    let temporary = tempfile::Builder::new()
        .prefix("memfold-killed.")
        .tempdir_in("/var/tmp")
        .unwrap();
    let temporary = temporary.path();
    let before = overlays(temporary);
    let vms = [VM, "copied"];
    let mut served = Served::new(state, &vms).temporary(temporary);
    served.start();
    let client = served.answers();
    let memory = ByteSize::mib(320);
    let mut spec = Lab::spec(VM, "trixie-a", memory, DiskMode::Buffered).unwrap();
    spec.disks.extend(disks::two_disks(state));
    served.run(&spec);
    wait_agent(&client, VM);
    exec(&client, VM, &rewrite_memory());
    exec(&client, VM, &disks::write_to("/dev/vdb /dev/vdc"));
    // How long a save takes here, undisturbed.
    let began = Instant::now();
    save(&client, "whole", false, false).unwrap();
    let span = u64::try_from(began.elapsed().as_millis()).unwrap();
    let seed = u64::from(std::process::id()) << 20 | 1;
    println!("seed {seed}, a save takes {span} ms");
    let mut random = Random(seed);
    let (mut kept, mut late) = (0, 0);
    for death in 0..DEATHS {
        let name = format!("cut-{death}");
        let draft = state.join(format!("snapshots/.{name}.draft"));
        let known = overlays(temporary);
        std::thread::scope(|scope| {
            let (client, name) = (&client, &name);
            let live = [1, 3, 4, 6].contains(&death);
            let saving = scope.spawn(move || save(client, name, live, death % 5 > 1));
            // Overlays of an earlier death go meanwhile.
            let is_new = || overlays(temporary).difference(&known).next().is_some();
            match death % 5 {
                // Anywhere; every part of the save has its turn.
                0 => {
                    let first = Duration::from_millis(span * death / DEATHS);
                    std::thread::sleep(first + random.below_ms(span / DEATHS + 1));
                }
                // When the new overlay is there, around the transaction.
                1 => {
                    wait_for(is_new);
                    std::thread::sleep(random.below_ms(40));
                }
                // When the disks are frozen and get their names.
                2 => wait_for(|| draft.join("disk0.qcow2").exists()),
                // When disks that are written in place are copied.
                3 => {
                    wait_for(|| {
                        let copied = std::fs::metadata(draft.join("disk1.qcow2"));
                        copied.is_ok_and(|facts| facts.len() > 1 << 20)
                    });
                    std::thread::sleep(random.below_ms(20));
                }
                // While the VM goes on and its RAM is copied.
                _ => {
                    wait_for(is_new);
                    std::thread::sleep(Duration::from_millis(40) + random.below_ms(200));
                }
            }
            served.kill();
            late += u32::from(saving.join().unwrap().is_err() && is_new());
        });
        served.start();
        served.answers();
        verify(&client, VM);
        let status = support::qmp(state, VM).query("query-status").unwrap();
        assert_eq!(status["status"], "running");
        wait_for(|| disks::left_nodes(state, VM).is_empty());
        assert_eq!(disks::left_nodes(state, VM), Vec::<String>::new());
        kept = shelf_is_clean(&client, state).len();
    }
    println!(
        "{} of {DEATHS} cut saves were whole, {late} were cut with new overlays",
        kept - 1
    );
    assert!(late > 0);
    let log = std::fs::read_to_string(state.join("daemon.log")).unwrap();
    let merged = log.matches("merged with the older one").count();
    println!("{merged} overlays of cut saves were merged with the older ones");
    assert!(merged > 0);
    removals_killed(&mut served, &client, state, temporary);
    for overlay in overlays(temporary).difference(&before) {
        let mode = std::fs::metadata(overlay).unwrap().permissions().mode();
        assert_eq!(mode & 0o77, 0, "others can read {}", overlay.display());
    }
    // It can be saved again, and what comes of it is right.
    save(&client, "last", true, true).unwrap();
    let restore = RestoreRequest::new("copied");
    client
        .post::<_, Value>("/v1/snapshots/last/restore", &restore)
        .unwrap();
    verify(&client, "copied");

    let stop_copy = || {
        let now = serde_json::json!({ "timeout_s": 0.0 });
        client
            .post::<_, Value>("/v1/vms/copied/stop", &now)
            .unwrap()
    };
    stop_copy();
    restores_killed(&mut served, &client, temporary, seed);
    client
        .post::<_, Value>("/v1/snapshots/last/restore", &restore)
        .unwrap();
    verify(&client, "copied");

    // The VM itself dies in the middle.
    let pid = |name: &str| {
        let list: Vec<VmInfo> = client.get("/v1/vms").unwrap();
        let vm = list.iter().find(|vm| vm.name == name);
        Pid::from_raw(vm.unwrap().pid).unwrap()
    };
    let victim = pid(VM);
    let saved = std::thread::scope(|scope| {
        let client = &client;
        let saving = scope.spawn(|| save(client, "dead", true, false));
        std::thread::sleep(Duration::from_millis(span / 3));
        kill_process(victim, Signal::KILL).unwrap();
        saving.join().unwrap()
    });
    println!("a VM that died: {:?}", saved.as_ref().map(|m| m.save_ms));
    verify(&client, "copied");
    // What is said is so.
    let listed = shelf_is_clean(&client, state).contains(&"dead".to_owned());
    assert_eq!(listed, saved.is_ok());
    stop_copy();
    assert_eq!(
        overlays(temporary),
        before,
        "overlays are left, or others are gone"
    );
}

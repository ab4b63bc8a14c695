//! Tests of interrupted saves: daemons and VMs are killed during a save. The VM keeps running
//! unchanged, and no incomplete snapshot is listed.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memfold_api::{
    Client, ClientError, KeepChoice, RestoreRequest, SaveRequest, VerifyReport, VmInfo,
};
use memfold_snapshot::{Manifest, SnapshotInfo};
use memfold_testkit::dose;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::disks::{self, verify};
use super::snapshots::rewrite_memory;
use crate::served::{Random, Served, exec, wait_agent};
use crate::support;

const VM: &str = "saved";

/// Saves the VM normally, or hot and compressed. The latter takes longer, and the image is
/// decompressed before a VM runs from it.
fn save(client: &Client, name: &str, live: bool, hot: bool) -> Result<Manifest, String> {
    let request = SaveRequest {
        live,
        keep: if hot {
            KeepChoice::Hot
        } else {
            KeepChoice::None
        },
        compress: hot,
        ..SaveRequest::new(VM, name)
    };
    let saved = client.post("/v1/snapshots", &request);
    saved.map_err(|error| format!("{error:#}"))
}

/// Returns the overlays in the test's directory for temporary files.
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

/// Checks that all listed snapshots are complete, and that no other files exist. Returns the listed
/// names.
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
    let end = Instant::now() + memfold_testkit::patience(Duration::from_secs(120));
    while !done() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the number of times that a daemon is killed in a part of the tests.
fn deaths(usual: u64) -> u64 {
    dose("MEMFOLD_SAVE_KILLS", usual)
}

/// A VM that rewrites its memory and its disks all the time, and the VM's daemon.
struct Story<'a> {
    served: Served<'a>,
    client: Client,
    state: &'a Path,
    temporary: &'a Path,
}

/// Runs a test on such a VM, and checks that no overlay is left afterwards.
fn story(test: impl FnOnce(&mut Story<'_>)) {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::Builder::new()
        .prefix("memfold-killed.")
        .tempdir()
        .unwrap();
    let state = directory.path();
    // The directory is not below the state directory, which may be in RAM.
    let temporary = tempfile::Builder::new()
        .prefix("memfold-killed.")
        .tempdir_in("/var/tmp")
        .unwrap();
    let temporary = temporary.path();
    let vms = [VM, "copied"];
    let mut served = Served::new(state, &vms).temporary(temporary);
    served.start();
    let client = served.answers();
    // The hardware is that of the test of disks, so that one boot is enough for both.
    served.run_warm(&disks::spec(VM, state));
    wait_agent(&client, VM);
    exec(&client, VM, &rewrite_memory());
    exec(&client, VM, &disks::write_to("/dev/vdb /dev/vdc"));
    let mut story = Story {
        served,
        client,
        state,
        temporary,
    };
    test(&mut story);
    for vm in vms {
        stop(&story.client, vm);
    }
    assert_eq!(overlays(temporary), BTreeSet::new(), "overlays are left");
}

/// Ends a VM, if it exists.
fn stop(client: &Client, vm: &str) {
    let list: Vec<VmInfo> = client.get("/v1/vms").unwrap();
    if list.iter().any(|info| info.name == vm) {
        let now = serde_json::json!({ "timeout_s": 0.0 });
        let _: Value = client.post(&format!("/v1/vms/{vm}/stop"), &now).unwrap();
    }
}

/// Returns a seed for the instants of kills, and prints it so that a test can be repeated.
fn seed() -> u64 {
    let seed = u64::from(std::process::id()) << 20 | 1;
    println!("seed {seed}");
    seed
}

fn restore(client: &Client, snapshot: &str) -> Result<Value, ClientError> {
    let path = format!("/v1/snapshots/{snapshot}/restore");
    client.post(&path, &RestoreRequest::new("copied"))
}

/// Returns the QEMUs of `copied` below a state directory, because other tests' VMs have the same
/// names.
fn copies(state: &Path) -> Vec<Pid> {
    let directory = state.join("vms/copied");
    let directory = directory.to_str().unwrap();
    let processes = procfs::process::all_processes().unwrap().flatten();
    let is_copy = |process: &procfs::process::Process| {
        let line = process.cmdline().unwrap_or_default();
        line.iter().any(|word| word.contains(directory))
            && line.iter().any(|word| word.starts_with("guest=copied,"))
    };
    processes
        .filter(is_copy)
        .filter_map(|process| Pid::from_raw(process.pid))
        .collect()
}

#[test]
fn if_the_daemon_or_qemu_is_killed_during_a_restore_the_vm_is_correct_or_does_not_exist() {
    story(|story| {
        save(&story.client, "last", true, true).unwrap();
        restores_killed(story);
        restore(&story.client, "last").unwrap();
        verify(&story.client, "copied");
    });
}

/// Kills daemons while they restore `copied`. The next daemon finds a correct VM, or no trace of
/// it.
fn restores_killed(story: &mut Story<'_>) {
    let Story {
        served,
        client,
        state,
        temporary,
    } = story;
    let (client, state, temporary, deaths) = (&*client, *state, *temporary, deaths(3));
    let found = || {
        let list: Vec<VmInfo> = client.get("/v1/vms").unwrap();
        list.into_iter().find(|vm| vm.name == "copied")
    };
    let running = || found().is_some();
    let processes = || copies(state);
    let before = overlays(temporary);
    // Like each daemon below, this one starts without knowledge.
    served.kill();
    served.start();
    served.answers();
    let restore = || restore(client, "last");
    let began = Instant::now();
    restore().unwrap();
    let span = u64::try_from(began.elapsed().as_millis()).unwrap();
    stop(client, "copied");
    let mut random = Random(seed());
    let (mut came, mut midway) = (0, 0);
    for death in 0..deaths {
        std::thread::scope(|scope| {
            let restoring = scope.spawn(restore);
            if death == 0 {
                // Once, the daemon is certainly killed when QEMU has just started; the other times
                // at any instant.
                wait_for(|| !processes().is_empty());
            } else {
                let first = Duration::from_millis(span * death / deaths);
                std::thread::sleep(first + random.below_ms(span / deaths + 1));
            }
            served.kill();
            drop(restoring.join().unwrap());
        });
        midway += usize::from(!processes().is_empty());
        served.start();
        served.answers();
        // A daemon answers before it has examined the VMs that it finds.
        wait_for(|| found().is_none_or(|vm| vm.state != "taking-over"));
        if running() {
            came += 1;
            verify(client, "copied");
            stop(client, "copied");
        }
        assert_eq!(processes(), [], "a half restored VM is left");
        assert_eq!(overlays(temporary), before, "its overlay is left");
    }
    println!("{midway} of {deaths} while there was a QEMU, {came} when it was done");
    assert!(midway > 0);
    // QEMU itself dies while its RAM is loaded: the restore fails, or the VM has just ended. The
    // snapshot is unchanged.
    let mut failed = 0;
    for death in 0..deaths {
        std::thread::scope(|scope| {
            let restoring = scope.spawn(restore);
            wait_for(|| !processes().is_empty() || restoring.is_finished());
            std::thread::sleep(Duration::from_millis(span * death / deaths / 2));
            for victim in processes() {
                // QEMU may have ended by itself.
                let _ = kill_process(victim, Signal::KILL);
            }
            failed += usize::from(restoring.join().unwrap().is_err());
        });
        wait_for(|| processes().is_empty() && !running());
        assert!(!running() && processes().is_empty());
        wait_for(|| overlays(temporary) == before);
        assert_eq!(overlays(temporary), before, "its overlay is left");
    }
    println!("{failed} of {deaths} restores failed as their QEMU died");
    assert!(failed > 0);
}

#[test]
fn if_the_daemon_is_killed_while_a_snapshot_is_removed_the_disks_of_the_vm_stay_intact() {
    story(removals_killed);
}

/// Kills daemons while they remove snapshots of a running VM. Parts of its disk that were in the
/// snapshot are the VM's own again, or still the snapshot's.
fn removals_killed(story: &mut Story<'_>) {
    let Story {
        served,
        client,
        state,
        temporary,
    } = story;
    let (client, state, temporary, deaths) = (&*client, *state, *temporary, deaths(2));
    let remove = |name: &str| client.delete::<Value>(&format!("/v1/snapshots/{name}"));
    save(client, "gone", false, false).unwrap();
    let began = Instant::now();
    remove("gone").unwrap();
    let span = began.elapsed();
    let known = overlays(temporary).len();
    let mut cut = 0;
    for death in 0..deaths {
        let name = format!("gone-{death}");
        save(client, &name, death % 2 == 1, false).unwrap();
        std::thread::scope(|scope| {
            let removing = scope.spawn(|| remove(&name));
            std::thread::sleep(
                span * u32::try_from(death).unwrap() / u32::try_from(deaths).unwrap(),
            );
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
        "a removal takes {} ms; {cut} of {deaths} were cut",
        span.as_millis()
    );
    assert!(cut > 0);
    // Each save merges the files that the removal before it gave back.
    save(client, "after", false, false).unwrap();
    remove("after").unwrap();
    assert_eq!(overlays(temporary).len(), known);
    verify(client, VM);
}

#[test]
fn if_the_daemon_is_killed_during_a_save_the_vm_is_unchanged_and_no_snapshot_is_left() {
    story(saves_killed);
}

fn saves_killed(story: &mut Story<'_>) {
    let Story {
        served,
        client,
        state,
        temporary,
    } = story;
    // Each kind of kill below occurs at least once.
    let (client, state, temporary, deaths) = (&*client, *state, *temporary, deaths(5));
    // Measures how long an undisturbed save takes here.
    let began = Instant::now();
    save(client, "whole", false, false).unwrap();
    let span = u64::try_from(began.elapsed().as_millis()).unwrap();
    println!("a save takes {span} ms");
    let mut random = Random(seed());
    let (mut kept, mut late) = (0, 0);
    for death in 0..deaths {
        let name = format!("cut-{death}");
        let draft = state.join(format!("snapshots/.{name}.draft"));
        let known = overlays(temporary);
        std::thread::scope(|scope| {
            let name = &name;
            let live = [1, 3, 4, 6].contains(&death);
            let saving = scope.spawn(move || save(client, name, live, death % 5 > 1));
            // Meanwhile, overlays of an earlier daemon may disappear.
            let is_new = || overlays(temporary).difference(&known).next().is_some();
            match death % 5 {
                // The daemon is killed at any instant, so that every part of the save is hit at
                // some time.
                0 => {
                    let first = Duration::from_millis(span * death / deaths);
                    std::thread::sleep(first + random.below_ms(span / deaths + 1));
                }
                // The daemon is killed when the new overlay exists, around the transaction.
                1 => {
                    wait_for(is_new);
                    std::thread::sleep(random.below_ms(40));
                }
                // The daemon is killed when the disks are frozen and get their names.
                2 => wait_for(|| draft.join("disk0.qcow2").exists()),
                // The daemon is killed when disks that are written in place are copied.
                3 => {
                    wait_for(|| {
                        let copied = std::fs::metadata(draft.join("disk1.qcow2"));
                        copied.is_ok_and(|facts| facts.len() > 1 << 20)
                    });
                    std::thread::sleep(random.below_ms(20));
                }
                // The daemon is killed while the VM runs and its RAM is copied.
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
        verify(client, VM);
        let status = support::qmp(state, VM).query("query-status").unwrap();
        assert_eq!(status["status"], "running");
        wait_for(|| disks::left_nodes(state, VM).is_empty());
        assert_eq!(disks::left_nodes(state, VM), Vec::<String>::new());
        kept = shelf_is_clean(client, state).len();
    }
    println!(
        "{} of {deaths} cut saves were whole, {late} were cut with new overlays",
        kept - 1
    );
    assert!(late > 0);
    let log = std::fs::read_to_string(state.join("daemon.log")).unwrap();
    let merged = log.matches("merged with the older overlay").count();
    println!("{merged} overlays of cut saves were merged with the older ones");
    assert!(merged > 0);
    for overlay in overlays(temporary) {
        let mode = std::fs::metadata(&overlay).unwrap().permissions().mode();
        assert_eq!(mode & 0o77, 0, "others can read {}", overlay.display());
    }
    // The VM can be saved again, and the VM restored from this snapshot is right.
    save(client, "last", true, true).unwrap();
    restore(client, "last").unwrap();
    verify(client, "copied");
}

#[test]
fn if_a_vm_is_killed_during_its_save_clones_run_on_and_the_snapshot_is_complete_or_absent() {
    story(|story| {
        let (client, state) = (&story.client, story.state);
        let began = Instant::now();
        save(client, "last", true, false).unwrap();
        let span = u64::try_from(began.elapsed().as_millis()).unwrap();
        restore(client, "last").unwrap();
        let list: Vec<VmInfo> = client.get("/v1/vms").unwrap();
        let vm = list.iter().find(|vm| vm.name == VM).unwrap();
        let victim = Pid::from_raw(vm.pid).unwrap();
        let saved = std::thread::scope(|scope| {
            let saving = scope.spawn(|| save(client, "dead", true, false));
            std::thread::sleep(Duration::from_millis(span / 3));
            kill_process(victim, Signal::KILL).unwrap();
            saving.join().unwrap()
        });
        println!("a VM that died: {:?}", saved.as_ref().map(|m| m.save_ms));
        verify(client, "copied");
        // The listed snapshots are those that were reported.
        let listed = shelf_is_clean(client, state).contains(&"dead".to_owned());
        assert_eq!(listed, saved.is_ok());
    });
}

//! Tests of temporary disk overlays, the qcow2 files in /var/tmp to which a running VM writes:
//! systemd does not remove them, and a save names an overlay that is missing.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use memfold_testkit::skip;
use memfold_vm::Qmp;
use serde_json::Value;

use crate::support::{Daemon, Small, code, err, refused};

#[test]
fn if_a_disk_overlay_was_removed_a_save_fails_and_the_error_names_the_overlay() {
    let daemon = Daemon::start();
    let disk = daemon.state().join("disk.raw");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let run = [
        "vm",
        "run",
        "--name",
        "v",
        "--memory",
        "64M",
        "--no-fold",
        "--snapshot",
        "--json",
        "--disk",
    ];
    let ran = daemon.run(&[&run[..], &[disk.to_str().unwrap()]].concat());
    assert_eq!(code(&ran), 0, "{}", err(&ran));
    let vm: Value = serde_json::from_slice(&ran.stdout).unwrap();
    let overlay = std::fs::read_dir(format!("/proc/{}/fd", vm["pid"]))
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .find(|file| file.extension().is_some_and(|kind| kind == "qcow2"))
        .unwrap();
    std::fs::remove_file(&overlay).unwrap();
    let saved = daemon.run(&["snapshot", "save", "v", "s", "--keep", "all"]);
    refused(
        &saved,
        1,
        &[
            overlay.to_str().unwrap(),
            "was removed while the VM runs",
            "systemd-tmpfiles",
        ],
    );
    assert!(
        !err(&saved).contains("builds on a snapshot"),
        "{}",
        err(&saved)
    );
    let stopped = daemon.run(&["vm", "stop", "v", "--timeout", "0"]);
    assert_eq!(code(&stopped), 0, "{}", err(&stopped));
}

/// Starts the VM `v`, which runs only its firmware and has a disk with a temporary overlay.
fn run_with_overlay(daemon: &Daemon) {
    let disk = daemon.state().join("disk.raw");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let run = ["vm", "run", "--name", "v", "--memory", "64M", "--snapshot"];
    daemon.json(&[&run[..], &["--disk", disk.to_str().unwrap()]].concat());
}

#[test]
fn a_snapshot_is_not_removed_unless_its_running_vm_keeps_its_disk() {
    let daemon = Daemon::start();
    run_with_overlay(&daemon);
    daemon.json(&["snapshot", "save", "v", "s"]);
    // The VM's list of its overlays cannot be written.
    let part = daemon.state().join("vms/v/process.part");
    std::fs::create_dir(&part).unwrap();
    let remove = || daemon.run(&["snapshot", "remove", "s"]);
    let why = "VM 'v' uses disk files of snapshot 's', and memfold cannot make them the VM's own: ";
    refused(&remove(), 1, &[why]);
    std::fs::remove_dir(&part).unwrap();
    let verified = daemon.run(&["snapshot", "verify", "s"]);
    assert_eq!(code(&verified), 0, "{}", err(&verified));
    refused(&daemon.run(&["snapshot", "remove", "none"]), 1, &["none"]);
    // A damaged manifest does not say which VM the snapshot is of.
    let manifest = daemon.directory.path().join("snapshots/s/manifest.json");
    std::fs::write(manifest, "{").unwrap();
    let removed = remove();
    assert_eq!(code(&removed), 0, "{}", err(&removed));
    daemon.json(&["snapshot", "save", "v", "t"]);
    let verified = daemon.run(&["snapshot", "verify", "t"]);
    assert_eq!(code(&verified), 0, "{}", err(&verified));
}

#[test]
fn a_snapshot_removed_during_a_save_of_its_vm_leaves_the_new_snapshot_whole() {
    let daemon = Daemon::start();
    run_with_overlay(&daemon);
    let save = |name: &str| daemon.json(&["snapshot", "save", "v", name]);
    save("s0");
    for round in 0..4 {
        let (old, new) = (format!("s{round}"), format!("s{}", round + 1));
        std::thread::scope(|scope| {
            scope.spawn(|| save(&new));
            // The removal comes at the beginning of the save, or later.
            std::thread::sleep(Duration::from_millis(20 * round));
            let removed = daemon.run(&["snapshot", "remove", &old]);
            if code(&removed) != 0 {
                refused(&removed, 1, &[&old]);
            }
        });
        let verified = daemon.run(&["snapshot", "verify", &new]);
        assert_eq!(code(&verified), 0, "{}", err(&verified));
    }
    save("last");
}

#[test]
fn a_save_is_refused_if_another_program_resumes_the_vm_meanwhile_and_the_next_save_succeeds() {
    let daemon = Daemon::start();
    run_with_overlay(&daemon);
    let socket = daemon.state().join("vms/v/qmp.sock");
    let mut qmp = Qmp::connect(&socket, Duration::from_secs(20)).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                if qmp.query("query-status").unwrap()["running"] == false {
                    qmp.query("cont").unwrap();
                }
            }
        });
        // The other program may miss the pause of one save.
        let refused_soon = (0..20).any(|number| {
            let saved = daemon.run(&["snapshot", "save", "v", &format!("s{number}")]);
            let is_refused = code(&saved) != 0;
            if is_refused {
                refused(&saved, 1, &["another program resumed the VM", "again"]);
            }
            is_refused
        });
        is_over.store(true, Ordering::Relaxed);
        assert!(refused_soon, "no save was disturbed");
    });
    assert_eq!(qmp.query("query-status").unwrap()["running"], true);
    daemon.json(&["snapshot", "save", "v", "after"]);
    let verified = daemon.run(&["snapshot", "verify", "after"]);
    assert_eq!(code(&verified), 0, "{}", err(&verified));
}

#[test]
fn systemd_tmpfiles_does_not_remove_disk_overlays_and_swap_disks_of_vms() {
    if Command::new("systemd-tmpfiles")
        .arg("--version")
        .output()
        .is_err()
    {
        skip!("systemd-tmpfiles is not installed");
    }
    let root = tempfile::tempdir().unwrap();
    let (temporary, rules) = (
        root.path().join("var/tmp"),
        root.path().join("etc/tmpfiles.d"),
    );
    std::fs::create_dir_all(&temporary).unwrap();
    std::fs::create_dir_all(&rules).unwrap();
    let shipped =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/tmpfiles.d/memfold.conf");
    std::fs::copy(shipped, rules.join("memfold.conf")).unwrap();
    // This rule deletes everything that is old enough, and every age is old enough.
    std::fs::write(rules.join("tmp.conf"), "q /var/tmp 1777 - - 0\n").unwrap();
    let ours = ["memfold-web-0-18eb.qcow2", "memfold-web-swap-18eb.raw"];
    for name in ours.iter().chain(&["other.qcow2"]) {
        std::fs::write(temporary.join(name), "x").unwrap();
    }
    let mut clean = Command::new("systemd-tmpfiles");
    let done = clean
        .args(["--clean", "--root"])
        .arg(root.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(
        !temporary.join("other.qcow2").exists(),
        "nothing was cleaned: {said}"
    );
    for name in ours {
        assert!(temporary.join(name).exists(), "{name}: {said}");
    }
}

/// Saves a VM, removes the snapshot, and saves the VM again.
#[track_caller]
fn save_remove_and_save(daemon: &Daemon, more: &[&str]) {
    let disk = daemon.directory.path().join("disk.raw");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let run = [
        &["vm", "run", "--name", "v", "--memory", "64M", "--no-fold"][..],
        &["--snapshot", "--disk", disk.to_str().unwrap()],
        more,
    ];
    let ran = daemon.run(&run.concat());
    assert_eq!(code(&ran), 0, "{}", err(&ran));
    for words in [
        &["snapshot", "save", "v", "first", "--keep", "all"][..],
        &["snapshot", "remove", "first"],
        &["snapshot", "save", "v", "second", "--keep", "all"],
        &["snapshot", "verify", "second"],
        &["vm", "stop", "v", "--timeout", "0"],
    ] {
        let done = daemon.run(words);
        assert_eq!(code(&done), 0, "{words:?}: {}", err(&done));
    }
}

#[test]
fn after_a_snapshot_on_another_file_system_is_removed_its_vm_can_be_saved_again() {
    let daemon = Daemon::start();
    let shelf = Small::mount(&daemon.directory.path().join("snapshots"), "256m");
    save_remove_and_save(&daemon, &[]);
    drop(daemon);
    drop(shelf);
}

#[test]
fn after_a_snapshot_is_removed_its_vm_that_runs_as_another_user_can_be_saved_again() {
    let daemon = Daemon::start();
    save_remove_and_save(&daemon, &["--user", "nobody"]);
}

//! Tests of snapshots of VMs that run without memfold's library (`--no-fold`).

use std::time::{Duration, Instant};

use memfold_vm::Qmp;

use crate::support::{Daemon, code, err, wait};

/// Starts a VM that runs only its firmware.
fn run(daemon: &Daemon) {
    daemon.json(&["vm", "run", "--name", "v", "--memory", "64M", "--no-fold"]);
}

#[test]
fn a_vm_that_is_not_folded_is_saved_and_restored_and_stays_unfolded_until_it_is_set() {
    let daemon = Daemon::start();
    run(&daemon);
    daemon.json(&["snapshot", "save", "v", "s"]);
    let verified = daemon.run(&["snapshot", "verify", "s"]);
    assert_eq!(code(&verified), 0, "{}", err(&verified));
    let problem = |name: &str| {
        let vms = daemon.json(&["vm", "list"]);
        let mut vms = vms.as_array().unwrap().iter();
        let vm = vms.find(|vm| vm["name"] == name).unwrap();
        vm["fold_problems"].to_string()
    };
    daemon.json(&["clone", "s", "-n", "2", "--no-wait", "--force"]);
    for copy in ["s-1", "s-2"] {
        assert!(problem(copy).contains("switched off"), "{}", problem(copy));
    }
    daemon.json(&["vm", "set", "s-1", "fold=true"]);
    assert!(
        !problem("s-1").contains("switched off"),
        "{}",
        problem("s-1")
    );
    // The copy's own snapshot says the same as the first one.
    daemon.json(&["vm", "stop", "v", "--timeout", "0"]);
    daemon.json(&["snapshot", "save", "s-2", "t"]);
    daemon.json(&["snapshot", "restore", "t", "--as", "v", "--force"]);
    assert!(problem("v").contains("switched off"), "{}", problem("v"));
}

#[test]
fn if_the_daemon_is_killed_during_a_save_the_next_daemon_resumes_a_vm_without_the_library() {
    let mut daemon = Daemon::start();
    run(&daemon);
    let socket = daemon.state().join("vms/v/qmp.sock");
    let mut qmp = Qmp::connect(&socket, Duration::from_secs(20)).unwrap();
    let mut is_stopped = || qmp.query("query-status").unwrap()["status"] != "running";
    let end = Instant::now() + memfold_testkit::patience(Duration::from_secs(60));
    loop {
        let mut save = daemon.command(&["snapshot", "save", "v", "s"]);
        let mut save = save.stderr(std::process::Stdio::null()).spawn().unwrap();
        while !is_stopped() && save.try_wait().unwrap().is_none() {}
        daemon.child.kill().unwrap();
        daemon.child.wait().unwrap();
        save.wait().unwrap();
        let stays_stopped = is_stopped();
        daemon.start_again();
        daemon.wait_adopted();
        if stays_stopped {
            break;
        }
        assert!(Instant::now() < end, "no save was interrupted in its pause");
        let _ = daemon.run(&["snapshot", "remove", "s"]);
    }
    wait("the VM runs again", || !is_stopped());
    // The next daemon may still be removing what the save left on the disks.
    wait("the VM is saved", || {
        code(&daemon.run(&["snapshot", "save", "v", "after"])) == 0
    });
    assert!(!is_stopped());
}

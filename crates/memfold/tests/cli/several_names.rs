//! Tests of commands that do the same for several VMs: a failure for one of them neither stops the
//! command nor hides what the command has done.

use memfold_api::{StopReport, VmInfo};
use serde_json::{Value, json};

use super::fake_daemon::{self, FakeDaemon};
use super::support::{Daemon, code, err, out, refused};

#[test]
fn vm_stop_stops_all_named_vms_although_one_of_them_does_not_exist() {
    let daemon = Daemon::start();
    for name in ["a", "c"] {
        daemon.paused_vm(name, &[]);
    }
    let stop = ["vm", "stop", "a", "typo", "c", "--timeout", "0"];
    let output = daemon.run(&stop);
    refused(&output, 1, &["cannot stop VM 'typo'"]);
    assert!(!err(&output).contains("'a'"), "{}", err(&output));
    let lines = out(&output);
    assert_eq!(lines.lines().count(), 2, "{lines}");
    let is_told = |name: &str| {
        lines
            .lines()
            .any(|line| line.starts_with(&format!("{name}: ")))
    };
    assert!(is_told("a") && is_told("c"), "{lines}");
    assert_eq!(daemon.json(&["vm", "list"]), json!([]));
    let output = daemon.run(&stop);
    refused(&output, 1, &["VM 'a'", "VM 'typo'", "VM 'c'"]);
    assert_eq!(out(&output), "");
}

/// Returns the report of a fake daemon on a stopped VM.
fn report(name: &str, overdue: bool) -> fake_daemon::Reaction {
    let report = StopReport {
        name: name.into(),
        how: "powered_down".into(),
        overdue,
        took_s: 1.0,
        why: None,
    };
    fake_daemon::json(200, &json!(report))
}

#[test]
fn vm_stop_all_counts_a_vm_that_ended_meanwhile_as_stopped_and_reports_the_others() {
    let vms = ["one", "two"].map(|name| VmInfo {
        name: name.into(),
        origin: "started".into(),
        ..VmInfo::default()
    });
    let gone = || fake_daemon::json(404, &json!({ "error": "no VM", "hint": null }));
    let broken = || fake_daemon::json(500, &json!({ "error": "it broke", "hint": null }));
    let run = |reactions: [fake_daemon::Reaction; 2]| {
        let list = fake_daemon::json(200, &json!(vms));
        // Nothing was started meanwhile.
        let after = fake_daemon::json(200, &json!(vms));
        let reactions = [list].into_iter().chain(reactions).chain([after]);
        let daemon = FakeDaemon::start(reactions.collect());
        let stop = ["vm", "stop", "--all", "--json"];
        daemon.command(&stop).output().unwrap()
    };
    let stopped = |output: &std::process::Output| {
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        said["stopped"].as_array().unwrap().len()
    };
    let output = run([gone(), report("two", false)]);
    assert_eq!(code(&output), 0, "{}", err(&output));
    assert_eq!(stopped(&output), 1);
    let output = run([gone(), gone()]);
    assert_eq!(code(&output), 0, "{}", err(&output));
    assert_eq!(stopped(&output), 0);
    let output = run([gone(), report("two", true)]);
    assert_eq!(code(&output), 4, "{}", err(&output));
    let output = run([broken(), report("two", true)]);
    refused(&output, 1, &["it broke"]);
    assert_eq!(stopped(&output), 1);

    // A VM that was started meanwhile is stopped, too.
    let [one, two] = vms.each_ref();
    let list = |vms: &[&VmInfo]| fake_daemon::json(200, &json!(vms));
    let reactions = [
        list(&[one]),
        report("one", false),
        list(&[one, two]),
        report("two", false),
        list(&[]),
    ];
    let daemon = FakeDaemon::start(reactions.into_iter().collect());
    let output = daemon
        .command(&["vm", "stop", "--all", "--json"])
        .output()
        .unwrap();
    assert_eq!(
        (code(&output), stopped(&output)),
        (0, 2),
        "{}",
        err(&output)
    );
}

#[test]
fn snapshot_remove_and_compact_continue_after_a_failure_and_report_what_was_done() {
    let daemon = Daemon::start();
    daemon.json(&["vm", "run", "--name", "a", "--memory", "64M"]);
    for name in ["one", "two"] {
        daemon.json(&["snapshot", "save", "a", name, "--keep", "all"]);
    }
    let output = daemon.run(&["snapshot", "compact", "one", "typo", "two"]);
    refused(&output, 1, &["cannot make snapshot 'typo' complete"]);
    let lines = out(&output);
    assert!(
        lines.contains("one is complete") && lines.contains("two is complete"),
        "{lines}"
    );
    let remove = ["snapshot", "remove", "one", "typo", "two"];
    let output = daemon.run(&remove);
    refused(&output, 1, &["cannot remove snapshot 'typo'"]);
    assert_eq!(out(&output), "removed one, two\n");
    assert_eq!(daemon.json(&["snapshot", "list"]), json!([]));
    let output = daemon.run(&remove);
    refused(&output, 1, &["'one'", "'typo'", "'two'"]);
    assert_eq!(out(&output), "");
}

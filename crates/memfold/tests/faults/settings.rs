//! Faults while the daemon writes what the next daemon must know: tokens of other hosts, the audit
//! log, settings of running VMs.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use crate::daemon::{Daemon, LISTEN, Series};

#[test]
fn tokens_of_hosts_are_made_and_revoked_or_stay_with_a_fault_at_any_file_operation() {
    let Some(mut daemon) = Daemon::start(&LISTEN) else {
        memfold_testkit::skip!("no C compiler");
    };
    daemon.succeeds(&["host", "add", "kept"]);
    let of_file = |daemon: &Daemon| -> BTreeSet<String> {
        let text = fs::read(daemon.place().join("state/hosts.json")).unwrap();
        let hosts: Value = serde_json::from_slice(&text).expect("a whole file");
        hosts.as_object().unwrap().keys().cloned().collect()
    };
    let is_right = |daemon: &Daemon, what: &dyn std::fmt::Display| {
        let listed = daemon.names(&["host", "list"]);
        assert!(listed.contains("kept"), "{what}: {listed:?}");
        listed
    };
    daemon.with_faults(
        &["host", "add", "new"],
        |daemon, succeeded, what| {
            let listed = is_right(daemon, what);
            assert!(!succeeded || listed.contains("new"), "{what}");
            assert!(!succeeded || of_file(daemon) == listed, "{what}");
        },
        |daemon| drop(daemon.succeeds(&["host", "remove", "new"])),
    );
    daemon.succeeds(&["host", "add", "new"]);
    daemon.with_faults(
        &["host", "remove", "new"],
        |daemon, succeeded, what| {
            let listed = is_right(daemon, what);
            assert!(!succeeded || !listed.contains("new"), "{what}");
            assert!(!succeeded || of_file(daemon) == listed, "{what}");
        },
        |daemon| drop(daemon.succeeds(&["host", "add", "new"])),
    );
}

#[test]
fn settings_of_a_running_vm_are_changed_or_stay_with_a_fault_at_any_file_operation() {
    let Some(mut daemon) = Daemon::start(&[]) else {
        memfold_testkit::skip!("no C compiler");
    };
    daemon.succeeds(&["vm", "run", "--name", "v", "--memory", "64M", "--", "-S"]);
    let is_long = |daemon: &Daemon| {
        let vms = daemon.succeeds(&["vm", "list"]);
        vms[0]["ttl_left_s"].as_f64().map(|left| left > 5000.0)
    };
    daemon.with_faults(
        &["vm", "set", "v", "ttl_s=9000"],
        |daemon, succeeded, what| {
            let now = is_long(daemon);
            assert!(!succeeded || now == Some(true), "{what}: {now:?}");
            daemon.replace();
            let next = is_long(daemon);
            assert_eq!(next, now, "{what}: the next daemon");
        },
        |daemon| drop(daemon.succeeds(&["vm", "set", "v", "ttl_s="])),
    );
    let priority = |daemon: &Daemon| {
        let path = daemon.place().join("state/vms/v/rightsize.json");
        let note: Value = serde_json::from_slice(&fs::read(path).unwrap()).expect("a whole file");
        note["sizing"]["priority"].clone()
    };
    daemon.succeeds(&["rightsize", "set", "v", "--priority", "50"]);
    daemon.with_faults(
        &["rightsize", "set", "v", "--priority", "70"],
        |daemon, succeeded, what| {
            let now = priority(daemon);
            assert!(now == 70 || !succeeded && now == 50, "{what}: {now}");
        },
        |daemon| drop(daemon.succeeds(&["rightsize", "set", "v", "--priority", "50"])),
    );
}

/// Returns the paths of the requests in the audit log that a daemon tells, newest first.
fn audited(daemon: &Daemon) -> Vec<String> {
    let entries = daemon.get("/v1/audit?count=20");
    let entries = entries.as_array().unwrap().iter();
    let path = |entry: &Value| entry["path"].as_str().unwrap().to_owned();
    entries.map(path).collect()
}

#[test]
fn an_entry_that_the_audit_log_could_not_hold_does_not_damage_the_next_one() {
    let Some(mut daemon) = Daemon::start(&[]) else {
        memfold_testkit::skip!("no C compiler");
    };
    let series = Series {
        name: "an entry of the audit log",
        few: 8,
    };
    daemon.series(
        &series,
        |daemon| daemon.run(&["host", "remove", "nobody"]),
        |daemon, _, what| {
            // The request after a failed entry is in the log.
            daemon.succeeds(&["host", "remove", "somebody"]);
            let paths = audited(daemon);
            let newest = paths.first().map(String::as_str);
            assert_eq!(newest, Some("/v1/hosts/somebody"), "{what}: {paths:?}");
        },
        |_| {},
    );
}

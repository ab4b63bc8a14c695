//! Commands of a daemon whose file system fails: full, read-only, with I/O errors and short writes,
//! at each single operation on a file. What was acknowledged is there afterwards, also for the next
//! daemon; what was refused is gone, or there as a whole.

mod clock;
mod daemon;
mod encrypted;
#[allow(dead_code)] // for the tests of the command line
#[path = "../cli/fake_node.rs"]
mod fake_node;
mod injector;
mod layers;
mod marks;
mod power;
#[path = "../cli/program.rs"]
mod program;
mod random;
mod recorded;
mod registry;
mod settings;
mod soak;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use daemon::{Daemon, LIMIT};
use injector::Fired;
use memfold_testkit::wait_until;

/// Returns the names in a list that a command prints.
fn names(daemon: &Daemon, command: &[&str]) -> BTreeSet<String> {
    daemon.names(command)
}

fn entries(place: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(place).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect()
}

#[test]
fn a_vm_definition_is_whole_or_refused_with_a_fault_at_any_file_operation() {
    let Some(mut daemon) = Daemon::start(&[]) else {
        memfold_testkit::skip!("no C compiler");
    };
    let file = daemon.place().with_file_name("a.toml");
    fs::write(&file, "name = 'a'\nmemory = '64MiB'\n").unwrap();
    let file = file.to_str().unwrap().to_owned();
    let list = &["vm", "list"][..];
    let definitions = |daemon: &Daemon| entries(&daemon.place().join("state/definitions"));
    daemon.with_faults(
        &["vm", "define", &file],
        |daemon, succeeded, what| {
            let listed = names(daemon, list);
            assert!(!succeeded || listed.contains("a"), "{what}");
            let files = definitions(daemon);
            assert_eq!(
                files.contains("a.toml"),
                listed.contains("a"),
                "{what}: {files:?}"
            );
        },
        |daemon| {
            if names(daemon, list).contains("a") {
                daemon.succeeds(&["vm", "undefine", "a"]);
            }
        },
    );
    daemon.succeeds(&["vm", "define", &file]);
    let memory = |daemon: &Daemon| {
        let text = fs::read_to_string(daemon.place().join("state/definitions/a.toml")).unwrap();
        let definition = memfold_vm::Definition::parse(&text).expect("a whole definition");
        definition.vm.memory.0 >> 20
    };
    daemon.with_faults(
        &["vm", "set", "a", "memory=128MiB"],
        |daemon, succeeded, what| {
            let now = memory(daemon);
            assert!(now == 128 || !succeeded && now == 64, "{what}: {now} MiB");
            assert!(names(daemon, list).contains("a"), "{what}");
        },
        |daemon| drop(daemon.succeeds(&["vm", "set", "a", "memory=64MiB"])),
    );
    daemon.with_faults(
        &["vm", "undefine", "a"],
        |daemon, succeeded, what| {
            let listed = names(daemon, list);
            assert!(!succeeded || !listed.contains("a"), "{what}");
            assert_eq!(
                definitions(daemon).contains("a.toml"),
                listed.contains("a"),
                "{what}"
            );
        },
        |daemon| {
            if !names(daemon, list).contains("a") {
                daemon.succeeds(&["vm", "define", &file]);
            }
        },
    );
}

#[test]
fn a_snapshot_is_whole_or_gone_with_a_fault_at_any_file_operation() {
    let Some(mut daemon) = Daemon::start(&[]) else {
        memfold_testkit::skip!("no C compiler");
    };
    daemon.succeeds(&["vm", "run", "--name", "v", "--memory", "64M"]);
    let list = &["snapshot", "list"][..];
    let save = |daemon: &mut Daemon| {
        if !names(daemon, list).contains("a") {
            daemon.succeeds(&["snapshot", "save", "v", "a"]);
        }
    };
    let is_whole = |daemon: &Daemon, what: &Fired| {
        daemon.snapshots_are_whole(what);
        let vms = daemon.succeeds(&["vm", "list"]);
        assert_eq!(vms.as_array().unwrap().len(), 1, "{what}");
    };
    daemon.with_faults(
        &["snapshot", "save", "v", "a"],
        |daemon, succeeded, what| {
            let listed = names(daemon, list);
            assert!(!succeeded || listed.contains("a"), "{what}");
            is_whole(daemon, what);
        },
        |daemon| {
            if names(daemon, list).contains("a") {
                daemon.succeeds(&["snapshot", "remove", "a"]);
            }
            let left = daemon.place().join("snapshots");
            // A draft that could not be removed is removed by the next save or daemon.
            let is_left = |names: &BTreeSet<String>| names.iter().all(|name| name == ".a.draft");
            wait_until("the failed save is gone", LIMIT, || {
                is_left(&entries(&left))
            });
        },
    );
    save(&mut daemon);
    daemon.with_faults(
        &["snapshot", "remove", "a"],
        |daemon, succeeded, what| {
            assert!(!succeeded || !names(daemon, list).contains("a"), "{what}");
            is_whole(daemon, what);
        },
        save,
    );
    let left = entries(&daemon.place().join("snapshots"));
    assert_eq!(left, BTreeSet::from(["a".to_owned()]));
}

#[test]
fn a_vm_that_starts_runs_or_leaves_nothing_with_a_fault_at_any_file_operation() {
    let Some(mut daemon) = Daemon::start(&[]) else {
        memfold_testkit::skip!("no C compiler");
    };
    let vms = |daemon: &Daemon| entries(&daemon.place().join("state/vms"));
    daemon.with_faults(
        &["vm", "run", "--name", "v", "--memory", "64M", "--", "-S"],
        |daemon, succeeded, what| {
            let listed = names(daemon, &["vm", "list"]);
            assert!(!succeeded || listed.contains("v"), "{what}");
            let left = vms(daemon);
            // A directory that cannot be removed is used by the next start.
            let is_clean = listed.contains("v") || left.is_empty() || what.is_lasting;
            assert!(is_clean, "{what}: {left:?}");
        },
        |daemon| {
            if names(daemon, &["vm", "list"]).contains("v") {
                daemon.succeeds(&["vm", "stop", "v", "--timeout", "0"]);
            }
        },
    );
}

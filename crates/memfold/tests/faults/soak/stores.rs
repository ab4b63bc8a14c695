//! Faults in copies of snapshots to an object store and back. The store is a directory on the disk
//! that fails.

use std::fs;

use serde_json::Value;

use crate::daemon::{Daemon, Series};

/// Saves snapshot `a`, and returns the URL of an empty store.
fn begin(daemon: &Daemon) -> String {
    daemon.succeeds(&["vm", "run", "--name", "v", "--memory", "64M"]);
    daemon.succeeds(&["snapshot", "save", "v", "a"]);
    daemon.succeeds(&["vm", "stop", "v", "--timeout", "0"]);
    let store = daemon.place().join("store");
    fs::create_dir(&store).unwrap();
    format!("file://{}", store.display())
}

/// Returns the names in the store; all of them can be pulled.
#[track_caller]
fn stored(daemon: &Daemon, url: &str, what: &dyn std::fmt::Display) -> Vec<String> {
    let list = daemon.succeeds(&["snapshot", "list", "--remote", url]);
    let list = list.as_array().unwrap().iter();
    let names = list.map(|snapshot| {
        assert_eq!(snapshot["problem"], Value::Null, "{what}: {snapshot}");
        snapshot["name"].as_str().unwrap().to_owned()
    });
    names.collect()
}

#[test]
fn a_pushed_snapshot_can_be_pulled_or_is_not_in_the_store_with_a_fault_at_any_file_operation() {
    let Some(mut daemon) = Daemon::start(&[]) else {
        memfold_testkit::skip!("no C compiler");
    };
    let url = begin(&daemon);
    let push = ["snapshot", "push", "a", &url];
    let series = Series {
        name: "snapshot push a",
        few: 8,
    };
    daemon.series(
        &series,
        |daemon| daemon.run(&push),
        |daemon, succeeded, what| {
            let names = stored(daemon, &url, what);
            assert!(!succeeded || names == ["a"], "{what}: {names:?}");
            if names == ["a"] {
                daemon.succeeds(&["snapshot", "pull", "a", &url, "--as", "copy"]);
                daemon.snapshots_are_whole(what);
                daemon.succeeds(&["snapshot", "remove", "copy"]);
            }
        },
        |daemon| {
            if stored(daemon, &url, &"after a removal") == ["a"] {
                daemon.succeeds(&["snapshot", "remove", "a", "--remote", &url]);
            }
        },
    );
    daemon.succeeds(&push);
    let remove = ["snapshot", "remove", "a", "--remote", &url];
    let series = Series {
        name: "snapshot remove a --remote",
        few: 4,
    };
    daemon.series(
        &series,
        |daemon| daemon.run(&remove),
        |daemon, succeeded, what| {
            let names = stored(daemon, &url, what);
            assert!(!succeeded || names.is_empty(), "{what}: {names:?}");
        },
        |daemon| {
            if stored(daemon, &url, &"before a push").is_empty() {
                daemon.succeeds(&push);
            }
        },
    );
}

#[test]
fn a_pulled_snapshot_is_whole_or_not_listed_with_a_fault_at_any_file_operation() {
    let Some(mut daemon) = Daemon::start(&[]) else {
        memfold_testkit::skip!("no C compiler");
    };
    let url = begin(&daemon);
    daemon.succeeds(&["snapshot", "push", "a", &url]);
    let series = Series {
        name: "snapshot pull a --as copy",
        few: 8,
    };
    daemon.series(
        &series,
        |daemon| daemon.run(&["snapshot", "pull", "a", &url, "--as", "copy"]),
        |daemon, succeeded, what| {
            let names = daemon.names(&["snapshot", "list"]);
            assert!(names.contains("a"), "{what}: {names:?}");
            assert!(!succeeded || names.contains("copy"), "{what}: {names:?}");
            daemon.snapshots_are_whole(what);
        },
        |daemon| {
            // What has arrived stays for the next pull, unless it is removed.
            let is_begun = daemon.place().join("snapshots/.copy.pull").exists();
            if is_begun || daemon.names(&["snapshot", "list"]).contains("copy") {
                daemon.succeeds(&["snapshot", "remove", "copy"]);
            }
        },
    );
}

//! Faults while a layer, a snapshot that refers to another snapshot, is made complete.

use serde_json::Value;

use crate::daemon::{Daemon, Series};

pub const LIST: &[&str] = &["snapshot", "list"];

/// Returns a listed snapshot.
pub fn listed(daemon: &Daemon, name: &str) -> Option<Value> {
    let list = daemon.succeeds(LIST);
    let mut list = list.as_array().unwrap().iter();
    list.find(|snapshot| snapshot["name"] == name).cloned()
}

pub fn parent(daemon: &Daemon, name: &str) -> Option<String> {
    let parent = listed(daemon, name).expect("the layer is listed")["parent"].clone();
    parent.as_str().map(str::to_owned)
}

/// Saves snapshot `parent` of a VM, and snapshot `layer` of VM `w`, which runs from it.
pub fn save_layer(daemon: &Daemon) {
    daemon.succeeds(&["vm", "run", "--name", "v", "--memory", "64M"]);
    daemon.succeeds(&["snapshot", "save", "v", "parent"]);
    daemon.succeeds(&["vm", "stop", "v", "--timeout", "0"]);
    daemon.succeeds(&["snapshot", "restore", "parent", "--as", "w", "--force"]);
    daemon.succeeds(&["snapshot", "save", "w", "layer"]);
    assert_eq!(parent(daemon, "layer").as_deref(), Some("parent"));
}

#[test]
fn a_layer_is_made_complete_or_stays_a_layer_with_a_fault_at_any_file_operation() {
    let Some(mut daemon) = Daemon::start(&[]) else {
        memfold_testkit::skip!("no C compiler");
    };
    save_layer(&daemon);
    let command = ["snapshot", "compact", "layer"];
    let series = Series {
        name: &command.join(" "),
        few: 7,
    };
    daemon.series(
        &series,
        |daemon| daemon.run(&command),
        |daemon, succeeded, what| {
            assert!(!succeeded || parent(daemon, "layer").is_none(), "{what}");
            daemon.snapshots_are_whole(what);
        },
        |daemon| {
            if parent(daemon, "layer").is_none() {
                daemon.succeeds(&["snapshot", "remove", "layer"]);
                daemon.succeeds(&["snapshot", "save", "w", "layer"]);
            }
        },
    );
}

//! Faults in commands that take longer: a parent is removed with its layers made complete, and a VM
//! is forked.

use crate::daemon::{Daemon, Series};
use crate::layers::{LIST, listed, parent, save_layer};

#[test]
fn a_parent_is_removed_and_its_layer_made_complete_or_both_stay_with_a_fault_at_any_file_operation()
{
    let Some(mut daemon) = Daemon::start(&[]) else {
        memfold_testkit::skip!("no C compiler");
    };
    save_layer(&daemon);
    daemon.succeeds(&["vm", "stop", "w", "--timeout", "0"]);
    let command = ["snapshot", "remove", "--merge", "parent"];
    let series = Series {
        name: &command.join(" "),
        few: 6,
    };
    daemon.series(
        &series,
        |daemon| daemon.run(&command),
        |daemon, succeeded, what| {
            let is_there = listed(daemon, "parent").is_some();
            assert!(!succeeded || !is_there, "{what}");
            // The layer never needs a snapshot that is gone.
            let needed = parent(daemon, "layer");
            assert!(is_there || needed.is_none(), "{what}: {needed:?}");
            daemon.snapshots_are_whole(what);
        },
        |daemon| {
            let is_complete = parent(daemon, "layer").is_none();
            if is_complete {
                daemon.succeeds(&["snapshot", "remove", "layer"]);
            }
            if listed(daemon, "parent").is_none() {
                save_layer(daemon);
                daemon.succeeds(&["vm", "stop", "w", "--timeout", "0"]);
            } else if is_complete {
                daemon.succeeds(&["snapshot", "restore", "parent", "--as", "w", "--force"]);
                daemon.succeeds(&["snapshot", "save", "w", "layer"]);
                daemon.succeeds(&["vm", "stop", "w", "--timeout", "0"]);
            }
        },
    );
}

#[test]
fn a_fork_runs_or_leaves_the_forked_vm_alone_with_a_fault_at_any_file_operation() {
    let Some(mut daemon) = Daemon::start(&[]) else {
        memfold_testkit::skip!("no C compiler");
    };
    daemon.succeeds(&["vm", "run", "--name", "v", "--memory", "64M"]);
    let series = Series {
        name: "fork v --keep",
        few: 9,
    };
    daemon.series(
        &series,
        |daemon| daemon.run(&["fork", "v", "--name", "f", "--force", "--no-wait", "--keep"]),
        |daemon, succeeded, what| {
            let vms = daemon.names(&["vm", "list"]);
            assert!(vms.contains("v"), "{what}: {vms:?}");
            assert!(!succeeded || vms.contains("f-1"), "{what}: {vms:?}");
            daemon.snapshots_are_whole(what);
        },
        |daemon| {
            if daemon.names(&["vm", "list"]).contains("f-1") {
                daemon.succeeds(&["vm", "stop", "f-1", "--timeout", "0"]);
            }
            for layer in daemon.names(LIST) {
                // A running VM may need it, because it was folded onto it.
                daemon.run(&["snapshot", "remove", &layer]);
            }
        },
    );
}

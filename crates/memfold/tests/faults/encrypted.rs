//! Faults while an encrypted snapshot is saved, and while its key is changed.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use memfold_snapshot::Keys;
use tempfile::TempDir;

use crate::daemon::{Daemon, Series};
use crate::layers::listed;

/// Files with the keys `a` and `b` for snapshots. They are in a directory of their own, so that no
/// fault reaches them.
pub struct KeyFiles(TempDir);

impl KeyFiles {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        for name in ["a", "b"] {
            let path = directory.path().join(name);
            // The names are hexadecimal digits, too.
            fs::write(&path, format!("{name}{}", "0123456".repeat(9))).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        }
        Self(directory)
    }

    fn named(&self) -> [String; 2] {
        ["a", "b"].map(|name| format!("{name}=file:{}", self.0.path().join(name).display()))
    }

    /// Returns arguments of a daemon that has the keys.
    pub fn options(&self) -> [String; 2] {
        self.named().map(|key| format!("--snapshot-key={key}"))
    }

    pub fn keys(&self) -> Keys {
        Keys::new(self.named().map(|key| key.parse().unwrap())).unwrap()
    }

    fn start_daemon(&self) -> Option<Daemon> {
        let options = self.options();
        Daemon::start(&options.each_ref().map(String::as_str))
    }
}

/// Returns the name of the key of snapshot `s`; `None` if there is no snapshot `s`.
fn key_of_snapshot(daemon: &Daemon) -> Option<String> {
    let snapshot = listed(daemon, "s")?;
    Some(snapshot["key"].as_str().expect("a key").to_owned())
}

#[test]
fn an_encrypted_snapshot_is_whole_or_gone_with_a_fault_at_any_file_operation() {
    let keys = KeyFiles::new();
    let Some(mut daemon) = keys.start_daemon() else {
        memfold_testkit::skip!("no C compiler");
    };
    daemon.succeeds(&["vm", "run", "--name", "v", "--memory", "64M"]);
    let command = ["snapshot", "save", "v", "s", "--encrypt=a"];
    let series = Series {
        name: &command.join(" "),
        few: 7,
    };
    daemon.series(
        &series,
        |daemon| daemon.run(&command),
        |daemon, succeeded, what| {
            assert!(!succeeded || key_of_snapshot(daemon).is_some(), "{what}");
            daemon.snapshots_are_whole(what);
        },
        |daemon| {
            if key_of_snapshot(daemon).is_some() {
                daemon.succeeds(&["snapshot", "remove", "s"]);
            }
        },
    );
}

#[test]
fn an_encrypted_snapshot_has_its_old_or_its_new_key_with_a_fault_at_any_file_operation() {
    let keys = KeyFiles::new();
    let Some(mut daemon) = keys.start_daemon() else {
        memfold_testkit::skip!("no C compiler");
    };
    daemon.succeeds(&["vm", "run", "--name", "v", "--memory", "64M"]);
    daemon.succeeds(&["snapshot", "save", "v", "s", "--encrypt=a"]);
    let command = ["snapshot", "rekey", "s", "--key", "b"];
    let series = Series {
        name: &command.join(" "),
        few: 9,
    };
    daemon.series(
        &series,
        |daemon| daemon.run(&command),
        |daemon, succeeded, what| {
            let key = key_of_snapshot(daemon).expect("the snapshot is listed");
            assert!(key == "b" || !succeeded && key == "a", "{what}: {key}");
            daemon.snapshots_are_whole(what);
        },
        |daemon| {
            // A failed change can be repeated, and undone.
            daemon.succeeds(&command);
            daemon.succeeds(&["snapshot", "rekey", "s", "--key", "a"]);
        },
    );
}

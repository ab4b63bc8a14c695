//! A daemon whose control group has hardly any memory left: the kernel lets its allocations wait,
//! reclaims its files, and kills it at the end. VMs are outside the group, and run on.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use memfold_testkit::{dose, wait_until};

use crate::daemon::{Daemon, LIMIT};

/// A control group of the test's own (cgroups(7), version 1 or 2).
struct Group {
    path: PathBuf,
    is_second: bool,
}

impl Group {
    /// Creates the group; `None` if this process may not.
    fn new() -> Option<Self> {
        let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.subtree_control");
        let is_second = controllers.is_ok_and(|all| all.split_whitespace().any(|c| c == "memory"));
        let root = if is_second {
            "/sys/fs/cgroup"
        } else {
            "/sys/fs/cgroup/memory"
        };
        let path = Path::new(root).join(format!("memfold-test-{}", std::process::id()));
        fs::create_dir(&path).ok()?;
        let group = Self { path, is_second };
        group
            .path
            .join(group.file("memory.max"))
            .exists()
            .then_some(group)
    }

    /// Returns the name of a file of version 2 in the group's version.
    fn file(&self, name: &'static str) -> &'static str {
        match name {
            _ if self.is_second => name,
            "memory.max" => "memory.limit_in_bytes",
            "memory.events" => "memory.failcnt",
            other => other,
        }
    }

    fn write(&self, name: &'static str, value: u64) {
        fs::write(self.path.join(self.file(name)), value.to_string()).unwrap();
    }

    /// Returns how often memory did not suffice.
    fn failures(&self) -> u64 {
        let text = fs::read_to_string(self.path.join(self.file("memory.events"))).unwrap();
        let mut lines = text.lines();
        let count = if self.is_second {
            lines.find_map(|line| line.strip_prefix("max "))
        } else {
            lines.next()
        };
        count.unwrap().trim().parse().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its processes have ended, or end now.
        for _ in 0..100 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn what_was_acknowledged_stays_although_the_daemon_has_no_memory_left_and_is_killed_by_the_kernel()
{
    let Some(mut daemon) = Daemon::start(&[]) else {
        memfold_testkit::skip!("no C compiler");
    };
    daemon.succeeds(&["vm", "run", "--name", "v", "--memory", "64M"]);
    let (mut kept, mut snapshots) = (BTreeSet::from(["v".to_owned()]), BTreeSet::new());
    let (mut failures, mut kills) = (0, 0);
    let rounds = dose("MEMFOLD_MEMORY_ROUNDS", 4);
    for round in 0..rounds {
        let Some(group) = Group::new() else {
            memfold_testkit::skip!(
                "this process cannot create a control group with a memory limit"
            );
        };
        // Memory that the daemon has already is not counted.
        group.write("memory.max", (1 + round % 12) << 20);
        group.write("cgroup.procs", daemon.pid().into());
        for number in 0..4 {
            let name = format!("d{round}-{number}");
            let file = daemon.place().with_file_name(format!("{name}.toml"));
            fs::write(&file, format!("name = '{name}'\nmemory = '64MiB'\n")).unwrap();
            let defined = daemon.run(&["vm", "define", file.to_str().unwrap()]);
            if defined.status.success() {
                kept.insert(name);
            }
            let name = format!("s{round}-{number}");
            let saved = daemon.run(&["snapshot", "save", "v", &name]);
            if saved.status.success() {
                snapshots.insert(name);
            }
        }
        failures += group.failures();
        kills += u64::from(daemon.has_ended());
        daemon.replace();
        drop(group);
        wait_until("the VM is adopted", LIMIT, || {
            daemon.names(&["vm", "list"]).is_superset(&kept)
        });
        let listed = daemon.names(&["snapshot", "list"]);
        assert!(listed.is_superset(&snapshots), "{listed:?}, {snapshots:?}");
        daemon.snapshots_are_whole(&format!("round {round}"));
        for name in &listed {
            daemon.succeeds(&["snapshot", "remove", name]);
        }
        snapshots.clear();
    }
    println!(
        "allocations that found the group's memory full: {failures}; {kills} of {rounds} daemons were killed"
    );
    assert!(failures > 0);
}

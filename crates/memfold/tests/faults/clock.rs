//! The clock of a host is set forwards and backwards by hours: nothing expires, ends or is removed
//! because of that, and nothing is kept that has expired.

use std::time::Duration;

use serde_json::Value;

use memfold_testkit::wait_until;

use crate::daemon::{Daemon, LIMIT};

pub const HOUR: i64 = 3600;

/// Clocks that are set one after the other: seconds ahead of the host's.
pub const JUMPS: [i64; 5] = [5 * HOUR, -7 * HOUR, 26 * HOUR, -100 * HOUR, 0];

fn ttl_left(daemon: &Daemon) -> Option<f64> {
    let vms = daemon.succeeds(&["vm", "list"]);
    vms[0]["ttl_left_s"].as_f64()
}

#[test]
fn a_vm_lives_as_long_as_it_is_to_although_the_clock_is_set_forwards_and_backwards() {
    let Some(mut daemon) = Daemon::start(&[]) else {
        memfold_testkit::skip!("no C compiler");
    };
    let run = ["vm", "run", "--name", "v", "--memory", "64M"];
    daemon.succeeds(&[&run[..], &["--ttl", "900", "--", "-S"]].concat());
    for jump in JUMPS {
        daemon.injector().set_clock(jump);
        // The daemon looks after VMs each second.
        std::thread::sleep(Duration::from_millis(1500));
        let left = ttl_left(&daemon).expect("the VM has a time to live");
        assert!(left > 600.0 && left <= 900.0, "{jump} s: {left} s left");
    }
    // The time that ran before a restart of the daemon does not count, whatever the clock says.
    daemon.injector().set_clock(50 * HOUR);
    daemon.replace();
    wait_until("the VM is adopted", LIMIT, || {
        ttl_left(&daemon).is_some_and(|left| left > 600.0)
    });
    daemon.injector().set_clock(-50 * HOUR);
    daemon.succeeds(&["vm", "set", "v", "ttl_s=2"]);
    wait_until("the VM ends", LIMIT, || {
        daemon.names(&["vm", "list"]).is_empty()
    });
    println!(
        "clock jumps while a VM has a time to live: {}",
        JUMPS.len() + 2
    );
}

#[test]
fn snapshots_and_forks_stay_right_although_the_clock_is_set_between_saves() {
    let Some(mut daemon) = Daemon::start(&[]) else {
        memfold_testkit::skip!("no C compiler");
    };
    daemon.succeeds(&["vm", "run", "--name", "v", "--memory", "64M"]);
    let mut jumps = 0;
    for (number, jump) in JUMPS.into_iter().enumerate() {
        daemon.injector().set_clock(jump);
        jumps += 1;
        let name = format!("s{number}");
        daemon.succeeds(&["snapshot", "save", "v", &name]);
        let list = daemon.succeeds(&["snapshot", "list"]);
        let list = list.as_array().unwrap();
        assert_eq!(list.len(), number + 1);
        assert!(
            list.iter()
                .all(|snapshot| snapshot["problem"] == Value::Null)
        );
    }
    // A snapshot of the future, and one of the past, are restored.
    for (snapshot, vm) in [("s2", "w"), ("s3", "x")] {
        daemon.succeeds(&["snapshot", "restore", snapshot, "--as", vm, "--force"]);
        daemon.succeeds(&["vm", "stop", vm, "--timeout", "0"]);
    }
    // A layer that no VM needs is left to whoever forked for a while, also if the clock says that
    // it is from yesterday. The daemon looks for old layers at its start.
    let fork = daemon.succeeds(&["fork", "v", "--name", "f", "--force", "--no-wait"]);
    let layer = fork["snapshot"].as_str().unwrap();
    for vm in ["v", "f-1"] {
        daemon.succeeds(&["vm", "stop", vm, "--timeout", "0"]);
    }
    daemon.injector().set_clock(30 * HOUR);
    daemon.replace();
    jumps += 1;
    daemon.succeeds(&["clone", layer, "--prefix", "late", "--force", "--no-wait"]);
    println!("clock jumps between saves: {jumps}");
}

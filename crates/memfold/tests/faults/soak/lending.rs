//! Faults of the file system of a lender's host, and of a borrower's, while a swap disk moves to
//! lent RAM and back. The VM is paused: QEMU's own `qemu-io` writes and reads its swap disk.

use std::path::PathBuf;
use std::process::Output;
use std::time::Duration;

use memfold_testkit::{patience, wait_until};
use memfold_vm::Qmp;
use serde_json::Value;

use crate::daemon::{Daemon, LIMIT, Series};

const MIB: u64 = 1 << 20;

/// Starts a daemon that lends and serves the registry; `None` if this host cannot.
pub fn lender() -> Option<Daemon> {
    let Some(daemon) = Daemon::start(&["--host", "a"]) else {
        return memfold_testkit::reports_skip("no C compiler");
    };
    let output = daemon.run(&["lend", "--max", "256M"]);
    let told = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(3) {
        return memfold_testkit::reports_skip(&told);
    }
    assert!(output.status.success(), "{told}");
    // A host whose tasks are waiting for memory lends nothing; other tests may cause that.
    let end = std::time::Instant::now() + patience(Duration::from_secs(120));
    while daemon.succeeds(&["lend"])["offer_bytes"] != 256 * MIB {
        if std::time::Instant::now() > end {
            return memfold_testkit::reports_skip("this host has no memory to spare");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Some(daemon)
}

pub fn borrower(registry: &str) -> Daemon {
    Daemon::start(&["--host", "b", "--registry", registry]).unwrap()
}

/// The socket of a daemon that serves the registry.
pub fn socket(lender: &Daemon) -> String {
    lender.place().join("s").to_str().unwrap().to_owned()
}

/// Starts paused VM `v` with a swap disk of 64 MiB.
pub fn start_vm(borrower: &Daemon) {
    let swap = ["--memory", "64M", "--no-fold", "--swap", "64M"];
    let words = [&["vm", "run", "--name", "v"], &swap[..], &["--", "-S"]];
    borrower.succeeds(&words.concat());
}

/// Makes QEMU access 4 MiB of the swap disk of VM `v`, as the guest would. QEMU prints the result
/// to its own output.
#[track_caller]
pub fn access(borrower: &Daemon, what: &str) {
    let directory: PathBuf = borrower.place().join("state/vms/v");
    let log = directory.join("qemu.log");
    let before = std::fs::read_to_string(&log).unwrap().len();
    let mut qmp = Qmp::connect(&directory.join("qmp.sock"), Duration::from_secs(60)).unwrap();
    let line = format!("qemu-io -d /machine/peripheral/swap/virtio-backend \"{what}\"");
    assert_eq!(qmp.human(&line).unwrap(), "", "{what}");
    let said = std::fs::read_to_string(&log).unwrap().split_off(before);
    let bad = ["failed", "rror", "cannot", "not found"];
    let is_good = said.contains("bytes at offset") && !bad.iter().any(|b| said.contains(b));
    assert!(is_good, "{what}: {said}");
}

/// Returns where the swap disk of VM `v` is.
pub fn disk_place(borrower: &Daemon) -> String {
    let leases = borrower.succeeds(&["leases"]);
    let mut borrowed = leases["borrowed"].as_array().unwrap().iter();
    let found = borrowed.find(|borrowed| borrowed["vm"] == "v");
    found.map_or("on_disk".into(), |b| b["place"].as_str().unwrap().into())
}

/// Waits until the lender has lent nothing.
pub fn wait_free(lender: &Daemon) {
    wait_until("nothing is lent", LIMIT, || {
        let is_free = lender.succeeds(&["lend"])["lent_bytes"] == 0;
        let leases = lender.succeeds(&["leases"])["leases"].clone();
        is_free && leases.as_array().is_some_and(Vec::is_empty)
    });
}

/// Borrows. A lender whose host waits for memory for a moment refuses; that is no fault.
pub fn borrow(borrower: &Daemon) -> Output {
    let mut output = borrower.run(&["borrow", "v"]);
    wait_until("a lender has memory to spare", LIMIT, || {
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_refused = told.contains("no lender has");
        if is_refused {
            output = borrower.run(&["borrow", "v"]);
        }
        !is_refused
    });
    output
}

/// Moves the swap disk back, and waits until the lender has its memory back.
pub fn give_back(borrower: &Daemon, lender: &Daemon) {
    wait_until("the disk is back", LIMIT, || {
        borrower.run(&["return", "v"]).status.success() && disk_place(borrower) == "on_disk"
    });
    access(borrower, "read -P 1 0 4M");
    wait_free(lender);
}

/// Checks after a move that no byte of the swap disk is lost.
fn is_whole(borrower: &Daemon) {
    access(borrower, "read -P 1 0 4M");
    access(borrower, "write -P 2 8M 4M");
    access(borrower, "read -P 2 8M 4M");
}

#[test]
fn with_a_fault_at_any_file_operation_of_a_lender_no_byte_is_lost_and_no_memory_stays_lent() {
    let Some(mut lender) = lender() else { return };
    let borrower = borrower(&socket(&lender));
    start_vm(&borrower);
    access(&borrower, "write -P 1 0 4M");
    let series = Series {
        name: "borrow, on the lender's host",
        few: 5,
    };
    lender.series(
        &series,
        |_| borrow(&borrower),
        |_, succeeded, what| {
            is_whole(&borrower);
            let now = disk_place(&borrower);
            assert!(!succeeded || now != "on_disk", "{what}: {now}");
        },
        |lender| give_back(&borrower, lender),
    );
}

#[test]
fn with_a_fault_at_any_file_operation_of_a_borrower_no_byte_is_lost_and_no_memory_stays_lent() {
    let Some(lender) = lender() else { return };
    let mut borrower = borrower(&socket(&lender));
    start_vm(&borrower);
    access(&borrower, "write -P 1 0 4M");
    let there = Series {
        name: "borrow, on the borrower's host",
        few: 6,
    };
    borrower.series(
        &there,
        borrow,
        |borrower, succeeded, what| {
            is_whole(borrower);
            let now = disk_place(borrower);
            assert!(!succeeded || now != "on_disk", "{what}: {now}");
        },
        |borrower| give_back(borrower, &lender),
    );
    let back = Series {
        name: "return, on the borrower's host",
        few: 4,
    };
    assert!(borrow(&borrower).status.success());
    borrower.series(
        &back,
        |borrower| borrower.run(&["return", "v"]),
        |borrower, succeeded, what| {
            is_whole(borrower);
            let now = disk_place(borrower);
            assert!(!succeeded || now == "on_disk", "{what}: {now}");
        },
        |borrower| {
            give_back(borrower, &lender);
            assert!(borrow(borrower).status.success());
        },
    );
    let value: Value = borrower.succeeds(&["vm", "list"]);
    assert_eq!(value.as_array().unwrap().len(), 1);
}

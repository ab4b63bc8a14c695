//! Tests of lending RAM by iSCSI between two daemons on one host. They are the tests of `lending`,
//! with tgtd and qemu-nbd in between.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use memfold_testkit::bound;
use rustix::process::{Pid, Signal, kill_process};

use crate::lending::{Swapping, borrower, lender, wait_free};
use crate::support::{Daemon, err, refused, wait};

/// Returns the process that the test kills.
type Who = fn(&Daemon, &Swapping) -> Pid;

const ISCSI: [&str; 2] = ["--transport", "iscsi"];

/// Returns the processes of this name that have `path`, or a path below it, in their arguments or
/// environment.
fn processes(name: &str, path: &Path) -> Vec<Pid> {
    let path = path.to_str().unwrap();
    let read = |entry: &std::fs::DirEntry, file: &str| {
        let bytes = std::fs::read(entry.path().join(file)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let said = read(&entry, "cmdline") + &read(&entry, "environ");
        if read(&entry, "comm").trim() == name && said.contains(path) {
            let number = entry.file_name().to_str().unwrap().parse().unwrap();
            found.push(Pid::from_raw(number).unwrap());
        }
    }
    found
}

fn only(name: &str, path: &Path) -> Pid {
    let found = processes(name, path);
    assert_eq!(found.len(), 1, "{name}: {found:?}");
    found[0]
}

/// Returns tgtd of the lender's only lease.
fn tgtd(lender: &Daemon) -> Pid {
    only("tgtd", &lender.state().join("lend"))
}

fn beside_tgtd(lender: &Daemon) -> Pid {
    only("memfold", &lender.state().join("lend"))
}

fn nothing_is_left(vm: &Swapping) {
    wait("the borrower's processes end", || {
        processes("qemu-nbd", &vm.directory()).is_empty()
    });
    wait("the borrower's files go", || {
        let names = std::fs::read_dir(vm.directory()).unwrap().flatten();
        names
            .map(|entry| entry.file_name())
            .all(|name| !name.to_str().unwrap().starts_with("iscsi-"))
    });
}

/// Returns the listening and connected sockets of a process, from `ss`.
fn sockets(pid: Pid) -> String {
    let output = Command::new("ss").args(["-Htanp"]).output().unwrap();
    let all = String::from_utf8(output.stdout).unwrap();
    let is_its = format!("pid={},", pid.as_raw_nonzero());
    let its: Vec<&str> = all.lines().filter(|line| line.contains(&is_its)).collect();
    its.join("\n")
}

#[test]
fn a_host_configured_to_lend_memory_over_iscsi_lends_from_the_start_of_its_daemon() {
    let tgtd = Command::new("tgtd").arg("--version").output();
    if !tgtd.is_ok_and(|said| said.status.success()) {
        memfold_testkit::skip!("no tgtd");
    }
    let lend = ["--lend", "64M", "--lend-transport", "iscsi"];
    let mut host = Daemon::start_with(&[&["--host", "a"], &lend[..]].concat());
    for _ in 0..2 {
        // A daemon begins to lend a moment after its start.
        wait("it lends", || !host.json(&["lend"]).is_null());
        let status = host.json(&["lend"]);
        assert_eq!(status["listens"], "127.0.0.1, by iSCSI, not encrypted");
        assert_eq!(status["max_bytes"], 64 << 20);
        host.child.kill().unwrap();
        host.child.wait().unwrap();
        host.start_again();
    }
}

#[test]
fn a_swap_disk_moves_to_memory_lent_over_iscsi_and_back_without_losing_a_byte() {
    let Some(lender) = lender("a", &[], &ISCSI) else {
        return;
    };
    let listens = lender.json(&["lend"])["listens"].clone();
    assert_eq!(listens, "127.0.0.1, by iSCSI, not encrypted");
    let borrower = borrower(&lender);
    let vm = Swapping::start(&borrower, "v");
    vm.write(1, 0);
    vm.write(2, 60);
    let done = vm.borrow(&["64M"]);
    assert_eq!(done["place"], "lent");
    assert_eq!(
        vm.nodes(),
        ["swap-copy1", "swap-file1", "swap-lent1-0", "swap1"]
    );
    let report = borrower.json(&["leases"]);
    assert_eq!(report["leases"][0]["state"], "exported");
    assert_eq!(report["blast"][0]["vms"][0]["vm"], "v");
    // All of the memory is locked, and belongs to no file with a name.
    let server = tgtd(&lender);
    let beside = beside_tgtd(&lender);
    let status = format!("/proc/{}/status", beside.as_raw_nonzero());
    let status = std::fs::read_to_string(status).unwrap();
    let locked = status.lines().find(|l| l.starts_with("VmLck:")).unwrap();
    assert!(locked.contains(" 65536 kB"), "{locked}");
    let file = format!("/proc/{}/fd/0", server.as_raw_nonzero());
    let file = std::fs::read_link(file).unwrap();
    assert!(file.to_str().unwrap().starts_with("/memfd:"), "{file:?}");
    // No argument contains a secret, and the borrower's key files are gone after they were read.
    for pid in [server, beside, only("qemu-nbd", &vm.directory())] {
        let line = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap();
        let line = String::from_utf8_lossy(&line).into_owned();
        let is_key = |word: &str| word.len() >= 32 && word.bytes().all(|b| b.is_ascii_hexdigit());
        assert!(!line.split(['\0', ',', '=']).any(is_key), "{line}");
    }
    // tgtd no longer listens, because it serves only one session.
    let sockets = sockets(server);
    assert!(
        sockets.contains("ESTAB") && !sockets.contains("LISTEN"),
        "{sockets}"
    );
    vm.read(1, 0);
    vm.read(2, 60);
    vm.write(3, 4);
    let back = vm.give_back();
    assert_eq!(back["place"], "on_disk");
    for (pattern, at) in [(1, 0), (2, 60), (3, 4), (0, 32)] {
        vm.read(pattern, at);
    }
    wait_free(&lender);
    nothing_is_left(&vm);
}

#[test]
fn if_a_process_that_lends_memory_over_iscsi_dies_or_hangs_no_byte_is_lost() {
    let Some(lender) = lender("a", &[], &ISCSI) else {
        return;
    };
    let borrower = borrower(&lender);
    let vm = Swapping::start(&borrower, "v");
    vm.write(1, 0);
    let who: [(&str, Who, Signal); 6] = [
        ("tgtd", |lender, _| tgtd(lender), Signal::KILL),
        ("tgtd", |lender, _| tgtd(lender), Signal::STOP),
        ("beside it", |lender, _| beside_tgtd(lender), Signal::KILL),
        ("beside it", |lender, _| beside_tgtd(lender), Signal::STOP),
        (
            "qemu-nbd",
            |_, vm| only("qemu-nbd", &vm.directory()),
            Signal::KILL,
        ),
        (
            "the bridge",
            |_, vm| only("memfold", &vm.directory()),
            Signal::KILL,
        ),
    ];
    for (round, (name, find, signal)) in (1..).zip(who) {
        vm.borrow(&[]);
        vm.write(2, 8);
        kill_process(find(&lender, &vm), signal).unwrap();
        let begun = Instant::now();
        // The read waits, as the guest would.
        vm.read(1, 0);
        let stalled = begun.elapsed();
        println!("stalled {} ms: {name}, {signal:?}", stalled.as_millis());
        // The lender is given up after 3 s; without this limit, the read would wait forever.
        assert!(stalled < bound(Duration::from_secs(20)), "{stalled:?}");
        vm.write(3 + round, 8);
        vm.wait_place("on_copy");
        vm.read(3 + round, 8);
        wait_free(&lender);
        nothing_is_left(&vm);
    }
}

#[test]
fn if_an_iscsi_lender_dies_while_the_borrowers_daemon_is_down_no_byte_is_lost() {
    let Some(lender) = lender("a", &[], &ISCSI) else {
        return;
    };
    let mut borrower = borrower(&lender);
    let vm = Swapping::start(&borrower, "v");
    vm.write(1, 0);
    vm.borrow(&[]);
    let place = vm.directory();
    borrower.child.kill().unwrap();
    borrower.child.wait().unwrap();
    kill_process(tgtd(&lender), Signal::KILL).unwrap();
    let begun = Instant::now();
    let away = Swapping {
        daemon: &borrower,
        name: "v",
    };
    away.read(1, 0);
    away.write(4, 0);
    assert!(begun.elapsed() < bound(Duration::from_secs(20)));
    assert!(processes("qemu-nbd", &place).is_empty());
    borrower.start_again();
    let vm = Swapping {
        daemon: &borrower,
        name: "v",
    };
    vm.wait_place("on_copy");
    vm.read(4, 0);
    wait_free(&lender);
    vm.borrow(&[]);
    vm.read(4, 0);
    vm.give_back();
}

#[test]
fn lending_over_iscsi_to_other_hosts_needs_an_option_and_refuses_unknown_initiators() {
    let Some(lender) = lender("a", &[], &ISCSI) else {
        return;
    };
    lender.json(&["lend", "--stop"]);
    wait("it lends no more", || lender.json(&["lend"]).is_null());
    let lend = |more: &[&str]| lender.run(&[&["lend", "--max", "64M"], more].concat());
    let refusal = lend(&[&ISCSI[..], &["--listen", "192.0.2.1"]].concat());
    refused(&refusal, 1, &["encrypts nothing", "--cleartext"]);
    refused(&lend(&["--cleartext"]), 1, &["NBD is encrypted"]);
    let output = lend(&ISCSI);
    assert!(output.status.success(), "{}", err(&output));
    // A lease to which no client connects; another client tries to.
    let want = serde_json::json!({ "take": { "ttl_ms": 60000, "want": {
        "borrower": "b", "vm": "v", "bytes": 16 << 20 } } });
    let ask = |call: &serde_json::Value| -> serde_json::Value {
        let (status, said) = lender.http("POST", "/v1/registry", call.to_string().as_bytes());
        assert_eq!(status, 200, "{said}");
        serde_json::from_str(&said).unwrap()
    };
    let mut id = 0;
    wait("it has something to spare", || {
        let taken = ask(&want);
        id = taken["lease"]["id"].as_u64().unwrap_or(0);
        id > 0
    });
    let mut found = serde_json::Value::Null;
    wait("it is exported", || {
        found = ask(&serde_json::json!({ "endpoint": { "id": id, "borrower": "b" } }))["endpoint"]
            .clone();
        !found.is_null()
    });
    assert_eq!(found["transport"], "iscsi");
    let port = &found["address"]["tcp"]["port"];
    let target = format!("iqn.2026-11.invalid.memfold:lease-{id}");
    let disk = |proof: &str| {
        let disk = format!(
            "driver=iscsi,transport=tcp,portal=127.0.0.1:{port},target={target},lun=1{proof}"
        );
        let info = Command::new("timeout")
            .args(["10", "qemu-img", "info", "--object"])
            .args(["secret,id=s,data=000000000000", "--image-opts", &disk])
            .output()
            .unwrap();
        (info.status.success(), err(&info))
    };
    for proof in ["", ",user=lease-1,password-secret=s"] {
        let (let_in, said) = disk(proof);
        assert!(!let_in, "a stranger is let in by '{proof}': {said}");
    }
    assert_eq!(lender.json(&["lend"])["failed"], 0, "a stranger ended it");
    let key = found["key"]["hex"].as_str().unwrap();
    let proof = format!(",user=lease-{id},password-secret=k");
    let disk =
        format!("driver=iscsi,transport=tcp,portal=127.0.0.1:{port},target={target},lun=1{proof}");
    let info = Command::new("qemu-img")
        .args(["info", "--object", &format!("secret,id=k,data={key}")])
        .args(["--image-opts", &disk])
        .output()
        .unwrap();
    assert!(info.status.success(), "{}", err(&info));
    // The session of this lease has ended.
    wait_free(&lender);
}

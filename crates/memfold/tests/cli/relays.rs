//! Tests of borrowed RAM when lenders serve wrong bytes, when a swap disk is striped over several
//! lenders, and when relays (processes between QEMU and a lender) are killed. QEMU's `qemu-io`
//! writes and reads the swap disks.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use memfold_testkit::{bound, patience};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::lending::{Swapping, export, lender, wait_free};
use crate::support::{Daemon, code, err, out, refused, wait};

const MIB: u64 = 1 << 20;

/// Starts a second lender, which uses the registry of the first.
fn another(host: &str, registry: &Daemon) -> Option<Daemon> {
    let socket = registry.socket();
    lender(host, &["--registry", socket.to_str().unwrap()], &[])
}

fn borrower(registry: &Daemon) -> Daemon {
    let socket = registry.socket();
    Daemon::start_with(&["--host", "b", "--registry", socket.to_str().unwrap()])
}

/// Changes the first byte of each page of an export that is full of `pattern`. Returns the number
/// of these pages.
fn change_pages(export: Pid, pattern: u8) -> usize {
    let pid = export.as_raw_nonzero();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let memory = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{pid}/mem"))
        .unwrap();
    let mut changed = 0;
    for line in maps.lines().filter(|line| line.contains("rw-p")) {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let [from, to] = [from, to].map(|n| u64::from_str_radix(n, 16).unwrap());
        let mut page = [0; 4096];
        for at in (from..to).step_by(4096) {
            let is_there = memory.read_exact_at(&mut page, at).is_ok();
            if is_there && page.iter().all(|byte| *byte == pattern) {
                memory.write_all_at(&[!pattern], at).unwrap();
                changed += 1;
            }
        }
    }
    changed
}

/// Returns the relays of VMs below a state directory, by the log that they have open.
fn relays(borrower: &Daemon) -> Vec<Pid> {
    let state = borrower.state();
    let is_log = |path: &Path| path.starts_with(&state) && path.ends_with("relay.log");
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        if std::fs::read_link(entry.path().join("fd/2")).is_ok_and(|to| is_log(&to)) {
            let number = entry.file_name().to_str().unwrap().parse().unwrap();
            found.push(Pid::from_raw(number).unwrap());
        }
    }
    found
}

fn wait_gone(borrower: &Daemon) {
    wait("no relay is left", || relays(borrower).is_empty());
    let vms = std::fs::read_dir(borrower.state().join("vms")).unwrap();
    for vm in vms.flatten() {
        for file in std::fs::read_dir(vm.path()).unwrap().flatten() {
            let name = file.file_name().to_str().unwrap().to_owned();
            assert!(!name.starts_with("lent"), "{name} is left");
        }
    }
}

#[test]
fn if_a_lender_changes_lent_data_the_borrower_leaves_it_and_does_not_use_it_again() {
    for listen in [&["--unix"][..], &["--listen", "127.0.0.1"]] {
        let Some(lying) = lender("a", &[], listen) else {
            return;
        };
        let mut borrower = borrower(&lying);
        let vm = Swapping::start(&borrower, "v");
        vm.write(1, 0);
        vm.borrow(&[]);
        vm.write(7, 8);
        vm.read(7, 8);
        assert!(change_pages(export(&lying), 7) > 0);
        // Reads return the bytes that were written, although the lender now has other bytes.
        vm.read(7, 8);
        vm.wait_place("on_copy");
        vm.read(7, 8);
        vm.read(1, 0);
        wait_gone(&borrower);
        let report = borrower.json(&["leases"]);
        assert_eq!(report["lies"], 1);
        assert_eq!(report["distrusted"][0]["lender"], "a");
        assert_eq!(report["distrusted"][0]["vm"], "v");
        let text = out(&borrower.run(&["leases"]));
        assert!(text.contains("lender 'a' is not used"), "{text}");
        wait_free(&lying);
        let refusal = ["no lender has", "not asked: a", "--trust"];
        refused(&borrower.run(&["borrow", "v"]), 1, &refusal);
        // The next daemon knows that the lender is distrusted, too.
        borrower.child.kill().unwrap();
        borrower.child.wait().unwrap();
        borrower.start_again();
        let vm = Swapping {
            daemon: &borrower,
            name: "v",
        };
        refused(&borrower.run(&["borrow", "v"]), 1, &refusal);
        // Another lender is used.
        let Some(honest) = another("c", &lying) else {
            return;
        };
        assert_eq!(vm.borrow(&[])["lenders"], serde_json::json!(["c"]));
        vm.read(7, 8);
        vm.give_back();
        wait_free(&honest);
        let said = out(&borrower.run(&["leases", "--trust", "a"]));
        assert!(said.contains("trusted again"), "{said}");
        assert_eq!(
            borrower.json(&["leases"])["distrusted"],
            serde_json::json!([])
        );
        drop(honest);
        wait("only 'a' is left", || {
            vm.daemon.json(&["leases"])["lenders"]
                .as_array()
                .is_some_and(|all| {
                    all.iter()
                        .all(|l| l["lender"]["host"] == "a" || l["left_ms"] == 0)
                })
        });
        assert_eq!(vm.borrow(&[])["lenders"], serde_json::json!(["a"]));
        vm.read(7, 8);
    }
}

#[test]
fn a_swap_disk_over_two_lenders_survives_the_loss_of_either_lender() {
    for victim in 0..2 {
        let Some(first) = lender("a", &[], &["--listen", "127.0.0.1"]) else {
            return;
        };
        let Some(second) = another("c", &first) else {
            return;
        };
        let borrower = borrower(&first);
        let vm = Swapping::start(&borrower, "v");
        for at in 0..16 {
            vm.write(u8::try_from(at).unwrap() + 1, at * 4);
        }
        let done = vm.borrow(&["--stripes", "2"]);
        let mut lenders: Vec<&str> = done["lenders"]
            .as_array()
            .unwrap()
            .iter()
            .map(|l| l.as_str().unwrap())
            .collect();
        lenders.sort_unstable();
        assert_eq!(lenders, ["a", "c"]);
        assert_eq!(done["stripes"], 2);
        let leases = borrower.json(&["leases"])["leases"].clone();
        let sizes: Vec<&Value> = leases
            .as_array()
            .unwrap()
            .iter()
            .map(|l| &l["bytes"])
            .collect();
        assert_eq!(sizes, [32 * MIB, 32 * MIB]);
        for at in 0..16 {
            vm.read(u8::try_from(at).unwrap() + 1, at * 4);
        }
        vm.write(99, 12);
        vm.read(99, 12);
        kill_process(export([&first, &second][victim]), Signal::KILL).unwrap();
        vm.read(99, 12);
        vm.wait_place("on_copy");
        vm.read(1, 0);
        vm.read(16, 60);
        // The other lender has its part back, too.
        wait_free(&first);
        wait_free(&second);
        wait_gone(&borrower);
        vm.borrow(&["--stripes", "2"]);
        vm.read(99, 12);
        vm.give_back();
        vm.read(99, 12);
        wait_free(&first);
        wait_free(&second);
        wait_gone(&borrower);
    }
}

#[test]
fn a_swap_disk_too_large_for_one_lender_is_borrowed_from_several_lenders_or_refused() {
    let Some(first) = lender("a", &[], &[]) else {
        return;
    };
    let Some(second) = another("c", &first) else {
        return;
    };
    let borrower = borrower(&first);
    borrower.paused_vm("big", &["--no-fold", "--swap", "400M"]);
    let big = Swapping {
        daemon: &borrower,
        name: "big",
    };
    let done = big.borrow(&[]);
    assert_eq!(
        (&done["stripes"], &done["place"]),
        (&2.into(), &"lent".into())
    );
    big.write(5, 300);
    big.read(5, 300);
    big.give_back();
    big.read(5, 300);
    wait_free(&first);
    wait_free(&second);
    // A disk gets all stripes or none: of three lenders, two are there.
    refused(
        &borrower.run(&["borrow", "big", "--stripes", "3"]),
        1,
        &["no lender has"],
    );
    wait_free(&first);
    wait_free(&second);
    refused(
        &borrower.run(&["borrow", "big", "--stripes", "9"]),
        1,
        &["1 to 8"],
    );
    refused(
        &borrower.run(&["borrow", "big", "--stripes", "2", "--durability", "replica"]),
        1,
        &["whole lenders"],
    );
}

#[test]
fn if_the_relay_process_of_a_swap_disk_is_killed_or_stopped_no_byte_is_lost() {
    let Some(lender) = lender("a", &[], &[]) else {
        return;
    };
    let mut borrower = borrower(&lender);
    for signal in [Signal::KILL, Signal::STOP] {
        let name = if signal == Signal::KILL { "k" } else { "s" };
        let vm = Swapping::start(&borrower, name);
        vm.write(1, 0);
        vm.borrow(&[]);
        vm.write(2, 8);
        let [relay] = relays(&borrower)[..] else {
            panic!("not one relay");
        };
        kill_process(relay, signal).unwrap();
        let begun = Instant::now();
        vm.read(2, 8);
        assert!(
            begun.elapsed() < bound(Duration::from_secs(20)),
            "{signal:?}"
        );
        vm.wait_place("on_copy");
        vm.read(1, 0);
        wait_free(&lender);
        wait_gone(&borrower);
        assert_eq!(
            code(&borrower.run(&["vm", "stop", name, "--timeout", "0"])),
            0
        );
    }
    let vm = Swapping::start(&borrower, "v");
    vm.borrow(&[]);
    vm.write(3, 8);
    let before = relays(&borrower);
    borrower.child.kill().unwrap();
    borrower.child.wait().unwrap();
    assert_eq!(relays(&borrower), before);
    borrower.start_again();
    let vm = Swapping {
        daemon: &borrower,
        name: "v",
    };
    vm.wait_place("lent");
    vm.read(3, 8);
    vm.give_back();
    wait_gone(&borrower);
    vm.read(3, 8);
    wait_free(&lender);
}

#[test]
fn a_host_lends_memory_as_configured_until_a_command_overrides_the_configuration() {
    // Another daemon is asked, because this test is for the defect that this one lends nothing.
    let able = Daemon::start_with(&["--host", "x"]).run(&["lend", "--max", "64M"]);
    if code(&able) == 3 {
        memfold_testkit::skip!("{}", err(&able));
    }
    let mut host = Daemon::start_with(&["--host", "a", "--lend", "64M"]);
    let lends = |host: &Daemon| host.json(&["lend"])["max_bytes"].as_u64();
    // A daemon begins to lend a moment after its start.
    let wait_lends = |host: &Daemon, bytes: u64| {
        wait(&format!("it lends {bytes} bytes"), || {
            lends(host) == Some(bytes)
        });
    };
    let again = |host: &mut Daemon| {
        host.child.kill().unwrap();
        host.child.wait().unwrap();
        host.start_again();
    };
    wait_lends(&host, 64 * MIB);
    assert_eq!(code(&host.run(&["lend", "--stop"])), 0);
    wait("it lends no more", || lends(&host).is_none());
    again(&mut host);
    // If it began to lend all the same, it would have done so by then.
    std::thread::sleep(patience(Duration::from_secs(3)));
    assert_eq!(lends(&host), None);
    assert_eq!(code(&host.run(&["lend", "--max", "32M"])), 0);
    again(&mut host);
    wait_lends(&host, 32 * MIB);
    // This simulates the next boot.
    let note = host.state().join("lend.json");
    let mut said: Value = serde_json::from_slice(&std::fs::read(&note).unwrap()).unwrap();
    said["boot"] = "another".into();
    std::fs::write(&note, said.to_string()).unwrap();
    again(&mut host);
    wait_lends(&host, 64 * MIB);
}

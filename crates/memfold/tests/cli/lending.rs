//! Tests of lending RAM between two daemons on one host. The VMs are paused: QEMU's own `qemu-io`
//! writes and reads their swap disks.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memfold_testkit::{bound, patience};
use memfold_vm::Qmp;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::support::{Daemon, code, err, out, refused, run, wait};

const MIB: u64 = 1 << 20;

/// Starts a daemon that lends and serves the registry; `None` if this host cannot lend.
pub fn lender(host: &str, more: &[&str], lend: &[&str]) -> Option<Daemon> {
    let daemon = Daemon::start_with(&[&["--host", host], more].concat());
    let output = daemon.run(&[&["lend", "--max", "256M"], lend].concat());
    if code(&output) == 3 {
        return memfold_testkit::reports_skip(&err(&output));
    }
    assert_eq!(code(&output), 0, "{}", err(&output));
    // A host whose tasks are waiting for memory lends nothing; other tests may cause that.
    let end = Instant::now() + patience(Duration::from_secs(120));
    while daemon.json(&["lend"])["offer_bytes"] != 256 * MIB {
        if Instant::now() > end {
            return memfold_testkit::reports_skip(&format!(
                "nothing to spare here: {}",
                daemon.json(&["lend"])
            ));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Some(daemon)
}

pub fn borrower(registry: &Daemon) -> Daemon {
    let socket = registry.socket();
    Daemon::start_with(&["--host", "b", "--registry", socket.to_str().unwrap()])
}

/// A paused VM with a swap disk of 64 MiB.
pub struct Swapping<'a> {
    pub daemon: &'a Daemon,
    pub name: &'a str,
}

impl<'a> Swapping<'a> {
    pub fn start(daemon: &'a Daemon, name: &'a str) -> Self {
        daemon.paused_vm(name, &["--no-fold", "--swap", "64M"]);
        Self { daemon, name }
    }

    pub fn directory(&self) -> PathBuf {
        self.daemon.state().join("vms").join(self.name)
    }

    fn qmp(&self) -> Qmp {
        Qmp::connect(&self.directory().join("qmp.sock"), Duration::from_secs(20)).unwrap()
    }

    /// Makes QEMU access the swap disk, as the guest would. QEMU prints the result to its own
    /// output.
    #[track_caller]
    fn io(&self, what: &str) {
        let log = self.directory().join("qemu.log");
        let before = std::fs::read_to_string(&log).unwrap().len();
        let line = format!("qemu-io -d /machine/peripheral/swap/virtio-backend \"{what}\"");
        let said = self.qmp().human(&line).unwrap();
        assert_eq!(said, "", "{what}");
        let said = std::fs::read_to_string(&log).unwrap().split_off(before);
        let bad = ["failed", "rror", "cannot", "not found"];
        let good = said.contains("bytes at offset") && !bad.iter().any(|b| said.contains(b));
        assert!(good, "{what}: {said}");
    }

    pub fn write(&self, pattern: u8, at: u64) {
        self.io(&format!("write -P {pattern} {at}M 4M"));
    }

    #[track_caller]
    pub fn read(&self, pattern: u8, at: u64) {
        self.io(&format!("read -P {pattern} {at}M 4M"));
    }

    /// Returns the names of the block nodes under the swap disk.
    pub fn nodes(&self) -> Vec<String> {
        let arguments = serde_json::json!({ "flat": true });
        let nodes = self
            .qmp()
            .execute("query-named-block-nodes", arguments)
            .unwrap();
        let name = |node: &Value| node["node-name"].as_str().unwrap().to_owned();
        let mut names: Vec<String> = nodes.as_array().unwrap().iter().map(name).collect();
        names.retain(|name| name.starts_with("swap"));
        names.sort();
        names
    }

    /// Returns the files of the swap disk that are removed with the VM; each must exist.
    pub fn files(&self) -> Vec<PathBuf> {
        let record = std::fs::read(self.directory().join("process.json")).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        let path = |path: &Value| PathBuf::from(path.as_str().unwrap());
        let all: Vec<PathBuf> = record["overlays"]
            .as_array()
            .unwrap()
            .iter()
            .map(path)
            .collect();
        assert!(all.iter().all(|path| path.exists()), "{all:?}");
        all
    }

    /// Borrows; waits while the lender's host is short of memory, which other tests may cause.
    #[track_caller]
    pub fn borrow(&self, more: &[&str]) -> Value {
        let arguments = [&["borrow", self.name], more, &["--json"]].concat();
        let mut output = self.daemon.run(&arguments);
        wait("a lender has memory to spare", || {
            let is_refused = err(&output).contains("no lender has");
            if is_refused {
                output = self.daemon.run(&arguments);
            }
            !is_refused
        });
        assert_eq!(code(&output), 0, "{arguments:?}: {}", err(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    pub fn give_back(&self) -> Value {
        self.daemon.json(&["return", self.name])
    }

    pub fn place(&self) -> String {
        let leases = self.daemon.json(&["leases"]);
        let of_it = |b: &&Value| b["vm"] == self.name;
        let borrowed = leases["borrowed"].as_array().unwrap().iter().find(of_it);
        borrowed.map_or("on_disk".into(), |b| b["place"].as_str().unwrap().into())
    }

    /// Returns the swap disk's place in the list of VMs, and the lender of each part of each copy.
    fn listed(&self) -> (Value, Value) {
        let vms = self.daemon.json(&["vm", "list"]);
        let vm = vms
            .as_array()
            .unwrap()
            .iter()
            .find(|vm| vm["name"] == self.name);
        let swap = &vm.unwrap()["swap"];
        assert_eq!(swap["bytes"], 64 * MIB);
        (swap["place"].clone(), swap["lent"].clone())
    }

    pub fn wait_place(&self, place: &str) {
        wait(place, || self.place() == place);
    }
}

/// Returns the process that exports a lease of this lender.
pub fn export(lender: &Daemon) -> Pid {
    exporting(lender).expect("nothing is exported")
}

fn exporting(lender: &Daemon) -> Option<Pid> {
    let place = lender.state().join("lend");
    let is_log =
        |path: &Path| path.starts_with(&place) && path.extension().is_some_and(|e| e == "log");
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        if std::fs::read_link(entry.path().join("fd/2")).is_ok_and(|to| is_log(&to)) {
            let number = entry.file_name().to_str().unwrap().parse().unwrap();
            return Pid::from_raw(number);
        }
    }
    None
}

pub fn leases(daemon: &Daemon) -> usize {
    daemon.json(&["leases"])["leases"].as_array().unwrap().len()
}

pub fn wait_free(lender: &Daemon) {
    wait("nothing is lent", || {
        leases(lender) == 0 && lender.json(&["lend"])["lent_bytes"] == 0
    });
    let files = std::fs::read_dir(lender.state().join("lend")).unwrap();
    assert_eq!(files.count(), 0);
}

#[test]
fn a_swap_disk_moves_to_lent_memory_and_back_without_losing_a_byte() {
    for listen in [&["--unix"][..], &["--listen", "127.0.0.1"]] {
        let Some(lender) = lender("a", &[], listen) else {
            return;
        };
        let borrower = borrower(&lender);
        let vm = Swapping::start(&borrower, "v");
        let first = vm.files();
        assert_eq!(first.len(), 1);
        let on_disk = ("on_disk".into(), json!([]));
        assert_eq!(vm.listed(), on_disk);
        vm.write(1, 0);
        vm.write(2, 60);
        let done = vm.borrow(&["64M"]);
        assert_eq!(
            (&done["place"], &done["changed"]),
            (&"lent".into(), &true.into())
        );
        assert_eq!(done["lenders"], json!(["a"]));
        let lent = json!([{"lender": "a", "bytes": 64 * MIB, "copy": 0}]);
        assert_eq!(vm.listed(), ("lent".into(), lent));
        // No guest runs that could report the use.
        let (status, said) = borrower.http("GET", "/v1/vms/v/swap", b"");
        assert_eq!(status, 200, "{said}");
        let said: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["used_bytes"], Value::Null);
        assert!(
            said["why_not"].as_str().unwrap().contains("not connected"),
            "{said}"
        );
        assert_eq!(
            vm.nodes(),
            ["swap-copy1", "swap-file1", "swap-lent1-0", "swap1"]
        );
        // The old disk is gone; the copy is removed with the VM.
        assert!(!first[0].exists());
        assert_eq!(vm.files().len(), 1);
        vm.read(1, 0);
        vm.read(2, 60);
        vm.write(3, 4);
        let again = vm.borrow(&[]);
        assert_eq!(
            (&again["place"], &again["changed"]),
            (&"lent".into(), &false.into())
        );
        let report = borrower.json(&["leases"]);
        assert_eq!(report["lenders"][0]["lent_bytes"], 64 * MIB);
        // The lender's ledger shows the memory among that of other processes.
        let ledger = &lender.json(&["report"])["ledger"]["host"];
        assert_eq!(ledger["lent_bytes"], 64 * MIB);
        assert!(ledger["others_anon_bytes"].as_u64() >= Some(64 * MIB));
        assert!(out(&lender.run(&["report"])).contains("lent to other hosts"));
        assert_eq!(report["leases"][0]["state"], "exported");
        assert_eq!(report["blast"][0]["lender"], "a");
        assert_eq!(report["blast"][0]["vms"][0]["vm"], "v");
        assert_eq!(report["blast"][0]["vms"][0]["loses_bytes"], false);
        let text = out(&borrower.run(&["leases"]));
        for word in ["b/v", "if 'a' dies", "continues on the copy on disk"] {
            assert!(text.contains(word), "no '{word}' in: {text}");
        }
        // No key is visible anywhere.
        assert!(!vm.directory().join("swap-keys").exists());
        let back = vm.give_back();
        assert_eq!(
            (&back["place"], &back["changed"]),
            (&"on_disk".into(), &true.into())
        );
        assert_eq!(vm.listed(), on_disk);
        assert_eq!(vm.nodes(), ["swap-copy1", "swap-file1", "swap1"]);
        for (pattern, at) in [(1, 0), (2, 60), (3, 4), (0, 32)] {
            vm.read(pattern, at);
        }
        wait_free(&lender);
        assert_eq!(vm.give_back()["changed"], false);
        // The VM borrows once more, from the state that this left.
        vm.borrow(&[]);
        assert_eq!(
            vm.nodes(),
            ["swap-copy2", "swap-file2", "swap-lent2-0", "swap2"]
        );
        vm.read(3, 4);
        let files = vm.files();
        assert_eq!(
            code(&borrower.run(&["vm", "stop", "v", "--timeout", "0"])),
            0
        );
        assert!(!files[0].exists());
        wait_free(&lender);
    }
}

#[test]
fn if_a_lender_of_memory_dies_or_hangs_no_byte_is_lost() {
    for (signal, listen) in [
        (Signal::KILL, "--unix"),
        (Signal::STOP, "--unix"),
        (Signal::STOP, "--listen=127.0.0.1"),
    ] {
        let Some(lender) = lender("a", &[], &[listen]) else {
            return;
        };
        let borrower = borrower(&lender);
        let vm = Swapping::start(&borrower, "v");
        vm.write(1, 0);
        vm.borrow(&[]);
        vm.write(2, 8);
        kill_process(export(&lender), signal).unwrap();
        let begun = Instant::now();
        // The read waits for the lender, as the guest would.
        vm.read(1, 0);
        assert!(
            begun.elapsed() < bound(Duration::from_secs(20)),
            "{:?}",
            begun.elapsed()
        );
        println!(
            "stalled {} ms by {signal:?}, {listen}",
            begun.elapsed().as_millis()
        );
        vm.write(3, 8);
        vm.wait_place("on_copy");
        assert_eq!(vm.nodes(), ["swap-copy1", "swap-file1", "swap1"]);
        vm.read(3, 8);
        wait_free(&lender);
        // The VM borrows again, from a complete copy.
        assert_eq!(vm.borrow(&[])["changed"], true);
        vm.read(1, 0);
        vm.read(3, 8);
        vm.give_back();
        vm.read(3, 8);
    }
}

#[test]
fn if_memory_borrowed_by_command_is_lost_it_is_borrowed_again_until_it_is_returned() {
    let Some(lender) = lender("a", &[], &[]) else {
        return;
    };
    let mut borrower = borrower(&lender);
    let again = |daemon: &Daemon| daemon.json(&["leases"])["again"].clone();
    {
        let vm = Swapping::start(&borrower, "v");
        vm.borrow(&[]);
        assert_eq!(again(&borrower), json!([]));
        vm.write(1, 0);
        let export = export(&lender);
        kill_process(export, Signal::KILL).unwrap();
        vm.write(2, 8);
        vm.wait_place("on_copy");
        assert_eq!(again(&borrower), json!(["v"]));
        let began = Instant::now();
        vm.wait_place("lent");
        // The VM does not borrow at once: an operator has time to check the lender first.
        assert!(
            began.elapsed() > Duration::from_secs(30),
            "{:?}",
            began.elapsed()
        );
        println!("borrowed again after {:.0?}", began.elapsed());
        vm.read(1, 0);
        vm.read(2, 8);
        assert_eq!(again(&borrower), json!([]));
        // The lender recalls its memory: the request still stands, also for the next daemon.
        lender.json(&["lend", "--stop"]);
        wait("it is on its disk", || again(&borrower) == json!(["v"]));
    }
    borrower.child.kill().unwrap();
    borrower.child.wait().unwrap();
    borrower.start_again();
    let vm = Swapping {
        daemon: &borrower,
        name: "v",
    };
    wait("the next daemon knows", || again(&borrower) == json!(["v"]));
    let text = out(&borrower.run(&["leases"]));
    assert!(
        text.contains("'v' borrows again when a lender has room"),
        "{text}"
    );
    vm.read(2, 8);
    assert_eq!(vm.give_back()["changed"], false);
    assert_eq!(again(&borrower), json!([]));
    vm.read(1, 0);
}

#[test]
fn if_daemons_of_lender_and_borrower_are_killed_no_byte_is_lost_and_no_memory_stays_lent() {
    let Some(mut lender) = lender("a", &[], &[]) else {
        return;
    };
    let mut borrower = borrower(&lender);
    let vm = Swapping::start(&borrower, "v");
    vm.write(1, 0);
    vm.borrow(&[]);
    let exporting = export(&lender);
    let borrowing = std::mem::replace(
        &mut borrower.child,
        std::process::Command::new("true").spawn().unwrap(),
    );
    kill(borrowing);
    borrower.child.wait().unwrap();
    borrower.start_again();
    let vm = Swapping {
        daemon: &borrower,
        name: "v",
    };
    vm.wait_place("lent");
    assert_eq!(export(&lender), exporting);
    vm.read(1, 0);
    // The lender's daemon dies: its exports end, and its leases are gone when it lends again.
    let lending = std::mem::replace(
        &mut lender.child,
        std::process::Command::new("true").spawn().unwrap(),
    );
    kill(lending);
    lender.child.wait().unwrap();
    wait("its export ends", || {
        // The process may remain a zombie, which holds no memory, if its new parent does not wait
        // for it.
        let stat = format!("/proc/{}/stat", exporting.as_raw_nonzero());
        std::fs::read_to_string(stat).map_or(true, |stat| stat.contains(") Z "))
    });
    vm.read(1, 0);
    vm.write(2, 0);
    lender.start_again();
    vm.wait_place("on_copy");
    wait("it lends again", || {
        lender.json(&["lend"])["offer_bytes"] == 256 * MIB
    });
    wait_free(&lender);
    vm.borrow(&[]);
    vm.read(2, 0);
    vm.give_back();
    vm.read(2, 0);
}

fn kill(mut child: std::process::Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// The process that dies during a move.
#[derive(Clone, Copy, Debug)]
enum Dies {
    /// The borrower's daemon, while the disk moves to the lender.
    There,
    /// The lender's exporting process.
    Export,
    /// The borrower's daemon, while the disk moves back from a lender that has the only copy.
    Back,
}

#[test]
fn if_processes_are_killed_while_a_swap_disk_moves_no_byte_is_lost_and_no_file_is_left() {
    let Some(lender) = lender("a", &[], &[]) else {
        return;
    };
    let mut borrower = borrower(&lender);
    Swapping::start(&borrower, "v");
    let mut on_the_way = 0;
    for (round, dies) in [Dies::There, Dies::Export, Dies::Back]
        .repeat(4)
        .iter()
        .enumerate()
    {
        let vm = Swapping {
            daemon: &borrower,
            name: "v",
        };
        // The whole disk is written, so that there is something to copy.
        let pattern = |part: usize| u8::try_from(1 + (part + round) % 250).unwrap();
        for part in 0..16 {
            vm.write(pattern(part), 4 * part as u64);
        }
        let durability: &[&str] = match dies {
            Dies::Back => &["--durability", "none"],
            Dies::There | Dies::Export => &[],
        };
        let note = vm.directory().join("borrowed.json");
        let arguments = if let Dies::Back = dies {
            vm.borrow(durability);
            vec!["return", "v"]
        } else {
            [&["borrow", "v"], durability].concat()
        };
        let begin = || {
            let mut command = vm.daemon.command(&arguments);
            command
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::null());
            command.spawn().unwrap()
        };
        let mut switch = begin();
        wait("it has begun", || {
            // A lender that is short of memory for a moment refuses.
            if !note.exists() && switch.try_wait().unwrap().is_some() {
                switch = begin();
            }
            note.exists()
        });
        // The kill comes later from round to round, from the first step of the move to its end.
        std::thread::sleep(Duration::from_millis(40 * (round as u64 / 3)));
        on_the_way += usize::from(switch.try_wait().unwrap().is_none());
        if let Dies::Export = dies {
            // The process may have ended with its lease.
            if let Some(pid) = exporting(&lender) {
                kill_process(pid, Signal::KILL).unwrap();
            }
            switch.wait().unwrap();
        } else {
            borrower.child.kill().unwrap();
            borrower.child.wait().unwrap();
            switch.wait().unwrap();
            borrower.start_again();
        }
        let vm = Swapping {
            daemon: &borrower,
            name: "v",
        };
        println!("round {round}, {dies:?}: {}", vm.place());
        for part in 0..16 {
            vm.read(pattern(part), 4 * part as u64);
        }
        vm.give_back();
        for part in 0..16 {
            vm.read(pattern(part), 4 * part as u64);
        }
        assert_eq!(vm.files().len(), 1, "{dies:?}");
        // The disk is on the copy alone, if there was one, or on a file.
        let nodes = vm.nodes();
        let is_lent = nodes.iter().any(|node| node.starts_with("swap-lent"));
        assert!(!is_lent && nodes.len() <= 3, "{dies:?}: {nodes:?}");
        assert!(!note.exists());
        wait_free(&lender);
    }
    assert!(on_the_way > 3, "of 12 only {on_the_way} were under way");
}

#[test]
fn a_swap_disk_replicated_at_two_lenders_survives_the_loss_of_one_and_moves_to_disk() {
    let Some(first) = lender("a", &[], &[]) else {
        return;
    };
    let socket = first.socket();
    let registry = ["--registry", socket.to_str().unwrap()];
    let Some(second) = lender("c", &registry, &[]) else {
        return;
    };
    let borrower = borrower(&first);
    let vm = Swapping::start(&borrower, "v");
    vm.write(1, 0);
    let done = vm.borrow(&["--durability", "replica"]);
    assert_eq!(done["lenders"].as_array().unwrap().len(), 2);
    let (_, lent) = vm.listed();
    let mut lenders = [0, 1].map(|copy| {
        assert_eq!(
            (&lent[copy]["copy"], &lent[copy]["bytes"]),
            (&json!(copy), &json!(64 * MIB))
        );
        lent[copy]["lender"].as_str().unwrap().to_owned()
    });
    lenders.sort();
    assert_eq!(lenders, ["a", "c"]);
    assert_eq!(vm.nodes(), ["swap-lent1-0", "swap-lent1-1", "swap1"]);
    assert!(vm.files().is_empty());
    vm.write(2, 8);
    kill_process(export(&first), Signal::KILL).unwrap();
    vm.read(2, 8);
    vm.wait_place("on_disk");
    assert_eq!(vm.nodes(), ["swap-file2", "swap2"]);
    assert_eq!(vm.files().len(), 1);
    vm.read(1, 0);
    vm.read(2, 8);
    wait_free(&second);
}

#[test]
fn a_swap_disk_moves_to_lent_memory_and_back_even_if_it_has_no_copy_on_disk() {
    let Some(lender) = lender("a", &[], &[]) else {
        return;
    };
    let borrower = borrower(&lender);
    let vm = Swapping::start(&borrower, "v");
    vm.write(1, 0);
    let done = vm.borrow(&["--durability", "none"]);
    assert_eq!(done["place"], "lent");
    assert_eq!(vm.nodes(), ["swap-lent1-0"]);
    let report = borrower.json(&["leases"]);
    assert_eq!(report["blast"][0]["vms"][0]["loses_bytes"], true);
    vm.write(2, 8);
    assert_eq!(vm.give_back()["changed"], true);
    assert_eq!(vm.nodes(), ["swap-file2", "swap2"]);
    vm.read(1, 0);
    vm.read(2, 8);
    wait_free(&lender);
}

#[test]
fn a_lender_that_stops_lending_gets_its_memory_back_from_running_vms() {
    let Some(lender) = lender("a", &[], &[]) else {
        return;
    };
    let borrower = borrower(&lender);
    let vm = Swapping::start(&borrower, "v");
    vm.write(1, 0);
    vm.borrow(&[]);
    // There is only one lease.
    let number = || lender.json(&["leases"])["leases"][0]["id"].to_string();
    refused(&lender.run(&["return", "--lease", "1"]), 1, &["no lease 1"]);
    refused(
        &borrower.run(&["return", "--lease", &number()]),
        1,
        &["no lease"],
    );
    let asked = lender.json(&["return", "--lease", &number()]);
    assert_eq!(asked["vm"], "v");
    wait("it is given back", || vm.place() == "on_disk");
    vm.read(1, 0);
    wait("it can be lent again", || {
        lender.json(&["lend"])["lent_bytes"] == 0 && leases(&lender) == 0
    });
    // The VM borrows more than the lender will lend from now on.
    vm.borrow(&[]);
    assert_eq!(
        lender.json(&["lend", "--max", "16M"])["max_bytes"],
        16 << 20
    );
    wait("it is given back", || vm.place() == "on_disk");
    wait("nothing is lent", || leases(&lender) == 0);
    assert_eq!(
        lender.json(&["lend", "--max", "256M"])["max_bytes"],
        256 << 20
    );
    wait("it is offered", || {
        lender.json(&["lend"])["offer_bytes"] == 256 << 20
    });
    vm.borrow(&[]);
    let begun = Instant::now();
    assert_eq!(lender.json(&["lend", "--stop"])["is_ending"], true);
    wait("it is given back", || lender.json(&["lend"]).is_null());
    println!("given back after {} ms", begun.elapsed().as_millis());
    assert_eq!(leases(&lender), 0);
    // The export ends with its connection, before the borrower has cleaned up.
    wait("it is on disk", || vm.place() == "on_disk");
    vm.read(1, 0);
    refused(&borrower.run(&["borrow", "v"]), 1, &["no lender has 64"]);
    vm.read(1, 0);
}

#[test]
fn an_impossible_borrow_request_is_refused_and_changes_nothing() {
    let Some(lender) = lender("a", &[], &[]) else {
        return;
    };
    let borrower = borrower(&lender);
    borrower.paused_vm("plain", &["--no-fold"]);
    refused(
        &borrower.run(&["borrow", "plain"]),
        1,
        &["no swap disk", "--swap"],
    );
    refused(&borrower.run(&["borrow", "nobody"]), 1, &["no VM named"]);
    let vm = Swapping::start(&borrower, "v");
    vm.write(1, 0);
    refused(
        &borrower.run(&["borrow", "v", "1M"]),
        1,
        &["64", "cannot hold it", "hint"],
    );
    refused(
        &borrower.run(&["borrow", "v", "--durability", "replica"]),
        1,
        &["no lender has"],
    );
    borrower.paused_vm("large", &["--no-fold", "--swap", "512M"]);
    refused(
        &borrower.run(&["borrow", "large"]),
        1,
        &["no lender has 512", "the largest offer"],
    );
    refused(
        &borrower.run(&["snapshot", "save", "v", "s"]),
        1,
        &["swap disk"],
    );
    refused(
        &lender.run(&["lend", "--max", "1G", "--listen", "127.0.0.1"]),
        1,
        &["already lends", "--stop"],
    );
    // The memory of the replica's first half is free as soon as the lender has seen that.
    wait_free(&lender);
    assert_eq!(vm.nodes(), ["swap-file0", "swap0"]);
    assert_eq!(vm.files().len(), 1);
    vm.read(1, 0);
    // The registry does not exist.
    let alone = Daemon::start_with(&["--host", "x", "--registry", "/nowhere/socket"]);
    refused(
        &alone.run(&["leases"]),
        1,
        &["/nowhere/socket", "cannot use the registry"],
    );
    refused(
        &alone.run(&["lend", "--max", "64M"]),
        1,
        &["/nowhere/socket"],
    );
}

#[test]
fn a_continuously_swapping_vm_borrows_memory_automatically() {
    let Some(lender) = lender("a", &[], &[]) else {
        return;
    };
    let socket = lender.socket();
    let registry = ["--registry", socket.to_str().unwrap()];
    let more = [&["--host", "b", "--borrow", "auto"], registry.as_slice()];
    let borrower = Daemon::start_with(&more.concat());
    let vm = Swapping::start(&borrower, "v");
    let idle = Swapping::start(&borrower, "idle");
    vm.write(1, 60);
    // These accesses are like the guest's, and are counted like them.
    let swap = |at: u64| {
        let line = format!(
            "qemu-io -d /machine/peripheral/swap/virtio-backend \"aio_write -P 2 {at}M 4M\""
        );
        vm.qmp().human(&line).unwrap();
        std::thread::sleep(Duration::from_millis(300));
    };
    // Once the daemon has leases, it writes this file. A command in each turn could make the turns
    // so slow that the VM does not swap enough.
    let note = vm.directory().join("borrowed.json");
    let begun = Instant::now();
    let mut turn = 0;
    wait("it borrows by itself", || {
        turn += 1;
        swap(turn % 8 * 4);
        note.exists() && vm.place() == "lent"
    });
    let after = begun.elapsed();
    println!("borrowed after {after:?}");
    assert!(after >= Duration::from_secs(8), "{after:?}");
    // The next daemon is to return this loan by itself.
    let loan: Value = serde_json::from_slice(&std::fs::read(&note).unwrap()).unwrap();
    assert_eq!(loan["by_itself"], true);
    assert_eq!(idle.place(), "on_disk");
    vm.read(1, 60);
    // The operator's decision stands, although the VM continues to swap.
    assert_eq!(vm.give_back()["changed"], true);
    let returned = Instant::now();
    while returned.elapsed() < Duration::from_secs(16) {
        turn += 1;
        swap(turn % 8 * 4);
        assert!(!note.exists(), "it borrows again");
    }
    assert_eq!(vm.place(), "on_disk");
    vm.read(1, 60);
}

#[test]
fn borrow_for_a_volume_with_a_vm_or_with_a_wrong_size_is_wrong_usage() {
    for (words, said) in [
        (&["vm1", "1G"][..], "cannot be used with"),
        (&["nonsense"], "with --lvm, give no VM, only a size"),
    ] {
        let output = run(&[&["borrow", "--lvm", "vg/swap"], words].concat());
        assert_eq!(code(&output), 2, "{}", err(&output));
        assert!(err(&output).contains(said), "{}", err(&output));
    }
}

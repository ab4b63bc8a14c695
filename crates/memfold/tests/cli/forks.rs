//! Attacks on forks and layers of VMs without a guest: killed processes, full disks, and parents
//! that are removed, replaced or changed. Whatever fails leaves the running VM as it was, and no
//! part of a snapshot. The memory of these VMs holds random bytes that the test puts there.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use memfold_testkit::dose;
use memfold_vm::{Qmp, Vm};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::{Daemon, Small, code, err, out, refused, wait};

pub const MIB: u64 = 1 << 20;

/// Where the test's bytes begin in the memory of a VM: above the firmware's, below its tables.
pub const AT: u64 = 16 * MIB;

/// Starts a VM that runs only its firmware.
pub fn run(daemon: &Daemon, name: &str, more: &[&str]) {
    let start = ["vm", "run", "--name", name, "--memory", "64M"];
    let output = daemon.run(&[&start, more].concat());
    assert_eq!(code(&output), 0, "{}", err(&output));
}

pub fn stop(daemon: &Daemon, name: &str) {
    daemon.json(&["vm", "stop", name, "--timeout", "0"]);
}

fn fork(daemon: &Daemon, vm: &str, name: &str, more: &[&str]) -> Command {
    let words = ["fork", vm, "--name", name, "--force", "--no-wait", "--json"];
    daemon.command(&[&words, more].concat())
}

fn restore(daemon: &Daemon, snapshot: &str, name: &str) -> Output {
    daemon.run(&["snapshot", "restore", snapshot, "--as", name, "--force"])
}

fn done(output: &Output) -> Value {
    assert_eq!(code(output), 0, "{}", err(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns `length` bytes that differ for each seed.
pub fn random(seed: u64, length: u64) -> Vec<u8> {
    let words = (0..length / 16).map(|word| {
        let word = [seed.to_le_bytes(), word.to_le_bytes()].concat();
        xxhash_rust::xxh3::xxh3_128(&word).to_le_bytes()
    });
    words.flatten().collect()
}

/// The main memory of a running VM, in its QEMU's process.
pub struct Memory {
    file: File,
    start: u64,
}

impl Memory {
    pub fn of(daemon: &Daemon, name: &str) -> Self {
        let vm = Vm::find(&daemon.state(), name).unwrap();
        let socket = daemon.state().join("vms").join(name).join("qmp.sock");
        let mut qmp = Qmp::connect(&socket, Duration::from_secs(60)).unwrap();
        let layout = vm.layout(&mut qmp).unwrap();
        let ram = layout.blocks.iter().max_by_key(|block| block.pages);
        let path = format!("/proc/{}/mem", vm.pid().as_raw_nonzero());
        Self {
            file: File::options().read(true).write(true).open(path).unwrap(),
            start: ram.unwrap().hva.0,
        }
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, self.start + at).unwrap();
    }

    #[track_caller]
    pub fn holds(&self, at: u64, bytes: &[u8]) {
        let mut now = vec![0; bytes.len()];
        self.file.read_exact_at(&mut now, self.start + at).unwrap();
        let wrong = now.iter().zip(bytes).position(|(now, then)| now != then);
        assert_eq!(wrong, None, "first wrong byte of the VM's memory");
    }
}

/// Waits until a VM runs, and asserts that its memory holds these bytes. After a fork, the library
/// stops the VM for some milliseconds, to share its memory with the fork.
#[track_caller]
fn is_untouched(daemon: &Daemon, name: &str, bytes: &[u8]) {
    let socket = daemon.state().join("vms").join(name).join("qmp.sock");
    let mut qmp = Qmp::connect(&socket, Duration::from_secs(60)).unwrap();
    wait(&format!("VM '{name}' runs"), || {
        qmp.query("query-status").unwrap()["status"] == "running"
    });
    drop(qmp);
    Memory::of(daemon, name).holds(AT, bytes);
}

fn shelf(daemon: &Daemon) -> PathBuf {
    daemon.directory.path().join("snapshots")
}

/// Waits until the directory of snapshots holds complete snapshots and nothing else, and returns
/// their names. The daemon may just be removing a layer of forks.
#[track_caller]
fn complete_snapshots(daemon: &Daemon) -> Vec<String> {
    let mut names = Vec::new();
    wait("no part of a snapshot is left", || {
        let list = daemon.json(&["snapshot", "list"]);
        let list = list.as_array().unwrap();
        let name = |snapshot: &Value| snapshot["name"].as_str().unwrap().to_owned();
        names = list.iter().map(name).collect();
        let entries = fs::read_dir(shelf(daemon)).into_iter().flatten().flatten();
        let entries = entries.map(|entry| entry.file_name().into_string().unwrap());
        let mut there: Vec<String> = entries.filter(|name| !name.contains("filler")).collect();
        names.sort();
        there.sort();
        there == names
            && list
                .iter()
                .all(|snapshot| snapshot["problem"] == Value::Null)
    });
    names
}

/// Asserts that all snapshots are complete and right.
#[track_caller]
fn verify_all(daemon: &Daemon) {
    for name in complete_snapshots(daemon) {
        let verified = daemon.run(&["snapshot", "verify", &name]);
        // The daemon removes layers of forks that no VM needs.
        let told = err(&verified);
        let is_removed = told.contains("is being removed") || told.contains("no snapshot named");
        let is_right = code(&verified) == 0 || is_removed;
        assert!(is_right, "{}{told}", out(&verified));
    }
}

/// Stops all VMs but one, also those that a killed daemon was starting.
fn stop_others(daemon: &Daemon, kept: &str) {
    wait("the other VMs end", || {
        let vms = daemon.json(&["vm", "list"]);
        let names = vms.as_array().unwrap().iter();
        let names = names.map(|vm| vm["name"].as_str().unwrap().to_owned());
        let others: Vec<String> = names.filter(|name| name != kept).collect();
        for name in &others {
            // A VM that is not adopted yet is stopped the next time.
            daemon.run(&["vm", "stop", name, "--timeout", "0"]);
        }
        others.is_empty()
    });
}

fn disk(daemon: &Daemon) -> String {
    let path = daemon.directory.path().join("disk.img");
    if !path.exists() {
        fs::write(&path, random(99, 4 * MIB)).unwrap();
    }
    format!("{},format=raw", path.display())
}

#[test]
fn a_daemon_or_qemu_killed_at_any_moment_of_a_fork_leaves_the_vm_running_and_no_part_of_a_snapshot()
{
    let mut daemon = Daemon::start();
    let disk = disk(&daemon);
    let root = format!("root-{}", std::process::id());
    run(&daemon, &root, &["--disk", &disk, "--snapshot"]);
    let mut bytes = random(0, 8 * MIB);
    Memory::of(&daemon, &root).write(AT, &bytes);
    done(&fork(&daemon, &root, "first", &[]).output().unwrap());
    let began = Instant::now();
    done(&fork(&daemon, &root, "second", &[]).output().unwrap());
    let usual = began.elapsed();
    let kills = u32::try_from(dose("MEMFOLD_FORK_KILLS", 3)).unwrap();
    for number in 0..kills {
        let more: &[&str] = if number % 2 == 0 { &[] } else { &["--keep"] };
        // Another part of the memory each time.
        let part = usize::try_from(u64::from(number) % 8 * MIB).unwrap();
        let new = random(u64::from(number) + 1, MIB);
        bytes[part..part + new.len()].copy_from_slice(&new);
        Memory::of(&daemon, &root).write(AT, &bytes);
        let of_qemu = number % 3 == 2;
        // A fork that may be lost with its QEMU; the root must not be.
        let forked = if of_qemu { "first-1" } else { &root };
        let mut client = fork(&daemon, forked, "cut", more).spawn().unwrap();
        std::thread::sleep(usual * (number + 1) / (kills + 1));
        if of_qemu {
            let pid = Vm::find(&daemon.state(), forked).unwrap().pid();
            kill_process(pid, Signal::KILL).unwrap();
            client.wait().unwrap();
            wait("the killed VM is gone", || {
                let vms = daemon.json(&["vm", "list"]);
                let mut vms = vms.as_array().unwrap().iter();
                vms.all(|vm| vm["name"] != forked)
            });
        } else {
            kill_process(Pid::from_child(&daemon.child), Signal::KILL).unwrap();
            daemon.child.wait().unwrap();
            client.wait().unwrap();
            daemon.start_again();
            wait("the VM is adopted", || {
                let vms = daemon.json(&["vm", "list"]);
                let mut vms = vms.as_array().unwrap().iter();
                vms.any(|vm| vm["name"] == root && vm["state"] == "running")
            });
        }
        is_untouched(&daemon, &root, &bytes);
        verify_all(&daemon);
        stop_others(&daemon, &root);
        // The next fork has the memory of its moment.
        done(&fork(&daemon, &root, "first", &[]).output().unwrap());
        is_untouched(&daemon, "first-1", &bytes);
        is_untouched(&daemon, &root, &bytes);
    }
    stop_others(&daemon, "");
    let place = std::env::var_os("TMPDIR").unwrap_or_else(|| "/var/tmp".into());
    let left = fs::read_dir(place).unwrap().flatten();
    let left = left.map(|entry| entry.file_name());
    let beginning = format!("memfold-{root}-");
    let left: Vec<_> = left
        .filter(|name| name.to_string_lossy().starts_with(&beginning))
        .collect();
    assert!(left.is_empty(), "overlays are left: {left:?}");
}

#[test]
fn a_fork_fails_at_every_step_at_which_its_disk_is_full_and_leaves_the_vm_running_and_no_file() {
    let daemon = Daemon::start();
    let shelf = Small::mount(&shelf(&daemon), "64m");
    let disk = disk(&daemon);
    run(&daemon, "root", &["--disk", &disk, "--snapshot"]);
    let bytes = random(1, 8 * MIB);
    Memory::of(&daemon, "root").write(AT, &bytes);
    // The memory does not fit, and that is known before.
    shelf.resize("4m");
    let output = fork(&daemon, "root", "small", &["--keep"])
        .output()
        .unwrap();
    refused(
        &output,
        1,
        &["cannot fork VM 'root'", "free", "remove snapshots"],
    );
    assert!(complete_snapshots(&daemon).is_empty());
    is_untouched(&daemon, "root", &bytes);
    // Each file needs an entry, so that each step that makes one fails in turn.
    let mut failed = 0;
    for entries in 2.. {
        shelf.resize(&format!("64m,nr_inodes={entries}"));
        let more: &[&str] = if entries % 2 == 0 { &[] } else { &["--keep"] };
        let output = fork(&daemon, "root", "fork", more).output().unwrap();
        if code(&output) == 0 {
            break;
        }
        failed += 1;
        assert_eq!(code(&output), 1, "{}", err(&output));
        assert!(complete_snapshots(&daemon).is_empty(), "{entries} entries");
        is_untouched(&daemon, "root", &bytes);
    }
    assert!(failed >= 4, "failed {failed} times");
    is_untouched(&daemon, "fork-1", &bytes);
    stop_others(&daemon, "root");
    shelf.resize("64m,nr_inodes=1000");
    // Somebody else fills the disk while the fork is made: its snapshot is whole or absent.
    let began = Instant::now();
    done(&fork(&daemon, "root", "timed", &[]).output().unwrap());
    let usual = began.elapsed();
    let moments = u32::try_from(dose("MEMFOLD_FORK_FULL_DISKS", 2)).unwrap();
    for moment in 0..moments {
        stop_others(&daemon, "root");
        let mut client = fork(&daemon, "root", "filled", &[]).spawn().unwrap();
        std::thread::sleep(usual * (moment + 1) / (moments + 1));
        let filler = shelf.0.join(".filler");
        // As much as fits.
        let _ = fs::write(&filler, vec![1; usize::try_from(80 * MIB).unwrap()]);
        let made = client.wait().unwrap();
        is_untouched(&daemon, "root", &bytes);
        verify_all(&daemon);
        if made.success() {
            is_untouched(&daemon, "filled-1", &bytes);
        }
        fs::remove_file(&filler).unwrap();
    }
    done(&fork(&daemon, "root", "last", &[]).output().unwrap());
    is_untouched(&daemon, "last-1", &bytes);
    is_untouched(&daemon, "root", &bytes);
}

/// Flips a bit of a file.
fn flip(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

/// Returns where the test's bytes are in a snapshot's RAM image.
fn place_in_image(ram: &Path, bytes: &[u8]) -> u64 {
    let image = fs::read(ram).unwrap();
    let found = image
        .chunks(4096)
        .position(|page| page == &bytes[..4096])
        .unwrap();
    found as u64 * 4096
}

#[test]
fn a_changed_replaced_or_removed_parent_is_refused_and_its_return_makes_layers_whole_again() {
    let daemon = Daemon::start();
    run(&daemon, "root", &[]);
    let of_parent = random(1, 8 * MIB);
    Memory::of(&daemon, "root").write(AT, &of_parent);
    daemon.json(&["snapshot", "save", "root", "parent"]);
    let output = restore(&daemon, "parent", "web");
    assert_eq!(code(&output), 0, "{}", err(&output));
    // The first half is the VM's own now, the second one the parent's.
    let mut bytes = of_parent.clone();
    let half = bytes.len() / 2;
    bytes[..half].copy_from_slice(&random(2, half as u64));
    Memory::of(&daemon, "web").write(AT, &bytes[..half]);
    let layer = daemon.json(&["snapshot", "save", "web", "layer"]);
    assert_eq!(layer["parent"]["name"], "parent");
    let place = shelf(&daemon).join("parent");
    let first = place_in_image(&place.join("ram"), &of_parent);
    let is_whole = |name: &str| {
        let output = restore(&daemon, "layer", name);
        assert_eq!(code(&output), 0, "{}", err(&output));
        is_untouched(&daemon, name, &bytes);
        stop(&daemon, name);
    };
    is_whole("before");
    // Bits of pages that the VM has replaced, and of pages that only the layer refers to: the VM's
    // own memory shows the latter, so they are flipped back.
    for at in [first, first + 8 * MIB - 1] {
        flip(&place.join("ram"), at);
        let forked = fork(&daemon, "web", "of-web", &[]).output().unwrap();
        refused(&forked, 1, &["parent", "chunk"]);
        let kept = fork(&daemon, "web", "of-web", &["--keep"])
            .output()
            .unwrap();
        refused(&kept, 1, &["parent", "chunk"]);
        if at != first {
            refused(&restore(&daemon, "layer", "x"), 1, &["layer", "chunk"]);
        }
        refused(&restore(&daemon, "parent", "x"), 1, &["parent", "chunk"]);
        flip(&place.join("ram"), at);
        is_untouched(&daemon, "web", &bytes);
        assert_eq!(complete_snapshots(&daemon), ["layer", "parent"]);
    }
    done(&fork(&daemon, "web", "of-web", &[]).output().unwrap());
    is_untouched(&daemon, "of-web-1", &bytes);
    stop(&daemon, "of-web-1");
    // Another snapshot in its place.
    Memory::of(&daemon, "root").write(AT, &random(3, 8 * MIB));
    daemon.json(&["snapshot", "save", "root", "other"]);
    let aside = daemon.directory.path().join("aside");
    fs::rename(&place, &aside).unwrap();
    fs::rename(shelf(&daemon).join("other"), &place).unwrap();
    refused(&restore(&daemon, "layer", "x"), 1, &["layer"]);
    refused(
        &daemon.run(&["snapshot", "save", "web", "next", "--parent", "parent"]),
        1,
        &["parent"],
    );
    is_untouched(&daemon, "web", &bytes);
    fs::rename(&place, shelf(&daemon).join("other")).unwrap();
    // None at all.
    refused(&restore(&daemon, "layer", "x"), 1, &["parent"]);
    refused(
        &daemon.run(&["snapshot", "save", "web", "next", "--parent", "parent"]),
        1,
        &["parent"],
    );
    // The VM maps the files all the same, and its fork needs no parent.
    let report = done(&fork(&daemon, "web", "of-web", &[]).output().unwrap());
    assert_eq!(report["parent"], Value::Null);
    is_untouched(&daemon, "of-web-1", &bytes);
    is_untouched(&daemon, "web", &bytes);
    stop(&daemon, "of-web-1");
    fs::rename(&aside, &place).unwrap();
    is_whole("after");
}

#[test]
fn the_tree_of_snapshots_says_that_a_layer_saved_after_a_fork_is_built_on_the_layer_of_the_forks() {
    let daemon = Daemon::start();
    run(&daemon, "root", &[]);
    Memory::of(&daemon, "root").write(AT, &random(1, MIB));
    let report = done(
        &fork(&daemon, "root", "fork", &["--wait-shared"])
            .output()
            .unwrap(),
    );
    let hidden = report["snapshot"].as_str().unwrap();
    let saved = daemon.json(&["snapshot", "save", "fork-1", "kept"]);
    assert_eq!(saved["parent"]["name"], hidden);
    let tree = out(&daemon.run(&["snapshot", "list", "--tree"]));
    let lines: Vec<&str> = tree.lines().map(str::trim_end).collect();
    let of_forks = format!("{hidden} (layer of forks)");
    let place = |line: usize, name: &str| lines.get(line).and_then(|line| line.find(name));
    let above = (0..lines.len()).find(|&line| place(line, &of_forks).is_some());
    let above = above.unwrap_or_else(|| panic!("{tree}"));
    assert!(place(above, hidden) < place(above + 1, "kept"), "{tree}");
    // It goes with the snapshot that needs it, and not before.
    refused(&daemon.run(&["snapshot", "remove", hidden]), 1, &["in use"]);
}

#[test]
fn a_snapshot_is_removed_together_with_layers_of_its_forks_that_no_vm_uses_any_more() {
    let daemon = Daemon::start();
    run(&daemon, "root", &[]);
    Memory::of(&daemon, "root").write(AT, &random(1, MIB));
    daemon.json(&["snapshot", "save", "root", "kept"]);
    daemon.json(&["vm", "stop", "root", "--timeout", "0"]);
    let restored = restore(&daemon, "kept", "parent");
    assert_eq!(code(&restored), 0, "{}", err(&restored));
    for (of, name) in [("parent", "child"), ("child-1", "grandchild")] {
        Memory::of(&daemon, of).write(AT, &random(2, MIB));
        done(
            &fork(&daemon, of, name, &["--wait-shared"])
                .output()
                .unwrap(),
        );
    }
    let layers = || daemon.json(&["snapshot", "list"]).as_array().unwrap().len();
    assert_eq!(layers(), 3);
    for used in ["parent", "child-1"] {
        daemon.json(&["vm", "stop", used, "--timeout", "0"]);
    }
    // The grandchild needs both layers.
    refused(
        &daemon.run(&["snapshot", "remove", "kept"]),
        1,
        &["grandchild-1"],
    );
    daemon.json(&["vm", "stop", "grandchild-1", "--timeout", "0"]);
    daemon.json(&["snapshot", "remove", "kept"]);
    assert_eq!(layers(), 0);
}

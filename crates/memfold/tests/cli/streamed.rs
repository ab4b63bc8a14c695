//! Tests of VMs that run while their snapshot is fetched, and whose connections to the daemon fail
//! or break. No guest is needed: a VM runs only its firmware, and another one is only simulated.

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use memfold_sys::descriptor;
use memfold_testkit::patience;
use memfold_units::ByteSize;
use memfold_vm::{Identity, Record, Vm, VmDirectory, VmSpec};
use memfold_wire::library::{Arrived, Awaited, Order, Reply, VERSION};
use memfold_wire::{Decoder, encode};
use rustix::process::Pid;
use serde_json::{Value, json};

use crate::forks::{AT, MIB, Memory, random};
use crate::support::{Daemon, wait};
use crate::transfers::{RANDOM_MIB, kill, put_back, save, succeeds, take_large_chunks};

/// Saves a VM, pushes the snapshot, and begins to fetch it as `copy` from a store that lacks most
/// of its memory. Returns the directory of the store, and that of the missing chunks.
fn begin(daemon: &Daemon) -> (PathBuf, PathBuf) {
    let (url, store) = save(daemon);
    succeeds(daemon, &["snapshot", "push", "warm", &url]);
    // Nobody has signed that QEMU may run as root.
    let path = store.join("snapshots/warm.json");
    let mut description: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    description["manifest"]["spec"]["user"] = "root".into();
    fs::write(&path, serde_json::to_vec(&description).unwrap()).unwrap();
    let aside = take_large_chunks(&store);
    let stream = ["snapshot", "pull", "warm", &url, "--as", "copy", "--stream"];
    succeeds(daemon, &stream);
    (store, aside)
}

/// The library in the QEMU of a simulated VM. Each socket over which the daemon wants to bring
/// pages is received.
fn simulate_library(place: &VmDirectory) -> Receiver<UnixStream> {
    let listener = UnixListener::bind(place.library()).unwrap();
    let (tell, sockets) = channel();
    std::thread::spawn(move || {
        while let Ok((link, _)) = listener.accept() {
            let mut decoder = Decoder::new();
            let mut socket = None;
            while let Some((order, came)) = next::<Order>(&link, &mut decoder) {
                socket = came.or(socket);
                let reply = match order {
                    Order::Hello { .. } => Reply::Hello {
                        version: VERSION,
                        library: "test".into(),
                        can_move: true,
                        can_write_protect: true,
                        can_stop: true,
                        problem: None,
                    },
                    Order::Await { .. } => {
                        let socket = socket.take().expect("a socket comes with the order");
                        if tell.send(UnixStream::from(socket)).is_err() {
                            return;
                        }
                        Reply::Ok
                    }
                    _ => Reply::Ok,
                };
                descriptor::send(&link, &encode(&reply).unwrap(), None).unwrap();
            }
        }
    });
    sockets
}

/// Returns the next message of the daemon, with the file that came; `None` if there is no more.
fn next<M>(socket: &UnixStream, decoder: &mut Decoder) -> Option<(M, Option<OwnedFd>)>
where
    M: serde::de::DeserializeOwned + memfold_wire::frame::Validate,
{
    let (mut file, mut buffer) = (None, vec![0; 64 << 10]);
    loop {
        if let Some(message) = decoder.next().unwrap() {
            return Some((message, file));
        }
        let (bytes, came) = descriptor::receive(socket, &mut buffer).ok()?;
        if bytes == 0 {
            return None;
        }
        decoder.push(&buffer[..bytes]);
        file = came.or(file);
    }
}

#[test]
fn a_half_written_request_of_a_streamed_pull_is_removed_when_the_daemon_starts() {
    let mut daemon = Daemon::start();
    daemon.terminate();
    let shelf = daemon.directory.path().join("snapshots");
    fs::create_dir_all(&shelf).unwrap();
    let (part, other) = (shelf.join(".warm.new"), shelf.join(".other"));
    for file in [&part, &other] {
        fs::write(file, "{").unwrap();
    }
    daemon.start_again();
    wait("the part of the request is removed", || !part.exists());
    assert!(other.exists());
}

#[test]
fn connections_of_a_vm_whose_snapshot_is_fetched_are_made_again_after_they_fail_or_break() {
    let mut daemon = Daemon::start();
    let (store, aside) = begin(&daemon);
    kill(&mut daemon);
    let manifest = daemon.directory.path().join("snapshots/warm/manifest.json");
    let manifest: Value = serde_json::from_slice(&fs::read(manifest).unwrap()).unwrap();
    let blocks = manifest["blocks"].as_array().unwrap().iter();
    let block = blocks.max_by_key(|block| block["pages"].as_u64()).unwrap();
    let pages = block["pages"].as_u64().unwrap();
    // A VM of the killed daemon. It ends with `daemon`.
    let mut process = Command::new("sleep").arg("1000").spawn().unwrap();
    let place = VmDirectory::of(&daemon.state(), "simulated");
    fs::create_dir_all(place.path()).unwrap();
    let record = Record {
        process: Identity::of(Pid::from_child(&process)).unwrap(),
        qemu: "/bin/sleep".into(),
        version: (10, 0, 0),
        machine: String::new(),
        accel: "tcg".into(),
        library: Some("library".into()),
        overlays: Vec::new(),
        user: None,
    };
    place.write_json(&place.record(), &record).unwrap();
    let spec = VmSpec::new("simulated", ByteSize::mib(64));
    place.write_json(&place.spec(), &spec).unwrap();
    let note = json!({ "snapshot": "copy", "blocks": [[block["name"], 1_u64 << 40, pages]] });
    place.write_json(&place.arriving(), &note).unwrap();

    daemon.start_again();
    // Now the daemon has tried to connect.
    daemon.json(&["snapshot", "list"]);
    let sockets = simulate_library(&place);
    let socket = || {
        let socket = sockets.recv_timeout(patience(Duration::from_secs(60)));
        socket.expect("the daemon connects again")
    };
    let first = socket();
    let (_, file) = next::<Arrived>(&first, &mut Decoder::new()).unwrap();
    assert!(file.is_some());
    // The library ends the connection, for example because QEMU had no descriptor for a file.
    drop(first);
    let second = socket();
    let mut disks = UnixStream::connect(daemon.state().join("arriving/simulated.sock")).unwrap();
    let mut greeting = [0; 8];
    disks.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"NBDMAGIC");
    put_back(&store, &aside);
    let (mut decoder, mut mapped) = (Decoder::new(), 0);
    while mapped < pages {
        let (arrived, _) = next::<Arrived>(&second, &mut decoder).unwrap();
        mapped += arrived.runs.iter().map(|run| run.pages).sum::<u64>();
    }
    assert_eq!(mapped, pages);
    descriptor::send(&second, &encode(&Awaited::Complete).unwrap(), None).unwrap();
    // A complete VM needs no other connection.
    let more = sockets.recv_timeout(Duration::from_secs(3));
    assert!(more.is_err(), "another connection");
    process.kill().unwrap();
    process.wait().unwrap();
}

/// Sets how many files a QEMU may open, as QEMU's user, because root may lack the right to change
/// limits of other users. Returns the limit of before.
fn limit_files(pid: Pid, most: &str) -> String {
    let pid = pid.as_raw_nonzero().to_string();
    let field = |file: &str, name: &str, number: usize| {
        let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let mut words = line.unwrap().split_whitespace();
        words.nth(number).unwrap().to_owned()
    };
    let before = field("limits", "Max open files", 0);
    let id = |name: &str| -> u32 { field("status", name, 0).parse().unwrap() };
    let (uid, gid) = (id("Uid:"), id("Gid:"));
    assert_ne!(uid, 0, "the QEMU of a stranger's snapshot runs as root");
    let mut command = Command::new("prlimit");
    command.args(["--pid", &pid, &format!("--nofile={most}:")]);
    let status = command.uid(uid).gid(gid).status().unwrap();
    assert!(status.success());
    before
}

#[test]
fn a_vm_gets_all_memory_after_its_library_did_not_answer_and_qemu_had_no_descriptors() {
    let mut daemon = Daemon::start();
    let (store, aside) = begin(&daemon);
    let restore = ["snapshot", "restore", "copy", "--as", "web2", "--force"];
    succeeds(&daemon, &restore);
    let place = VmDirectory::of(&daemon.state(), "web2");
    kill(&mut daemon);
    let hidden = place.path().join("hidden.sock");
    fs::rename(place.library(), &hidden).unwrap();
    daemon.start_again();
    let problems = || {
        let vms = daemon.json(&["vm", "list"]);
        let vm = vms
            .as_array()
            .unwrap()
            .iter()
            .find(|vm| vm["name"] == "web2");
        vm.map_or(String::new(), |vm| vm["fold_problems"].to_string())
    };
    wait("the VM is adopted without its library", || {
        problems().contains("cannot reach memfold's library")
    });
    fs::rename(&hidden, place.library()).unwrap();
    wait("the daemon has connected to the library", || {
        !problems().contains("cannot reach") && problems().contains("being fetched")
    });
    // QEMU cannot receive files any more.
    let pid = Vm::open(&place).unwrap().pid();
    let before = limit_files(pid, "3");
    put_back(&store, &aside);
    wait("the library has ended the connection", || {
        let log = fs::read_to_string(place.qemu_log()).unwrap();
        log.contains("no file came")
    });
    limit_files(pid, &before);
    wait("the VM is an ordinary one", || {
        !problems().contains("fetched")
    });
    Memory::of(&daemon, "web2").holds(AT, &random(1, RANDOM_MIB * MIB));
    assert!(!place.arriving().exists());
}

//! Tests that no command waits forever for another process: for a QEMU that hangs at its start or
//! is stopped, for a guest that does not shut down, or for a log whose reader has stopped. QEMUs
//! are real; guests are at most a boot sector.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use memfold_testkit::{bound, patience, wait_for};
use memfold_vm::{Qmp, Record, VmDirectory};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::{Value, json};

use super::support::{Daemon, Small, code, err, out, refused, wait};

/// Runs a command, which must end within `limit`.
#[track_caller]
fn within(limit: Duration, command: &mut Command) -> Output {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + patience(limit);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("it hangs: {command:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

fn listed(daemon: &Daemon, name: &str) -> Option<Value> {
    let output = within(
        Duration::from_secs(5),
        daemon
            .command(&["vm", "list", "--json"])
            .stdin(Stdio::null()),
    );
    assert_eq!(code(&output), 0, "{}", err(&output));
    let vms: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    vms.into_iter().find(|vm| vm["name"] == name)
}

fn pid_of(vm: &Value) -> Option<Pid> {
    Pid::from_raw(i32::try_from(vm["pid"].as_i64()?).ok()?)
}

/// Waits until a VM is in this state, and returns its entry in the list.
#[track_caller]
fn wait_state(daemon: &Daemon, name: &str, state: &str) -> Value {
    wait_for(
        &format!("{name} is {state}"),
        Duration::from_secs(60),
        || {
            let vm = listed(daemon, name);
            vm.clone().filter(|vm| vm["state"] == state).ok_or(vm)
        },
    )
}

/// Starts a VM that runs only its firmware.
fn firmware_vm(daemon: &Daemon, name: &str) -> Value {
    daemon.json(&["vm", "run", "--name", name, "--memory", "64M"])
}

/// Returns the command `vm run` of a QEMU that waits for an NBD server which never answers.
fn hanging(daemon: &Daemon, name: &str) -> (UnixListener, Command) {
    let place = daemon.directory.path().join(format!("silent-{name}"));
    let server = UnixListener::bind(&place).unwrap();
    let drive = format!(
        "file=nbd+unix:///?socket={},if=none,id=silent,format=raw",
        place.display()
    );
    let command = daemon.command(&[
        "vm", "run", "--name", name, "--memory", "64M", "--", "-drive", &drive,
    ]);
    (server, command)
}

#[test]
fn if_qemu_hangs_during_start_the_vm_is_listed_and_can_be_stopped_in_time() {
    let daemon = Daemon::start();
    let (_server, mut command) = hanging(&daemon, "stuck");
    let mut run = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let vm = wait_for(
        "the VM is listed, with its process",
        Duration::from_secs(20),
        || {
            let vm = listed(&daemon, "stuck");
            vm.clone()
                .filter(|vm| vm["state"] == "starting" && vm["pid"] != 0)
                .ok_or(vm)
        },
    );
    let pid = pid_of(&vm).unwrap();
    // Other VMs can start meanwhile, and the name is taken.
    within(
        Duration::from_secs(20),
        &mut daemon.command(&[
            "vm", "run", "--name", "other", "--memory", "64M", "--", "-S",
        ]),
    );
    assert!(listed(&daemon, "other").is_some());
    let again = daemon
        .command(&["vm", "run", "--name", "stuck", "--memory", "64M"])
        .output()
        .unwrap();
    refused(&again, 1, &["'stuck'"]);
    let exec = within(
        Duration::from_secs(5),
        &mut daemon.command(&["vm", "exec", "stuck", "true"]),
    );
    refused(&exec, 1, &["is being started"]);

    let stop = within(
        Duration::from_secs(15),
        &mut daemon.command(&["vm", "stop", "stuck", "--json"]),
    );
    assert_eq!(code(&stop), 0, "{}", err(&stop));
    let ended = wait_for("'vm run' ends", Duration::from_secs(10), || {
        run.try_wait().unwrap().ok_or("it runs")
    });
    assert_eq!(ended.code(), Some(1));
    let mut said = String::new();
    run.stderr
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert!(
        said.contains("'stuck' was stopped while it started"),
        "{said}"
    );
    assert!(test_kill_process(pid).is_err(), "QEMU is left");
    assert!(listed(&daemon, "stuck").is_none());

    // No request stops this VM.
    let (_server, mut command) = hanging(&daemon, "late");
    let late = within(Duration::from_secs(45), &mut command);
    refused(&late, 1, &["QEMU did not start"]);
    assert!(listed(&daemon, "late").is_none());
}

#[test]
fn if_a_qemu_process_is_stopped_saves_of_its_vm_time_out_and_the_daemon_can_restart() {
    let mut daemon = Daemon::start();
    let pid = pid_of(&firmware_vm(&daemon, "still")).unwrap();
    firmware_vm(&daemon, "other");
    kill_process(pid, Signal::STOP).unwrap();
    for name in ["first", "second", "third"] {
        let save = within(
            Duration::from_secs(60),
            &mut daemon.command(&["snapshot", "save", "still", name, "--keep", "all"]),
        );
        assert_eq!(code(&save), 1, "{}", out(&save));
    }
    let vm = wait_state(&daemon, "still", "silent");
    assert!(
        vm["state_cause"].as_str().unwrap().contains("is stopped"),
        "{vm}"
    );
    assert!(
        vm["state_fix"].as_str().unwrap().contains("kill -CONT"),
        "{vm}"
    );
    let save = within(
        Duration::from_secs(60),
        &mut daemon.command(&["snapshot", "save", "other", "fine", "--keep", "all"]),
    );
    assert_eq!(code(&save), 0, "{}", err(&save));

    for _ in 0..3 {
        let began = Instant::now();
        kill_process(Pid::from_child(&daemon.child), Signal::TERM).unwrap();
        let ended = wait_for("the daemon ends", Duration::from_secs(20), || {
            daemon.child.try_wait().unwrap().ok_or("it runs")
        });
        assert_eq!(ended.code(), Some(0));
        let took = began.elapsed();
        assert!(
            took <= bound(Duration::from_secs(5)),
            "it ended after {took:?}"
        );
        daemon.start_again();
        let began = Instant::now();
        let vm = listed(&daemon, "still").expect("a VM that hangs is known");
        assert!(
            began.elapsed() <= bound(Duration::from_secs(5)),
            "{:?}",
            began.elapsed()
        );
        assert_eq!(vm["state"], "taking-over");
        wait_state(&daemon, "other", "running");
    }
    kill_process(pid, Signal::CONT).unwrap();
    wait_state(&daemon, "still", "running");
    let save = within(
        Duration::from_secs(60),
        &mut daemon.command(&["snapshot", "save", "still", "fourth", "--keep", "all"]),
    );
    assert_eq!(code(&save), 0, "{}", err(&save));

    // A VM that is not adopted yet can be ended, too.
    kill_process(pid, Signal::STOP).unwrap();
    daemon.terminate();
    daemon.start_again();
    let stop = within(
        Duration::from_secs(40),
        &mut daemon.command(&["vm", "stop", "still", "--timeout", "1"]),
    );
    assert_eq!(code(&stop), 4, "{}", err(&stop));
    assert!(listed(&daemon, "still").is_none());
}

#[test]
fn while_qemu_cannot_undo_an_interrupted_save_the_next_save_fails_with_status_409() {
    let daemon = Daemon::start();
    let pid = pid_of(&firmware_vm(&daemon, "still")).unwrap();
    let place = VmDirectory::of(&daemon.state(), "still");
    let record: Record = VmDirectory::read_json(&place.record()).unwrap();
    let spec: Value = VmDirectory::read_json(&place.spec()).unwrap();
    // A daemon that was killed has left this note.
    let process = record.process;
    let note = json!({ "process": process, "spec": spec, "stopped": true });
    let notes = daemon.state().join("saving");
    std::fs::create_dir_all(&notes).unwrap();
    let file = notes.join(format!("{}-{}.json", process.pid, process.start_ticks));
    std::fs::write(&file, note.to_string()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let request = json!({ "vm": "still", "name": "s", "keep": "all" }).to_string();
    let save = || daemon.http("POST", "/v1/snapshots", request.as_bytes());
    let (status, body) = save();
    assert_eq!(status, 409, "{body}");
    assert!(body.contains("last save was interrupted"), "{body}");
    kill_process(pid, Signal::CONT).unwrap();
    wait("the VM can be saved again", || save().0 == 200);
    assert!(!file.exists());
}

#[test]
fn while_folding_waits_for_a_stopped_qemu_fold_status_answers_immediately() {
    let daemon = Daemon::start();
    let pid = pid_of(&firmware_vm(&daemon, "still")).unwrap();
    firmware_vm(&daemon, "other");
    daemon.json(&["fold", "status"]);
    kill_process(pid, Signal::STOP).unwrap();
    // The signal takes effect a moment later.
    wait("fold status shows that QEMU is stopped", || {
        let stats = daemon.json(&["fold", "status"]);
        let mut vms = stats["vms"].as_array().unwrap().iter();
        let vm = vms.find(|vm| vm["name"] == "still");
        vm.is_some_and(|vm| vm["problem"].to_string().contains("is stopped"))
    });
    // This makes the engine send an order to this VM's library.
    let mut save = daemon
        .command(&["snapshot", "save", "still", "s", "--keep", "all"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (mut longest, mut oldest) = (Duration::ZERO, 0.0_f64);
    while save.try_wait().unwrap().is_none() {
        let lines: [&[&str]; 2] = [&["fold", "status", "--json"], &["report", "--json"]];
        for line in lines {
            let began = Instant::now();
            let output = within(Duration::from_secs(60), &mut daemon.command(line));
            longest = longest.max(began.elapsed());
            assert_eq!(code(&output), 0, "{}", err(&output));
            let stats: Value = serde_json::from_slice(&output.stdout).unwrap();
            let stats = if line[0] == "fold" {
                &stats
            } else {
                &stats["fold"]
            };
            let problem = |name: &str| {
                let mut vms = stats["vms"].as_array().unwrap().iter();
                vms.find(|vm| vm["name"] == name).unwrap()["problem"].to_string()
            };
            assert!(problem("still").contains("is stopped"), "{stats}");
            assert!(!problem("other").contains("stopped"), "{stats}");
            oldest = oldest.max(stats["age_s"].as_f64().unwrap());
        }
    }
    // The engine waits for 10 s and more.
    assert!(longest <= bound(Duration::from_secs(5)), "{longest:?}");
    assert!(oldest > 1.0, "the engine was not kept waiting: {oldest} s");
    kill_process(pid, Signal::CONT).unwrap();
    wait("the figures are those of now", || {
        daemon.json(&["fold", "status"])["age_s"] == 0.0
    });
}

#[test]
fn if_a_qemu_does_not_respond_requests_for_it_time_out_and_other_requests_are_served() {
    let daemon = Daemon::start();
    let pid = pid_of(&daemon.paused_vm("still", &[])).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    // More clients than the socket's queue has room for.
    std::thread::scope(|scope| {
        let stops: Vec<_> = (0..4)
            .map(|_| {
                let mut command = daemon.command(&["vm", "stop", "still", "--timeout", "2"]);
                scope.spawn(move || within(Duration::from_secs(60), &mut command))
            })
            .collect();
        // This must end within five seconds.
        listed(&daemon, "other");
        for stop in stops {
            stop.join().unwrap();
        }
    });
    assert!(listed(&daemon, "still").is_none());
}

/// Makes a disk whose boot sector is this program.
fn boot_disk(place: &Path, code: &[u8], bytes: u64) -> PathBuf {
    let mut sector = vec![0; 512];
    sector[..code.len()].copy_from_slice(code);
    sector[510..].copy_from_slice(&[0x55, 0xAA]);
    let disk = place.join("disk.img");
    std::fs::write(&disk, sector).unwrap();
    std::fs::File::options()
        .write(true)
        .open(&disk)
        .unwrap()
        .set_len(bytes)
        .unwrap();
    disk
}

/// Returns a guest program that ignores all events for `ticks` ticks of the BIOS's clock (18 a
/// second), like a guest that boots. Then it enables the power button (ACPI's PM1 registers, which
/// `SeaBIOS` puts at port 0x600 on q35), and shuts down when the button is pressed.
fn slow_guest(ticks: u16) -> Vec<u8> {
    let [low, high] = ticks.to_le_bytes();
    vec![
        0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x7c,
        0xfb, // no stack of others; interrupts
        0x8b, 0x1e, 0x6c, 0x04, 0x81, 0xc3, low, high, // bx = clock + ticks
        0xf4, 0xa1, 0x6c, 0x04, 0x29, 0xd8, 0x78, 0xf8, // until clock >= bx: hlt
        0xba, 0x02, 0x06, 0xb8, 0x00, 0x01, 0xef, // PM1_EN = PWRBTN_EN
        0xf4, 0xba, 0x00, 0x06, 0xed, 0xf6, 0xc4, 0x01, 0x74,
        0xf6, // until PM1_STS has PWRBTN_STS: hlt
        0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef, // PM1_CNT = SLP_EN, soft off
        0xf4, 0xeb, 0xfd, // hlt
    ]
}

/// Guest program that ignores all events forever.
const DEAF_GUEST: [u8; 4] = [0xfb, 0xf4, 0xeb, 0xfd];

/// Guest program that writes a sector in each 4 KiB, from sector 8 on, through the BIOS (int 13h,
/// AH=43h).
const WRITER: [u8; 82] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x7c,
    0xfb, // no stack of others; interrupts
    0x88, 0x16, 0x00, 0x05, // the disk's number
    0xc7, 0x06, 0x10, 0x05, 0x10, 0x00, // the packet: its size,
    0xc7, 0x06, 0x12, 0x05, 0x01, 0x00, // one sector,
    0xc7, 0x06, 0x14, 0x05, 0x00, 0x10, // from 0:1000h,
    0xc7, 0x06, 0x16, 0x05, 0x00, 0x00, //
    0xc7, 0x06, 0x18, 0x05, 0x08, 0x00, // to sector 8
    0xc7, 0x06, 0x1a, 0x05, 0x00, 0x00, //
    0xc7, 0x06, 0x1c, 0x05, 0x00, 0x00, //
    0xb8, 0x00, 0x43, 0x8a, 0x16, 0x00, 0x05, 0xbe, 0x10, 0x05, 0xcd, 0x13, // write
    0x83, 0x06, 0x18, 0x05, 0x08, 0x73, 0xed, // the next
    0xf4, 0xeb, 0xfd, 0x90, 0x90, 0x90, // hlt
];

#[track_caller]
fn run_disk(daemon: &Daemon, name: &str, disk: &Path) {
    run_disk_with(daemon, name, disk, &[]);
}

#[track_caller]
fn run_disk_with(daemon: &Daemon, name: &str, disk: &Path, more: &[&str]) {
    let disk = disk.to_str().unwrap();
    let line = ["vm", "run", "--name", name, "--memory", "64M", "--no-fold"];
    daemon.json(&[&line[..], &["--disk", disk], more].concat());
}

fn qmp(daemon: &Daemon, name: &str) -> Qmp {
    Qmp::connect(
        &VmDirectory::of(&daemon.state(), name).qmp(),
        Duration::from_secs(60),
    )
    .unwrap()
}

#[test]
fn a_shutdown_request_during_guest_boot_is_repeated_until_the_guest_reacts() {
    let daemon = Daemon::start();
    let disk = boot_disk(daemon.directory.path(), &slow_guest(18 * 8), 1 << 20);
    run_disk(&daemon, "slow", &disk);
    let mut sits = qmp(&daemon, "slow");
    let timeout = patience(Duration::from_secs(60)).as_secs().to_string();
    let stop = within(
        Duration::from_secs(90),
        &mut daemon.command(&["vm", "stop", "slow", "--timeout", &timeout, "--json"]),
    );
    assert_eq!(code(&stop), 0, "{}", err(&stop));
    let stopped: Value = serde_json::from_slice(&stop.stdout).unwrap();
    assert_eq!(stopped["vms"][0]["how"], "powered_down", "{stopped}");
    assert_eq!(stopped["vms"][0]["why"], Value::Null, "{stopped}");
    // The guest itself shuts the VM down.
    let ended = sits
        .wait_event(&["SHUTDOWN"], Duration::from_secs(5))
        .unwrap()
        .unwrap();
    assert_eq!(ended["data"]["reason"], "guest-shutdown", "{ended}");
}

#[test]
fn a_guest_that_ignores_a_shutdown_is_switched_off_with_a_warning() {
    let place = tempfile::tempdir().unwrap();
    let log = place.path().join("log");
    let daemon = Daemon::start_logging(std::fs::File::create(&log).unwrap().into(), &[]);
    let disk = boot_disk(daemon.directory.path(), &DEAF_GUEST, 1 << 20);
    run_disk(&daemon, "deaf", &disk);
    let stop = within(
        Duration::from_secs(60),
        &mut daemon.command(&["vm", "stop", "deaf", "--timeout", "5"]),
    );
    assert_eq!(code(&stop), 4, "{}", err(&stop));
    let said = out(&stop);
    assert!(
        said.contains("deaf: switched off after")
            && said.contains("was asked to shut down and did not within 5 s"),
        "{said}"
    );
    let logged = std::fs::read_to_string(&log).unwrap();
    assert!(
        logged.lines().any(|line| line.contains("WARN")
            && line.contains("switched off")
            && line.contains("deaf")),
        "{logged}"
    );

    run_disk(&daemon, "deaf", &disk);
    let stop = daemon
        .command(&["vm", "stop", "deaf", "--timeout", "1", "--json"])
        .output()
        .unwrap();
    assert_eq!(code(&stop), 4, "{}", err(&stop));
    let stopped: Value = serde_json::from_slice(&stop.stdout).unwrap();
    assert_eq!(
        (&stopped["vms"][0]["how"], &stopped["vms"][0]["overdue"]),
        (&"quit".into(), &true.into()),
        "{stopped}"
    );
    // With a timeout of 0, the VM is switched off at once, as requested.
    run_disk(&daemon, "deaf", &disk);
    let stop = daemon.json(&["vm", "stop", "deaf", "--timeout", "0"]);
    assert_eq!(
        (&stop["vms"][0]["how"], &stop["vms"][0]["overdue"]),
        (&"quit".into(), &false.into()),
        "{stop}"
    );
}

#[test]
fn vm_stop_shuts_the_guest_down_even_if_another_client_occupies_the_qmp_socket() {
    let daemon = Daemon::start();
    let disk = boot_disk(daemon.directory.path(), &slow_guest(1), 1 << 20);
    run_disk(&daemon, "sat", &disk);
    let mut sits = qmp(&daemon, "sat");
    let stop = within(
        Duration::from_secs(60),
        &mut daemon.command(&["vm", "stop", "sat", "--json"]),
    );
    assert_eq!(code(&stop), 0, "{}", err(&stop));
    let stopped: Value = serde_json::from_slice(&stop.stdout).unwrap();
    assert_eq!(stopped["vms"][0]["how"], "powered_down", "{stopped}");
    let asked = sits
        .wait_event(&["POWERDOWN"], Duration::from_secs(5))
        .unwrap();
    assert!(asked.is_some(), "its guest was not asked");
}

#[test]
fn a_vm_that_qemu_paused_because_of_a_full_disk_is_reported_and_can_be_resumed() {
    let place = tempfile::tempdir().unwrap();
    let small = Small::mount(&place.path().join("small"), "1m");
    let log = place.path().join("log");
    let disk = boot_disk(&small.0, &WRITER, 16 << 20);
    let daemon = Daemon::start_logging(std::fs::File::create(&log).unwrap().into(), &[]);
    run_disk(&daemon, "full", &disk);
    let vm = wait_state(&daemon, "full", "io-error");
    let cause = vm["state_cause"].as_str().unwrap();
    let file = disk.to_str().unwrap();
    for word in ["disk vd0", file, "no space left"] {
        assert!(cause.contains(word), "no '{word}' in: {cause}");
    }
    assert!(
        vm["state_fix"]
            .as_str()
            .unwrap()
            .contains("memfold vm resume full"),
        "{vm}"
    );
    let list = out(&daemon.run(&["vm", "list"]));
    assert!(
        list.lines()
            .any(|line| line.starts_with("full") && line.contains("io-error")),
        "{list}"
    );
    assert!(list.contains(file), "{list}");
    let logged = std::fs::read_to_string(&log).unwrap();
    let told = logged
        .lines()
        .filter(|line| line.contains("VM is not running") && line.contains(file))
        .count();
    assert_eq!(told, 1, "{logged}");
    wait("the metric says so", || {
        daemon
            .get("/metrics", "*/*")
            .1
            .contains("memfold_vm_state{vm=\"full\",state=\"io-error\"}")
    });
    wait("an event says so", || {
        let (status, body) = daemon.http("GET", "/v1/events", b"");
        assert_eq!(status, 200, "{body}");
        body.contains("stands still (io-error") && body.contains(file)
    });
    let exec = within(
        Duration::from_secs(30),
        &mut daemon.command(&["vm", "exec", "full", "true"]),
    );
    refused(
        &exec,
        1,
        &["stands still (io-error", file, "memfold vm resume full"],
    );
    // The disk is still full.
    let early = within(
        Duration::from_secs(30),
        &mut daemon.command(&["vm", "resume", "full"]),
    );
    wait_state(&daemon, "full", "io-error");
    assert!([0, 1].contains(&code(&early)));
    small.resize("64m");
    // No option asks for the VM to be resumed automatically.
    let mut events = qmp(&daemon, "full");
    let by_itself = events.wait_event(&["RESUME"], Duration::from_secs(3));
    assert_eq!(by_itself.unwrap(), None);
    drop(events);
    let resumed = within(
        Duration::from_secs(30),
        &mut daemon.command(&["vm", "resume", "full"]),
    );
    assert_eq!(code(&resumed), 0, "{}", err(&resumed));
    wait_state(&daemon, "full", "running");

    qmp(&daemon, "full").query("stop").unwrap();
    let vm = wait_state(&daemon, "full", "paused");
    assert!(vm["state_cause"].as_str().unwrap().contains("QMP"), "{vm}");
    daemon.json(&["vm", "resume", "full"]);
    let paused = daemon.json(&["vm", "pause", "full"]);
    assert_eq!(paused["state"], "paused", "{paused}");
    let fix = paused["state_fix"].as_str().unwrap();
    assert!(fix.contains("memfold vm resume full"), "{paused}");
    // A second pause changes nothing.
    assert_eq!(daemon.json(&["vm", "pause", "full"])["state"], "paused");
    assert_eq!(daemon.json(&["vm", "resume", "full"])["state"], "running");
    refused(&daemon.run(&["vm", "pause", "ghost"]), 1, &["ghost"]);
    drop(daemon);
}

#[test]
fn with_the_option_resume_when_room_a_paused_vm_resumes_once_its_disk_has_space_again() {
    let place = tempfile::tempdir().unwrap();
    let small = Small::mount(&place.path().join("small"), "1m");
    let log = place.path().join("log");
    let disk = boot_disk(&small.0, &WRITER, 256 << 20);
    let mut daemon = Daemon::start_logging(std::fs::File::create(&log).unwrap().into(), &[]);
    run_disk_with(&daemon, "full", &disk, &["--resume-when-room"]);
    let vm = wait_state(&daemon, "full", "io-error");
    let fix = vm["state_fix"].as_str().unwrap();
    assert!(fix.contains("resumes by itself"), "{fix}");
    // The free space is too little for a resume.
    small.resize("4m");
    // The next daemon also knows that the VM is to be resumed.
    daemon.terminate();
    daemon.start_again();
    let mut events = qmp(&daemon, "full");
    wait_state(&daemon, "full", "io-error");
    let early = events.wait_event(&["RESUME"], Duration::from_secs(3));
    assert_eq!(early.unwrap(), None);
    small.resize("18m");
    let resumed = events
        .wait_event(&["RESUME"], patience(Duration::from_secs(20)))
        .unwrap();
    assert!(resumed.is_some(), "it was not resumed");
    // The guest fills the new space, too: the VM stops again, and is resumed again.
    events
        .wait_event(&["STOP"], patience(Duration::from_secs(180)))
        .unwrap()
        .expect("18 MiB are full");
    small.resize("256m");
    let resumed = events
        .wait_event(&["RESUME"], patience(Duration::from_secs(30)))
        .unwrap();
    assert!(resumed.is_some(), "it was not resumed again");
    wait_state(&daemon, "full", "running");
}

#[test]
fn if_its_log_cannot_be_written_the_daemon_keeps_working() {
    let full = || {
        std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .unwrap()
    };
    // The log is a pipe without a reader, or one whose reader has stopped.
    let (reader, closed) = rustix::pipe::pipe().unwrap();
    drop(reader);
    let (_reader, stuck) = rustix::pipe::pipe().unwrap();
    let logs: [Stdio; 3] = [full().into(), closed.into(), stuck.into()];
    for (number, log) in logs.into_iter().enumerate() {
        let mut daemon = Daemon::start_logging(log, &["--log", "trace"]);
        let pid = pid_of(&daemon.paused_vm("one", &[])).unwrap();
        for _ in 0..50 {
            within(
                Duration::from_secs(20),
                &mut daemon.command(&["vm", "list"]),
            );
        }
        kill_process(pid, Signal::KILL).unwrap();
        wait("the ended VM is gone from the list", || {
            listed(&daemon, "one").is_none()
        });
        let status = daemon.json(&["fold", "status"]);
        assert_eq!(status["paused"], false, "log {number}");
        daemon.terminate();
    }
}

//! Test of streamed commands with a real guest: `vm exec -i`, `-it` on a terminal, and `vm cp`.

use std::fs::{self, File, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant, UNIX_EPOCH};

use memfold_lab::{DiskMode, Lab};
use memfold_testkit::{patience, wait_until};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, Termios, Winsize, tcgetattr, tcsetwinsize};
use xxhash_rust::xxh3::Xxh3;

use super::snapshots::MEMORY;
use crate::served::{Served, exec, memfold, wait_agent};
use crate::support;

const VM: &str = "streams";
const LIMIT: Duration = Duration::from_secs(60);
/// Bytes that go through standard input and output.
const BYTES: usize = 100_000_000;
const SIGINT: i32 = 2;

/// Runs `memfold`, which must end with `code`.
#[track_caller]
fn run(state: &Path, code: i32, arguments: &[&str]) -> Output {
    let output = memfold(state, arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    output
}

/// Bytes of every value, in no order.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 7_u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

fn many_bytes_pass_unchanged(state: &Path) {
    let sent = noise(BYTES);
    let mut child = memfold(
        state,
        &["vm", "exec", "-i", VM, "--", "cat; echo end >&2; exit 9"],
    )
    .stdin(Stdio::piped())
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let began = Instant::now();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let received = std::thread::scope(|scope| {
        scope.spawn(|| {
            input.write_all(&sent).unwrap();
            drop(input);
        });
        let (mut hash, mut length) = (Xxh3::new(), 0);
        let mut buffer = vec![0; 1 << 16];
        loop {
            let read = output.read(&mut buffer).unwrap();
            if read == 0 {
                return (hash.digest(), length);
            }
            hash.update(&buffer[..read]);
            length += read;
        }
    });
    let took = began.elapsed().as_secs_f64();
    let rate = BYTES as f64 / 1e6 / took;
    println!("100 MB through standard input and output: {took:.1} s, {rate:.1} MB/s");
    let done = child.wait_with_output().unwrap();
    assert_eq!(
        (done.status.code(), &done.stderr[..]),
        (Some(9), &b"end\n"[..])
    );
    let mut hash = Xxh3::new();
    hash.update(&sent);
    assert_eq!(received, (hash.digest(), BYTES));
}

/// A program on a terminal of its own, which the test types into.
struct Typed {
    master: File,
    terminal: std::os::fd::OwnedFd,
    child: Child,
    seen: Vec<u8>,
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

impl Typed {
    fn start(mut command: Command) -> (Self, Termios) {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let terminal = ioctl_tiocgptpeer(&master, flags).unwrap();
        tcsetwinsize(&master, size(30, 100)).unwrap();
        let before = tcgetattr(&terminal).unwrap();
        command
            .env("TERM", "xterm")
            .stdin(terminal.try_clone().unwrap())
            .stdout(terminal.try_clone().unwrap())
            .stderr(terminal.try_clone().unwrap());
        let child = memfold_sys::session::lead_terminal(&mut command)
            .spawn()
            .unwrap();
        rustix::io::ioctl_fionbio(&master, true).unwrap();
        let typed = Self {
            master: master.into(),
            terminal,
            child,
            seen: Vec::new(),
        };
        (typed, before)
    }

    /// Types keys, and forgets what the terminal has shown so far.
    fn keys(&mut self, keys: &str) {
        self.seen.clear();
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until the terminal shows a text, and forgets what it has shown up to there.
    #[track_caller]
    fn shows(&mut self, text: &str) {
        let end = Instant::now() + patience(LIMIT);
        loop {
            let mut buffer = [0; 4096];
            match self.master.read(&mut buffer) {
                Ok(read) => self.seen.extend(&buffer[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => panic!("{error}: {}", self.text()),
            }
            let found = self
                .seen
                .windows(text.len())
                .position(|w| w == text.as_bytes());
            if let Some(at) = found {
                self.seen.drain(..at + text.len());
                return;
            }
            assert!(
                Instant::now() < end,
                "'{text}' is not shown: {}",
                self.text()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.seen).into_owned()
    }
}

fn a_terminal_works(state: &Path) {
    let (mut typed, before) =
        Typed::start(memfold(state, &["vm", "exec", "-it", VM, "--", "bash"]));
    typed.shows("# ");
    typed.keys("echo $TERM:$(stty size)\n");
    typed.shows("xterm:30 100");
    tcsetwinsize(&typed.master, size(40, 120)).unwrap();
    typed.keys("trap 'stty size' WINCH; until [ \"$(stty size)\" = '40 120' ]; do sleep 0.1; done; echo new-size-$((40 + 2))\n");
    typed.shows("new-size-42");
    typed.keys("top -d 1\n");
    typed.shows("PID");
    typed.keys("\x03");
    // A program may drop what was typed before it ended.
    typed.shows("# ");
    typed.keys("echo back-$((6 * 7))\n");
    typed.shows("back-42");
    typed.keys("sleep 1000; echo code-$?\n");
    wait_until("the program runs", LIMIT, || {
        count(state, "sleep 1000") == 1
    });
    typed.keys("\x03");
    typed.shows("# ");
    typed.keys("echo then-$((6 * 7))\n");
    typed.shows("then-42");
    typed.keys("exit 5\n");
    let code = typed.child.wait().unwrap().code();
    assert_eq!(code, Some(5));
    let after = tcgetattr(&typed.terminal).unwrap();
    let modes = |t: &Termios| {
        (
            t.input_modes,
            t.output_modes,
            t.control_modes,
            t.local_modes,
        )
    };
    assert_eq!(
        modes(&before),
        modes(&after),
        "the terminal is not restored"
    );

    // The escape keys end the connection, and the terminal is restored.
    let (mut typed, before) = Typed::start(memfold(state, &["vm", "exec", "-it", VM, "--", "cat"]));
    // The terminal itself echoes what is typed before, and drops it.
    wait_until("the terminal is in raw mode", LIMIT, || {
        let now = tcgetattr(&typed.terminal).unwrap();
        !now.local_modes.contains(LocalModes::ICANON)
    });
    typed.keys("typed\n");
    typed.shows("typed");
    typed.keys("\x1d\x1d\x1d");
    assert_eq!(typed.child.wait().unwrap().code(), Some(129));
    let after = tcgetattr(&typed.terminal).unwrap();
    assert_eq!(
        modes(&before),
        modes(&after),
        "the terminal is not restored"
    );
}

/// Returns the number of processes in the guest with this command line.
fn count(state: &Path, line: &str) -> usize {
    let script = format!("pgrep -xfc '{line}' || true");
    let output = run(state, 0, &["vm", "exec", VM, "--", &script]);
    String::from_utf8_lossy(&output.stdout)
        .trim()
        .parse()
        .unwrap()
}

fn signals_reach_the_command(state: &Path) {
    let child = memfold(state, &["vm", "exec", "-i", VM, "--", "sleep 1001"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    wait_until("the command runs", LIMIT, || {
        count(state, "sleep 1001") == 1
    });
    wait_until("memfold handles signals", LIMIT, || {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = u64::from_str_radix(caught.unwrap().trim(), 16).unwrap();
        caught & (1 << (SIGINT - 1)) != 0
    });
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let done = child.wait_with_output().unwrap();
    assert_eq!(done.status.code(), Some(128 + SIGINT));
    wait_until("the command has ended", LIMIT, || {
        count(state, "sleep 1001") == 0
    });
}

fn a_killed_client_leaves_no_process(state: &Path) {
    for options in ["-i", "-it"] {
        let script = "sleep 1002 & trap '' HUP; sleep 1003";
        let command = memfold(state, &["vm", "exec", options, VM, "--", script]);
        let (mut typed, _) = Typed::start(command);
        wait_until("the command runs", LIMIT, || {
            count(state, "sleep 1002") == 1 && count(state, "sleep 1003") == 1
        });
        typed.child.kill().unwrap();
        assert_eq!(typed.child.wait().unwrap().signal(), Some(9));
        wait_until("no process of the command is left", LIMIT, || {
            count(state, "sleep 1002") + count(state, "sleep 1003") == 0
        });
    }
}

/// Makes a tree of files, and returns a list of what is in it.
fn tree(place: &Path) {
    let deep = place.join("deep").join("n".repeat(150));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("binary"), noise(3_000_000)).unwrap();
    fs::write(place.join("run"), b"#!/bin/sh\necho ran\n").unwrap();
    fs::set_permissions(place.join("run"), Permissions::from_mode(0o751)).unwrap();
    fs::write(place.join("name with 'quotes'"), b"").unwrap();
    symlink("run", place.join("link")).unwrap();
    let old = UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    File::open(place.join("run"))
        .unwrap()
        .set_modified(old)
        .unwrap();
}

fn listed(place: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut left = vec![place.to_owned()];
    while let Some(path) = left.pop() {
        let found = fs::symlink_metadata(&path).unwrap();
        let name = path.strip_prefix(place).unwrap().display().to_string();
        let content = if found.is_dir() {
            let entries = fs::read_dir(&path).unwrap();
            left.extend(entries.map(|entry| entry.unwrap().path()));
            0
        } else if found.is_symlink() {
            fs::read_link(&path).unwrap().as_os_str().len() as u64
        } else {
            let mut hash = Xxh3::new();
            hash.update(&fs::read(&path).unwrap());
            hash.digest()
        };
        let time = if found.is_symlink() { 0 } else { found.mtime() };
        lines.push(format!("{name} {:o} {time} {content}", found.mode()));
    }
    lines.sort();
    lines
}

fn trees_and_files_are_copied_both_ways(state: &Path) {
    let there = state.join("tree");
    tree(&there);
    let source = there.to_str().unwrap();
    let guest = |path: &str| format!("{VM}:{path}");
    run(state, 0, &["vm", "cp", source, &guest("/root/copied")]);
    let ran = run(state, 0, &["vm", "exec", VM, "--", "/root/copied/link"]);
    assert_eq!(ran.stdout, b"ran\n");
    let back = state.join("back");
    let back_text = back.to_str().unwrap();
    let copied = run(
        state,
        0,
        &["vm", "cp", "--json", &guest("/root/copied"), back_text],
    );
    let copied: serde_json::Value = serde_json::from_slice(&copied.stdout).unwrap();
    assert_eq!((&copied["files"], &copied["links"]), (&3.into(), &1.into()));
    assert_eq!(listed(&there), listed(&back));

    // What is there already stays as it is, and nothing is left beside it.
    let refused = run(state, 1, &["vm", "cp", source, &guest("/root/copied/run")]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(why.contains("is not a directory"), "{why}");
    let missing = run(state, 1, &["vm", "cp", &guest("/no/such"), back_text]);
    let why = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(
        why.contains("/no/such") && why.contains("No such file"),
        "{why}"
    );
    let left = run(
        state,
        0,
        &[
            "vm",
            "exec",
            "--timeout",
            "300",
            VM,
            "--",
            "find / -xdev -name '.memfold-copy*'",
        ],
    );
    assert_eq!(left.stdout, b"");
    // The first line is the directory itself, whose time a refused copy into it may change.
    assert_eq!(listed(&there)[1..], listed(&back)[1..]);

    // Standard input and output.
    let bytes = noise(300_000);
    let mut child = memfold(state, &["vm", "cp", "-", &guest("/root/input")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&bytes).unwrap();
    assert!(child.wait_with_output().unwrap().status.success());
    let output = run(state, 0, &["vm", "cp", &guest("/root/input"), "-"]);
    assert!(output.stdout == bytes, "{} bytes", output.stdout.len());
}

fn a_command_that_reaches_its_time_limit_is_killed(state: &Path) {
    let limited = &["vm", "exec", "--timeout", "1", VM, "--", "sleep 1004"];
    let output = run(state, 124, limited);
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(why.contains("its time limit of 1 s"), "{why}");
    wait_until("the command has ended", LIMIT, || {
        count(state, "sleep 1004") == 0
    });
}

fn a_terminal_shows_how_far_a_copy_is(state: &Path) {
    let file = state.join("large");
    std::fs::write(&file, noise(8 << 20)).unwrap();
    let file = file.to_str().unwrap();
    let guest = format!("{VM}:/srv/large");
    let (mut typed, _) = Typed::start(memfold(state, &["vm", "cp", file, &guest]));
    typed.shows("of 8.00 MiB");
    typed.shows("copied 1 files, 8.00 MiB");
    assert!(typed.child.wait().unwrap().success());
    // The size of what a guest has is not known before.
    let back = format!("{file}-back");
    let (mut typed, _) = Typed::start(memfold(state, &["vm", "cp", &guest, &back]));
    typed.shows("MiB/s");
    typed.shows("copied 1 files, 8.00 MiB");
    assert!(typed.child.wait().unwrap().success());
}

/// Returns a sample of the daemon's metrics.
#[track_caller]
fn metric(state: &Path, name: &str) -> f64 {
    let mut stream = UnixStream::connect(state.join("s")).unwrap();
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let prefix = format!("{name} ");
    let sample = text.lines().find_map(|line| line.strip_prefix(&prefix));
    sample
        .unwrap_or_else(|| panic!("no {name}: {text}"))
        .parse()
        .unwrap()
}

fn metrics_count_streamed_bytes(state: &Path) {
    for direction in ["input", "output"] {
        let name = format!("memfold_streamed_bytes_total{{direction=\"{direction}\"}}");
        let bytes = metric(state, &name);
        assert!(bytes >= BYTES as f64, "{name} {bytes}");
    }
    let started = metric(state, "memfold_streamed_commands_started_total");
    assert!(started >= 10.0, "{started} streamed commands");
    wait_until("no streamed command runs", LIMIT, || {
        metric(state, "memfold_streamed_commands") == 0.0
    });
}

#[test]
fn commands_and_copies_stream_to_and_from_a_real_guest_and_leave_no_process_in_it() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::Builder::new()
        .prefix("memfold-streams.")
        .tempdir()
        .unwrap();
    let state = directory.path();
    let mut served = Served::new(state, &[VM]);
    served.start();
    let api = served.answers();
    let spec = Lab::spec(VM, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    served.run_warm(&spec);
    wait_agent(&api, VM);
    exec(&api, VM, "true");

    a_terminal_works(state);
    signals_reach_the_command(state);
    a_killed_client_leaves_no_process(state);
    a_command_that_reaches_its_time_limit_is_killed(state);
    trees_and_files_are_copied_both_ways(state);
    a_terminal_shows_how_far_a_copy_is(state);
    many_bytes_pass_unchanged(state);
    metrics_count_streamed_bytes(state);
}

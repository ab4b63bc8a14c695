//! Helpers of the tests of `memfold`'s command line: run the program, start a daemon for each test,
//! send plain HTTP requests.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use memfold_vm::Qmp;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::program::log;
pub use crate::program::program;

/// Finds a server that tests start: `name` in `directory` of the cache, where scripts/setup has put
/// it, or in `PATH`. The server must succeed when it is asked for its `version`. `None`, with the
/// reason printed, only if tests may be skipped.
pub fn server(directory: &str, name: &str, version: &str) -> Option<PathBuf> {
    let cached = std::env::var_os("MEMFOLD_CACHE")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/memfold")))
        .map(|cache| cache.join(directory).join(name));
    let runs = |path: &PathBuf| {
        let run = Command::new(path).arg(version).output();
        run.is_ok_and(|output| output.status.success())
    };
    let found = cached.into_iter().chain([name.into()]).find(runs);
    assert!(
        found.is_some() || std::env::var_os("MEMFOLD_REAL").is_none(),
        "no {name}: scripts/setup tests"
    );
    if found.is_none() {
        memfold_testkit::report_skip(&format!("no {name}; scripts/setup tests"));
    }
    found
}

pub fn run(arguments: &[&str]) -> Output {
    program().args(arguments).output().unwrap()
}

pub fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

pub fn code(output: &Output) -> i32 {
    output.status.code().expect("ended by a signal")
}

/// Asserts that a command failed with code `wanted`, and that its output contains all of `words`.
#[track_caller]
pub fn refused(output: &Output, wanted: i32, words: &[&str]) {
    let text = err(output);
    assert_eq!(code(output), wanted, "{text}{}", out(output));
    for word in words {
        assert!(text.contains(word), "no '{word}' in: {text}");
    }
}

/// Waits until `ready` holds, with the time limit of these tests.
#[track_caller]
pub fn wait(what: &str, ready: impl FnMut() -> bool) {
    memfold_testkit::wait_until(what, Duration::from_secs(180), ready);
}

/// `memfold serve` in a directory of its own. VMs and daemon end when this is dropped.
pub struct Daemon {
    pub child: Child,
    pub directory: TempDir,
    more: Vec<String>,
    /// QEMU program to use instead of the one in `PATH`.
    qemu: Option<PathBuf>,
    /// Network namespace in which the daemon runs, as `ip netns` names it.
    namespace: Option<String>,
}

/// Creates a directory for a daemon's files, in which QEMUs, which run as users of their own, can
/// open theirs.
fn open_directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o711);
    std::fs::set_permissions(directory.path(), mode).unwrap();
    directory
}

impl Daemon {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a daemon with a log of its own.
    pub fn start_logging(log: Stdio, more: &[&str]) -> Self {
        Self::start_in(&[], log, more)
    }

    /// Starts a daemon with a log of its own and more environment variables.
    pub fn start_in(environment: &[(&str, &str)], log: Stdio, more: &[&str]) -> Self {
        let mut command = program();
        command.envs(environment.iter().copied());
        Self::start_command(open_directory(), command, log, more)
    }

    fn start_command(directory: TempDir, command: Command, log: Stdio, more: &[&str]) -> Self {
        let more: Vec<String> = more.iter().map(|&word| word.to_owned()).collect();
        let daemon = Self {
            child: spawn_in(directory.path(), &more, command, log),
            directory,
            more,
            qemu: None,
            namespace: None,
        };
        daemon.wait_serving();
        daemon
    }

    /// Starts a daemon whose QEMU gets additional arguments from a file.
    pub fn start_with_words(file: &Path) -> Self {
        let directory = open_directory();
        let wrapper = directory.path().join("qemu");
        let text = format!(
            "#!/bin/sh\nexec qemu-system-x86_64 \"$@\" $(cat {})\n",
            file.display()
        );
        std::fs::write(&wrapper, text).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&wrapper, mode).unwrap();
        let mut command = program();
        command.env("MEMFOLD_QEMU", &wrapper);
        let mut daemon = Self::start_command(directory, command, log(), &[]);
        daemon.qemu = Some(wrapper);
        daemon
    }

    /// Starts a daemon in a network namespace that `ip netns add` has made.
    pub fn start_in_namespace(name: &str) -> Self {
        let mut daemon = Self::start_command(open_directory(), program_in(name), log(), &[]);
        daemon.namespace = Some(name.to_owned());
        daemon
    }

    /// Starts a daemon with variables in its environment.
    pub fn start_with_environment(environment: &[(&str, &str)]) -> Self {
        Self::start_in(environment, log(), &[])
    }

    /// Starts a daemon with more arguments for `serve`.
    pub fn start_with(more: &[&str]) -> Self {
        Self::start_logging(log(), more)
    }

    pub fn wait_serving(&self) {
        wait("the daemon answers", || {
            UnixStream::connect(self.socket()).is_ok()
        });
    }

    /// Waits until a daemon that was started again has taken over all VMs.
    #[track_caller]
    pub fn wait_adopted(&self) {
        wait("all VMs are taken over", || {
            let vms = self.json(&["vm", "list"]);
            let mut vms = vms.as_array().unwrap().iter();
            vms.all(|vm| vm["state"] != "taking-over")
        });
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("s")
    }

    pub fn state(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = program();
        command.arg("--socket").arg(self.socket()).args(arguments);
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs a command, which must succeed, and returns its output, which must be JSON.
    #[track_caller]
    pub fn json(&self, arguments: &[&str]) -> Value {
        let output = self.command(arguments).arg("--json").output().unwrap();
        assert_eq!(code(&output), 0, "{arguments:?}: {}", err(&output));
        serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|e| panic!("{arguments:?}: {e}: {}", out(&output)))
    }

    /// Starts a VM whose guest never runs, so that it costs no CPU.
    pub fn paused_vm(&self, name: &str, more: &[&str]) -> Value {
        let mut arguments = vec!["vm", "run", "--name", name, "--memory", "64M", "--json"];
        arguments.extend(more);
        arguments.extend(["--", "-S"]);
        let output = self.run(&arguments);
        assert_eq!(code(&output), 0, "{}", err(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Ends the daemon like systemd does.
    pub fn terminate(&mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let status = self.child.wait().unwrap();
        assert_eq!(status.code(), Some(0));
    }

    pub fn start_again(&mut self) {
        let mut command = self.namespace.as_deref().map_or_else(program, program_in);
        if let Some(qemu) = &self.qemu {
            command.env("MEMFOLD_QEMU", qemu);
        }
        self.child = spawn_in(self.directory.path(), &self.more, command, log());
        self.wait_serving();
    }

    /// Sends a GET request with the header `Accept: accept`. Returns head and body of the response.
    pub fn get(&self, path: &str, accept: &str) -> (String, String) {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        let request = format!(
            "GET {path} HTTP/1.1\r\nhost: memfold\r\nconnection: close\r\naccept: {accept}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        (head.to_lowercase(), body.to_owned())
    }

    /// Sends a request. Returns status and body of the response.
    pub fn http(&self, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: memfold\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        // The server may refuse a long body before it has received all of it.
        let _ = stream.write_all(body);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    }
}

/// Returns a command for the program in a network namespace.
fn program_in(namespace: &str) -> Command {
    let program = program();
    let mut command = Command::new("ip");
    command
        .args(["netns", "exec", namespace])
        .arg(program.get_program());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null());
    command
}

fn spawn_in(directory: &Path, more: &[String], mut command: Command, log: Stdio) -> Child {
    command
        .arg("--socket")
        .arg(directory.join("s"))
        .arg("serve")
        .arg("--state")
        .arg(directory.join("state"))
        .arg("--snapshots")
        .arg(directory.join("snapshots"))
        .args(more)
        .stderr(log)
        .spawn()
        .unwrap()
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Ok(vms) = memfold_vm::Vm::discover(&self.state()) {
            for vm in vms {
                let _ = vm.stop(Duration::ZERO);
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A paused QEMU, as users start it by hand.
pub struct Foreign {
    child: Child,
    directory: TempDir,
}

impl Foreign {
    pub fn start(environment: &[(&str, &Path)]) -> Self {
        let directory = open_directory();
        let socket = |name: &str| {
            format!(
                "unix:{},server=on,wait=off",
                directory.path().join(name).display()
            )
        };
        let child = Command::new("qemu-system-x86_64")
            .args(["-S", "-nodefaults", "-display", "none", "-accel", "tcg"])
            .args(["-m", "64", "-qmp", &socket("q"), "-qmp", &socket("spare")])
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let foreign = Self { child, directory };
        wait("QEMU's monitor answers", || {
            Qmp::connect(
                &foreign.directory.path().join("spare"),
                Duration::from_secs(2),
            )
            .is_ok()
        });
        foreign
    }

    pub fn qmp(&self) -> String {
        self.directory.path().join("q").display().to_string()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the number of refusals for this reason so far.
pub fn refusals(daemon: &Daemon, why: &str) -> f64 {
    let (_, text) = daemon.get("/metrics", "*/*");
    let sample = format!("memfold_access_refused_total{{why=\"{why}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&sample));
    line.unwrap_or_else(|| panic!("no {sample}"))
        .parse()
        .unwrap()
}

/// A small file system in memory, which is unmounted when this is dropped.
pub struct Small(pub PathBuf);

impl Small {
    pub fn mount(place: &Path, size: &str) -> Self {
        std::fs::create_dir_all(place).unwrap();
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "memfold-test"])
            .arg(place)
            .status();
        assert!(done.unwrap().success());
        Self(place.to_owned())
    }

    pub fn resize(&self, size: &str) {
        let done = Command::new("mount")
            .args(["-o", &format!("remount,size={size}")])
            .arg(&self.0)
            .status();
        assert!(done.unwrap().success());
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

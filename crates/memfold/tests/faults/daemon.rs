//! A daemon whose file operations fail on demand, and the series of faults of one command.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Output};
use std::time::Duration;

use memfold_testkit::{dose, wait_until};
use serde_json::Value;
use tempfile::TempDir;

use crate::injector::{Fault, Fired, Injector};
use crate::program::{log, program};

/// The time limit of these tests.
pub const LIMIT: Duration = Duration::from_secs(180);

/// Arguments of a daemon that other hosts reach, so that they can have tokens.
pub const LISTEN: [&str; 2] = ["--listen", "127.0.0.1:0"];

/// A daemon with an [`Injector`]. Its files are below [`Daemon::place`].
pub struct Daemon {
    child: Child,
    directory: TempDir,
    injector: Injector,
    more: Vec<String>,
}

/// How much a test injects: `MEMFOLD_FAULT_ROUNDS`. 0, of `make test`: one fault at each of the
/// first operations, and then at fewer and fewer.
fn rounds() -> u64 {
    dose("MEMFOLD_FAULT_ROUNDS", 0)
}

impl Daemon {
    /// Starts a daemon with more arguments for `serve`; `None` without a C compiler.
    pub fn start(more: &[&str]) -> Option<Self> {
        Self::start_in(tempfile::tempdir().unwrap(), more, None)
    }

    /// Starts a daemon whose file operations are recorded in a file.
    pub fn start_recording(directory: TempDir, more: &[&str], record: &Path) -> Option<Self> {
        Self::start_in(directory, more, Some(record))
    }

    fn start_in(directory: TempDir, more: &[&str], record: Option<&Path>) -> Option<Self> {
        let place = directory.path().join("place");
        for path in [&place, &place.join("tmp")] {
            std::fs::create_dir(path).unwrap();
        }
        // QEMUs run as users of their own.
        for path in [directory.path(), &place] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o711)).unwrap();
        }
        let mut injector = Injector::new(directory.path(), &place)?;
        if let Some(record) = record {
            injector.record(record);
        }
        let more: Vec<String> = more.iter().map(|&word| word.to_owned()).collect();
        let child = Self::spawn(&place, &injector, &more);
        let daemon = Self {
            child,
            directory,
            injector,
            more,
        };
        daemon.wait_serving();
        Some(daemon)
    }

    fn spawn(place: &Path, injector: &Injector, more: &[String]) -> Child {
        let mut command = program();
        command.arg("--socket").arg(place.join("s")).arg("serve");
        for (option, name) in [("--state", "state"), ("--snapshots", "snapshots")] {
            command.arg(option).arg(place.join(name));
        }
        // Swap disks and overlays are there.
        command.env("TMPDIR", place.join("tmp"));
        let command = command.args(more).envs(injector.environment());
        command.stderr(log()).spawn().unwrap()
    }

    fn wait_serving(&self) {
        wait_until("the daemon answers", LIMIT, || {
            UnixStream::connect(self.place().join("s")).is_ok()
        });
    }

    pub fn injector(&self) -> &Injector {
        &self.injector
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns whether the daemon has ended by itself, or was killed.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub fn kill(&mut self) {
        // A daemon that has ended already is no error.
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Kills the daemon, and starts the next one.
    pub fn replace(&mut self) {
        self.kill();
        self.start_again();
    }

    /// Starts the next daemon, after [`Daemon::kill`].
    pub fn start_again(&mut self) {
        self.child = Self::spawn(&self.place(), &self.injector, &self.more);
        self.wait_serving();
    }

    pub fn place(&self) -> PathBuf {
        self.directory.path().join("place")
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        let mut command = program();
        let command = command.arg("--socket").arg(self.place().join("s"));
        command.args(arguments).output().unwrap()
    }

    #[track_caller]
    pub fn succeeds(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[&["--json"], arguments].concat());
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {told}");
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    /// Sends a GET request, and returns the JSON of its answer.
    #[track_caller]
    pub fn get(&self, path: &str) -> Value {
        let mut stream = UnixStream::connect(self.place().join("s")).unwrap();
        let request = format!("GET {path} HTTP/1.0\r\nhost: memfold\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(" 200 "), "{answer}");
        serde_json::from_str(body).unwrap()
    }

    /// Returns the names in a list that a command prints.
    #[track_caller]
    pub fn names(&self, command: &[&str]) -> BTreeSet<String> {
        let list = self.succeeds(command);
        let name = |item: &Value| item["name"].as_str().or(item.as_str()).unwrap().to_owned();
        list.as_array().unwrap().iter().map(name).collect()
    }

    /// Asserts that all listed snapshots are whole.
    #[track_caller]
    pub fn snapshots_are_whole(&self, what: &dyn std::fmt::Display) {
        for snapshot in self.succeeds(&["snapshot", "list"]).as_array().unwrap() {
            assert_eq!(snapshot["problem"], Value::Null, "{what}");
            self.succeeds(&["snapshot", "verify", snapshot["name"].as_str().unwrap()]);
        }
    }

    /// Runs a command again and again, with a fault at its first file operation, at its second, and
    /// so on until the command has no more. `check` is called after each, with whether the command
    /// succeeded and what failed; `undo` then prepares the next one. Prints the number of faults.
    pub fn with_faults(
        &mut self,
        command: &[&str],
        check: impl FnMut(&mut Self, bool, &Fired),
        undo: impl FnMut(&mut Self),
    ) {
        let series = Series {
            name: &command.join(" "),
            few: usize::MAX,
        };
        self.series(&series, |daemon| daemon.run(command), check, undo);
    }

    /// Does the same as [`Daemon::with_faults`] with a command that another daemon may execute.
    pub fn series(
        &mut self,
        series: &Series<'_>,
        mut run: impl FnMut(&Self) -> Output,
        mut check: impl FnMut(&mut Self, bool, &Fired),
        mut undo: impl FnMut(&mut Self),
    ) {
        let name = series.name;
        let is_small = rounds() == 0;
        let passes = if is_small { 1 } else { Fault::ALL.len() };
        let (mut faults, mut places) = (0, 0);
        for _ in 0..rounds().max(1) {
            for pass in 0..passes {
                let mut at = 1;
                for number in 0.. {
                    // A small dose takes another kind each time.
                    let kind = if is_small { number } else { pass };
                    let fault = Fault::ALL[kind % Fault::ALL.len()];
                    self.injector.arm(at, fault);
                    let output = run(self);
                    let fired = self.injector.disarm();
                    let succeeded = output.status.success();
                    let told = String::from_utf8_lossy(&output.stderr);
                    println!("{name}, {fault:?} at {fired}: {told}");
                    assert!(succeeded || fired.faults > 0, "{name}: {told}");
                    // A command that fails says why.
                    assert!(succeeded || told.starts_with("memfold: "), "{told}");
                    check(self, succeeded, &fired);
                    undo(self);
                    let is_over = fired.faults == 0 && !(is_small && fault.is_of_writes());
                    if is_over || is_small && number >= series.few {
                        break;
                    }
                    faults += fired.faults;
                    places += usize::from(fired.faults > 0);
                    at += if is_small { (at / 2).max(1) } else { 1 };
                }
                // What a daemon knows, the next one knows.
                self.replace();
            }
        }
        println!("faults injected into '{name}': {faults}, at {places} operations");
        assert!(places > 1, "{name}");
    }
}

/// A command that is repeated with faults.
pub struct Series<'a> {
    /// What the faults are injected into, for the test's output.
    pub name: &'a str,
    /// Most operations of `make test` that fail.
    pub few: usize,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        for vm in memfold_vm::Vm::discover(&self.place().join("state")).unwrap_or_default() {
            let _ = vm.stop(Duration::ZERO);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! Helper of tests on real guests: starts daemons in separate processes, which tests can kill.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfold_api::{Client, ExecRequest, ExecResult, VersionInfo, VmInfo};
use memfold_lab::Warm;
use memfold_testkit::patience;
use memfold_vm::{Vm, VmDirectory, VmSpec};

use crate::support::BOOT;

/// `memfold serve`, started like an operator does.
pub struct Served<'a> {
    state: &'a Path,
    vms: &'a [&'a str],
    more: &'a [&'a str],
    environment: &'a [(&'a str, &'a str)],
    /// Process whose mount namespace the daemon gets; `None`: its own.
    inside: Option<u32>,
    /// Network namespace of the daemon, as `ip netns` names it; `None`: its own.
    network: Option<&'a str>,
    temporary: Option<&'a Path>,
    daemon: Option<Child>,
}

impl<'a> Served<'a> {
    /// Creates a daemon that is not started yet. `vms`: names of VMs that are ended with it.
    pub fn new(state: &'a Path, vms: &'a [&'a str]) -> Self {
        Self {
            state,
            vms,
            more: &[],
            environment: &[],
            inside: None,
            network: None,
            temporary: None,
            daemon: None,
        }
    }

    /// Adds arguments for `serve`.
    pub fn with(mut self, more: &'a [&'a str]) -> Self {
        self.more = more;
        self
    }

    /// Sets variables of the daemon's environment.
    pub const fn environment(mut self, variables: &'a [(&'a str, &'a str)]) -> Self {
        self.environment = variables;
        self
    }

    /// Makes the daemon run in the mount namespace of a process.
    pub fn inside(mut self, process: u32) -> Self {
        self.inside = Some(process);
        self
    }

    /// Makes the daemon run in a network namespace.
    pub const fn in_network(mut self, namespace: &'a str) -> Self {
        self.network = Some(namespace);
        self
    }

    /// Uses a separate directory for temporary overlays, because other tests use the common one.
    /// Lets QEMUs, which run as users of their own, open files in it.
    pub fn temporary(mut self, directory: &'a Path) -> Self {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o711);
        std::fs::set_permissions(directory, mode).unwrap();
        self.temporary = Some(directory);
        self
    }

    fn program(&self) -> Command {
        if let Some(namespace) = self.network {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", namespace, env!("CARGO_BIN_EXE_memfold")]);
            return command;
        }
        let Some(process) = self.inside else {
            let mut command = Command::new(env!("CARGO_BIN_EXE_memfold"));
            if let Some(directory) = self.temporary {
                command.env("TMPDIR", directory);
            }
            return command;
        };
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{process}/ns/mnt"));
        command.arg("--").arg(env!("CARGO_BIN_EXE_memfold"));
        command
    }

    pub fn start(&mut self) {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.state.join("daemon.log"))
            .unwrap();
        let child = self
            .program()
            .arg("--socket")
            .arg(self.state.join("s"))
            .args(["serve", "--cpu", "50", "--state"])
            .arg(self.state)
            .arg("--snapshots")
            .arg(self.state.join("snapshots"))
            .arg("--segments")
            .arg(self.state.join("segments"))
            .args(self.more)
            .envs(self.environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.daemon = Some(child);
    }

    /// Waits until the daemon that runs now answers.
    pub fn answers(&mut self) -> Client {
        let client = Client::new(&self.state.join("s")).unwrap();
        let end = Instant::now() + patience(Duration::from_secs(180));
        let daemon = self.daemon.as_mut().unwrap();
        let pid = i32::try_from(daemon.id()).unwrap();
        loop {
            if client
                .get("/v1/version")
                .is_ok_and(|v: VersionInfo| v.pid == pid)
            {
                return client;
            }
            let ended = daemon.try_wait().unwrap();
            assert!(
                ended.is_none() && Instant::now() < end,
                "no daemon: {ended:?}\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn kill(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.kill().unwrap();
            daemon.wait().unwrap();
        }
    }

    /// Starts a VM through the command line.
    pub fn run(&self, spec: &VmSpec) {
        run(&self.state.join("s"), self.state, spec);
    }

    /// Starts a VM in the state of a VM of the same kind right after its boot ([`Warm`]).
    pub fn run_warm(&self, spec: &VmSpec) {
        run_warm(&self.state.join("s"), self.state, spec);
    }

    fn log(&self) -> String {
        let text = std::fs::read_to_string(self.state.join("daemon.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the daemons' last words:\n{}", self.log());
        }
        self.kill();
        for name in self.vms {
            if let Ok(vm) = Vm::find(self.state, name) {
                let _ = vm.stop(Duration::ZERO);
            }
        }
    }
}

/// Returns a command for the daemon that has its socket in `state`.
pub fn memfold(state: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_memfold"));
    command.arg("--socket").arg(state.join("s")).args(arguments);
    command
}

/// Runs a command, which must succeed, and returns its output.
#[track_caller]
pub fn succeeds(state: &Path, arguments: &[&str]) -> String {
    let output = memfold(state, arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

fn run(socket: &Path, state: &Path, spec: &VmSpec) {
    let file = state.join(format!("{}.toml", spec.name));
    std::fs::write(&file, toml::to_string(spec).unwrap()).unwrap();
    let done = Command::new(env!("CARGO_BIN_EXE_memfold"))
        .arg("--socket")
        .arg(socket)
        .args(["vm", "run", "--file"])
        .arg(&file)
        .status()
        .unwrap();
    assert!(done.success());
}

/// Makes the daemon at a socket start a VM in the state of a VM of the same kind right after its
/// boot ([`Warm`]).
pub fn run_warm(socket: &Path, state: &Path, spec: &VmSpec) {
    let mut spec = spec.clone();
    let warm = Warm::prepare(&mut spec).unwrap();
    run(socket, state, &spec);
    if let Some(warm) = warm {
        warm.load(&VmDirectory::of(state, &spec.name)).unwrap();
    }
}

/// Waits until a VM is listed and its agent answers.
#[track_caller]
pub fn wait_agent(client: &Client, name: &str) -> VmInfo {
    let began = Instant::now();
    loop {
        let vms: Vec<VmInfo> = client.get("/v1/vms").unwrap();
        let found = vms.into_iter().find(|vm| vm.name == name);
        if let Some(vm) = found.as_ref().filter(|vm| vm.agent.is_some()) {
            let took = began.elapsed().as_secs_f64();
            println!("{name}: its agent is there after {took:.1} s");
            return vm.clone();
        }
        assert!(began.elapsed() < patience(BOOT), "{name}: {found:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs a command in a guest, which must succeed.
pub fn exec(client: &Client, name: &str, script: &str) -> ExecResult {
    let request = ExecRequest {
        script: script.to_owned(),
        timeout_s: patience(Duration::from_secs(300)).as_secs_f64(),
    };
    let result: ExecResult = client
        .post(&format!("/v1/vms/{name}/exec"), &request)
        .unwrap();
    assert_eq!(result.code, 0, "{name}: {script}: {}", result.stderr);
    result
}

/// A small random number generator. Its seed is printed, so that a failed test can be repeated.
pub struct Random(pub u64);

impl Random {
    pub fn below_ms(&mut self, limit: u64) -> Duration {
        Duration::from_millis(self.below(limit))
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    pub fn shuffle<T>(&mut self, cards: &mut [T]) {
        for last in (1..cards.len()).rev() {
            let other = self.below(last as u64 + 1);
            cards.swap(last, usize::try_from(other).unwrap());
        }
    }
}

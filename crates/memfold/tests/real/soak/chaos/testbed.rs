//! Testbed of the chaos test: file systems that can be filled and frozen, a daemon that serves, one
//! that lends, and a supervisor that restarts them.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use memfold_api::{Client, VersionInfo};
use memfold_testkit::{patience, wait_until};
use memfold_vm::Vm;
use rustix::process::{Pid, Signal, kill_process};

use super::libvirt::Libvirt;

const MEMFOLD: &str = env!("CARGO_BIN_EXE_memfold");

/// Time limit for a daemon to end, as promised to users.
pub const END: Duration = Duration::from_secs(5);

/// Time limit for a lending daemon to end, because borrowers return the memory first.
pub const LENDER_END: Duration = Duration::from_secs(55);

/// Longest time without an answer from a daemon that is not disturbed.
const ANSWER: Duration = Duration::from_secs(60);

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Faults found so far. The test continues, so that one fault does not hide others.
pub struct Faults {
    began: Instant,
    found: Mutex<Vec<String>>,
}

impl Faults {
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            found: Mutex::default(),
        }
    }

    pub fn add(&self, fault: impl Into<String>) {
        let fault = format!(
            "{:6.1} s  {}",
            self.began.elapsed().as_secs_f64(),
            fault.into()
        );
        println!("FAULT {fault}");
        lock(&self.found).push(fault);
    }

    /// Prints a line about an event, so that a fault can be read beside it.
    pub fn note(&self, what: &str) {
        println!("{:6.1} s  {what}", self.began.elapsed().as_secs_f64());
    }

    pub fn all(&self) -> Vec<String> {
        lock(&self.found).clone()
    }
}

/// A file system that the test has mounted.
pub struct FileSystem {
    pub place: PathBuf,
    /// Whether the file system is in a file and has a journal, and so can be frozen.
    has_journal: bool,
}

impl FileSystem {
    pub fn in_memory(place: PathBuf, mib: u64) -> Self {
        std::fs::create_dir(&place).unwrap();
        let size = format!("size={mib}m,mode=755");
        ran(Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "memfold-chaos"])
            .arg(&place));
        Self {
            place,
            has_journal: false,
        }
    }

    /// Mounts an ext4 file system on a loop device, which is removed with the mount.
    pub fn in_file(place: PathBuf, mib: u64) -> Self {
        std::fs::create_dir(&place).unwrap();
        let image = place.with_extension("image");
        File::create(&image).unwrap().set_len(mib << 20).unwrap();
        ran(Command::new("mkfs.ext4")
            .args(["-q", "-m", "0", "-F"])
            .arg(&image));
        ran(Command::new("mount")
            .args(["-o", "loop"])
            .arg(&image)
            .arg(&place));
        Self {
            place,
            has_journal: true,
        }
    }

    /// Fills the file system except for `left_kib` KiB, if more is free. Returns the file that
    /// takes the space.
    pub fn fill(&self, left_kib: u64, number: u64) -> PathBuf {
        let path = self.place.join(format!("filler-{number}"));
        let facts = rustix::fs::statvfs(&self.place).unwrap();
        let bytes = (facts.f_bavail * facts.f_frsize).saturating_sub(left_kib << 10);
        // If there is no space for a name, the file system is full already.
        if let Ok(file) = File::create(&path) {
            let flags = rustix::fs::FallocateFlags::empty();
            let _ = rustix::fs::fallocate(&file, flags, 0, bytes.max(1));
        }
        path
    }

    pub fn freeze(&self) {
        assert!(self.has_journal);
        ran(Command::new("fsfreeze").arg("-f").arg(&self.place));
    }

    pub fn thaw(&self) {
        ran(Command::new("fsfreeze").arg("-u").arg(&self.place));
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        if self.has_journal && std::thread::panicking() {
            let _ = Command::new("fsfreeze").arg("-u").arg(&self.place).output();
        }
        let _ = Command::new("umount").arg("-l").arg(&self.place).status();
    }
}

#[track_caller]
fn ran(command: &mut Command) {
    let done = command.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{command:?}: {said}");
}

/// Returns a command that runs memfold, without arguments.
type Program = Box<dyn Fn() -> Command + Send + Sync>;

/// A `memfold serve` that is restarted whenever it has ended, as systemd does.
pub struct Service {
    pub name: &'static str,
    program: Program,
    root: PathBuf,
    arguments: Vec<String>,
    running: Mutex<Running>,
    /// Held by the thread that disturbs the daemon or its file system.
    hands: Mutex<()>,
}

struct Running {
    child: Option<Child>,
    /// Whether the daemon has answered since its start.
    has_served: bool,
    /// Number of starts that failed while a disk was full.
    failed_starts: u32,
}

impl Service {
    /// Creates the service. `program` returns a command for a program.
    pub fn new(name: &'static str, root: &Path, program: Program, arguments: &[&str]) -> Self {
        Self {
            name,
            program,
            root: root.to_owned(),
            arguments: arguments.iter().map(|&word| word.to_owned()).collect(),
            running: Mutex::new(Running {
                child: None,
                has_served: false,
                failed_starts: 0,
            }),
            hands: Mutex::new(()),
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.root.join(format!("{}.sock", self.name))
    }

    fn log_file(&self) -> PathBuf {
        self.root.join(format!("{}.log", self.name))
    }

    pub fn log(&self) -> String {
        let log = std::fs::read(self.log_file()).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    fn start(&self, running: &mut Running) {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log_file());
        let child = (self.program)()
            .arg("--socket")
            .arg(self.socket())
            .args(["serve", "--config", "/dev/null"])
            .args(&self.arguments)
            .env("TMPDIR", self.root.join("overlays"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.unwrap())
            .spawn()
            .unwrap();
        running.child = Some(child);
        running.has_served = false;
    }

    /// Keeps other disturbances away from this daemon until the result is dropped.
    pub fn hands(&self) -> MutexGuard<'_, ()> {
        lock(&self.hands)
    }

    pub fn pid(&self) -> Option<Pid> {
        lock(&self.running).child.as_ref().map(Pid::from_child)
    }

    /// Starts the daemon if it does not run. It is a fault if it has ended by itself, unless it
    /// never served because a disk was full.
    pub fn look_after(&self, faults: &Faults, is_full: &AtomicBool) {
        let Ok(_hands) = self.hands.try_lock() else {
            return;
        };
        let mut running = lock(&self.running);
        let ended = running
            .child
            .as_mut()
            .and_then(|child| child.try_wait().unwrap());
        if let Some(status) = ended {
            if !running.has_served && is_full.load(Ordering::Relaxed) {
                running.failed_starts += 1;
            } else {
                faults.add(format!(
                    "the {} ended by itself: {status}\n{}",
                    self.name,
                    self.last_words()
                ));
            }
            running.child = None;
        }
        if running.child.is_none() {
            self.start(&mut running);
        } else if !running.has_served {
            running.has_served = self.answers(&running);
        }
    }

    pub fn failed_starts(&self) -> u32 {
        lock(&self.running).failed_starts
    }

    fn answers(&self, running: &Running) -> bool {
        let pid = running
            .child
            .as_ref()
            .map(|child| i32::try_from(child.id()).unwrap());
        let client = Client::new(&self.socket())
            .unwrap()
            .within(Duration::from_secs(1));
        client
            .get("/v1/version")
            .is_ok_and(|version: VersionInfo| Some(version.pid) == pid)
    }

    /// Waits until the daemon serves; the supervisor starts it meanwhile.
    #[track_caller]
    pub fn wait_serving(&self, faults: &Faults, is_full: &AtomicBool) {
        wait_until(&format!("the {} answers", self.name), ANSWER, || {
            self.look_after(faults, is_full);
            lock(&self.running).has_served
        });
    }

    /// Sends a signal to the daemon. Returns whether it ran.
    pub fn signal(&self, signal: Signal) -> bool {
        let running = lock(&self.running);
        let pid = running.child.as_ref().map(Pid::from_child);
        pid.is_some_and(|pid| kill_process(pid, signal).is_ok())
    }

    /// Kills the daemon. The holder of its `hands` decides how long it is away.
    pub fn kill(&self) {
        if let Some(mut child) = lock(&self.running).child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Asks the daemon to end. Records how it ended and after how long; kills it if it does not end
    /// within `limit`.
    pub fn end(&self, limit: Duration, faults: &Faults) {
        let (child, had_served) = {
            let mut running = lock(&self.running);
            (running.child.take(), running.has_served)
        };
        let Some(mut child) = child else { return };
        let (began, limit) = (Instant::now(), patience(limit));
        let _ = kill_process(Pid::from_child(&child), Signal::TERM);
        let mut ended: Option<ExitStatus> = None;
        while ended.is_none() && began.elapsed() < limit {
            std::thread::sleep(Duration::from_millis(10));
            ended = child.try_wait().unwrap();
        }
        let took = began.elapsed().as_secs_f64();
        match ended {
            Some(status) if status.success() => {
                faults.note(&format!(
                    "the {} ended {took:.1} s after SIGTERM",
                    self.name
                ));
            }
            // Before the daemon handles signals, a signal ends it like any program.
            Some(status) if !had_served => {
                faults.note(&format!("the {} ended as it began: {status}", self.name));
            }
            Some(status) => faults.add(format!(
                "the {} ended with {status} after SIGTERM",
                self.name
            )),
            None => {
                let threads = threads(child.id());
                faults.add(format!(
                    "the {} runs {took:.1} s after SIGTERM:\n{threads}",
                    self.name
                ));
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }

    fn last_words(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let kept = std::env::temp_dir().join(format!("memfold-chaos-{}.log", self.name));
            let _ = std::fs::copy(self.log_file(), &kept);
            eprintln!("the {}'s log is in {}", self.name, kept.display());
        }
        self.signal(Signal::CONT);
        self.kill();
    }
}

/// Returns the state of each thread of a process, for the analysis of hangs.
pub fn threads(pid: u32) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let mut lines = Vec::new();
    for task in tasks.into_iter().flatten().flatten() {
        let read = |name: &str| {
            let text = std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
            text.trim().to_owned()
        };
        let status = read("status");
        let state = status.lines().find(|line| line.starts_with("State:"));
        lines.push(format!(
            "  {} {} wchan {} syscall {}",
            read("comm"),
            state.unwrap_or("gone"),
            read("wchan"),
            read("syscall")
                .split(' ')
                .take(3)
                .collect::<Vec<_>>()
                .join(" ")
        ));
    }
    lines.sort();
    lines.dedup();
    lines.join("\n")
}

/// All parts of the test. Fields are dropped in order, so that processes end before the files that
/// they have open.
pub struct Testbed {
    pub faults: Faults,
    pub daemon: Service,
    pub lender: Service,
    /// Whether a file system is full, or was a moment ago.
    pub is_full: AtomicBool,
    pub libvirt: Arc<Libvirt>,
    vms: Leftover,
    pub state: FileSystem,
    pub overlays: FileSystem,
    pub snapshots: FileSystem,
    pub root: PathBuf,
    _directory: tempfile::TempDir,
}

/// Ends VMs that are left when this is dropped.
struct Leftover(PathBuf);

impl Drop for Leftover {
    fn drop(&mut self) {
        for vm in Vm::discover(&self.0).into_iter().flatten() {
            let _ = kill_process(vm.pid(), Signal::CONT);
            let _ = vm.stop(Duration::ZERO);
        }
    }
}

/// MiB that the lender lends, enough for one swap disk.
pub const LENT_MIB: u64 = 512;

impl Testbed {
    pub fn new() -> Self {
        // The directory is on a disk, because the image of a file system is large and memory is
        // short.
        let directory = tempfile::Builder::new()
            .prefix("chaos.")
            .tempdir_in("/var/tmp")
            .unwrap();
        let root = directory.path().to_owned();
        // QEMUs run as users of their own, and open their overlays there.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o711);
        std::fs::set_permissions(&root, mode).unwrap();
        let state = FileSystem::in_memory(root.join("state"), 64);
        let overlays = FileSystem::in_memory(root.join("overlays"), 3072);
        let snapshots = FileSystem::in_file(root.join("snapshots"), 4096);
        let path = |name: &str| root.join(name).display().to_string();
        let lent = format!("{LENT_MIB}M");
        let lender_state = path("lending");
        // The namespace of libvirtd shows only file systems that are mounted by now.
        let libvirt = Arc::new(Libvirt::start(root.join("libvirt")));
        let lender = Service::new(
            "lender",
            &root,
            Box::new(|| Command::new(MEMFOLD)),
            &[
                "--host",
                "lender",
                "--listen",
                "127.0.0.1:0",
                "--lend",
                &lent,
                "--state",
                &lender_state,
            ],
        );
        let registry = lender.socket().display().to_string();
        let inside = libvirt.clone();
        let daemon = Service::new(
            "daemon",
            &root,
            Box::new(move || inside.command(MEMFOLD)),
            &[
                "--libvirt",
                "/run/libvirt/qemu",
                "--host",
                "borrower",
                "--cpu",
                "50",
                "--listen",
                "127.0.0.1:0",
                "--registry",
                &registry,
                "--state",
                &path("state"),
                "--snapshots",
                &path("snapshots/shelf"),
                "--segments",
                &path("snapshots/segments"),
            ],
        );
        Self {
            faults: Faults::new(),
            daemon,
            lender,
            is_full: AtomicBool::new(false),
            libvirt,
            vms: Leftover(state.place.clone()),
            state,
            overlays,
            snapshots,
            root,
            _directory: directory,
        }
    }

    pub fn services(&self) -> [&Service; 2] {
        [&self.lender, &self.daemon]
    }

    pub fn state(&self) -> &Path {
        &self.vms.0
    }

    pub fn client(&self) -> Client {
        Client::new(&self.daemon.socket())
            .unwrap()
            .within(patience(Duration::from_secs(400)))
    }

    /// Returns a command of the program, as a user types it.
    pub fn command(&self, arguments: &[String]) -> Command {
        let mut command = self.libvirt.command(MEMFOLD);
        for name in ["MEMFOLD_STATE", "MEMFOLD_LOG"] {
            command.env_remove(name);
        }
        command
            .env("MEMFOLD_CONFIG", "/dev/null")
            .env("MEMFOLD_SOCKET", self.daemon.socket())
            .args(arguments);
        command
    }

    /// Returns other processes that have a path of the test open or in their command line.
    pub fn processes(&self) -> Vec<(Pid, String)> {
        let root = self.root.as_os_str().as_encoded_bytes();
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let pid: Option<i32> = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok());
            let Some(pid) = pid.and_then(Pid::from_raw) else {
                continue;
            };
            if pid == rustix::process::getpid() {
                continue;
            }
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let is_named = line.windows(root.len()).any(|part| part == root);
            let said = std::fs::read_link(entry.path().join("fd/2"));
            if is_named || said.is_ok_and(|to| to.starts_with(&self.root)) {
                let words = String::from_utf8_lossy(&line).replace('\0', " ");
                found.push((pid, words));
            }
        }
        found
    }
}

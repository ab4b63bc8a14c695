//! A running VM: ours, found again after a daemon's death, or attached to.

use std::cell::RefCell;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memfold_wire::library::Advice;
use rustix::process::Pid;
use serde::Serialize;
use serde_json::Value;

use super::agent_link::{AgentEvent, AgentLink, AgentOptions};
use super::conditions::{self, Reason, VmConditions};
use super::directory::{Record, VmDirectory};
use super::endpoints;
use super::layout::{RamBlock, RamLayout};
use super::library_link::{LibraryError, LibraryLink};
use super::process::{Identity, Process};
use super::qmp::{Qmp, QmpError};
use super::ram::{self, RamError};
use super::segments::SegmentSpec;
use super::spec::VmSpec;

/// Time that QEMU's monitor and library have for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that QEMU has to end after `quit`, and after a kill.
const QUIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Time that a monitor has to answer whoever wants to end the VM.
const STOP_TIMEOUT: Duration = Duration::from_secs(4);
/// Time until a guest that was asked to shut down is asked again.
const PRESS_AGAIN: Duration = Duration::from_secs(2);
/// Time that a QEMU which closed its monitor has to end.
const ENDING: Duration = Duration::from_millis(500);
/// Looks in a row that must find a VM standing still, and the time between two.
const STOOD_LOOKS: u32 = 3;
const STOOD_LOOK: Duration = Duration::from_millis(100);

/// Why a VM can't be used.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// No such VM.
    #[error("no VM named '{name}' is running")]
    NotFound {
        /// The name.
        name: String,
    },
    /// QEMU doesn't answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The process at the other end of a QMP socket is no QEMU, or can't be looked at.
    #[error("the process behind QMP socket {path} cannot be used: {why}")]
    Peer {
        /// The socket.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The VM's files or process can't be looked at.
    #[error("cannot look at VM '{name}'")]
    Look {
        /// The VM.
        name: String,
        /// From the kernel.
        #[source]
        source: io::Error,
    },
    /// It didn't end, not even killed.
    #[error("VM '{name}' (process {pid}) did not end, not even killed")]
    Undying {
        /// The VM.
        name: String,
        /// Its process number.
        pid: i32,
    },
    /// It was attached to and is not ours to end.
    #[error("VM '{name}' was not started by memfold; end it where it was started")]
    NotOurs {
        /// The VM.
        name: String,
    },
}

/// Carries out a command of QEMU's monitor.
pub type Ask<'a> = dyn Fn(&str) -> Result<Value, QmpError> + 'a;

/// How a VM was ended, and why so.
#[derive(Clone, Debug, PartialEq)]
pub struct Stopped {
    /// By its guest, by QEMU's monitor, by a signal, or before anybody asked.
    pub kind: StopKind,
    /// Whether its guest was to shut down and did not.
    pub overdue: bool,
    /// How long that took.
    pub took: Duration,
    /// Why it was switched off, if it was.
    pub why: Option<String>,
}

/// How a VM was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopKind {
    /// It had ended before.
    Already,
    /// The guest shut down.
    PoweredDown,
    /// QEMU was told to quit: the guest had no time left.
    Quit,
    /// QEMU was killed.
    Killed,
}

/// One thing that memfold can, or can't, do with a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Ability {
    /// What.
    pub what: &'static str,
    /// Whether it is possible.
    pub possible: bool,
    /// Why not, and what would change it.
    pub reasons: Vec<String>,
}

/// A running QEMU.
#[derive(Debug)]
pub struct Vm {
    name: String,
    process: Process,
    spec: Option<VmSpec>,
    record: Option<Record>,
    directory: Option<VmDirectory>,
    qmp_socket: PathBuf,
    library_socket: Option<PathBuf>,
    agent_socket: Option<PathBuf>,
}

impl Vm {
    /// The running VM that has its files in `directory`.
    pub fn open(directory: &VmDirectory) -> Result<Self, MachineError> {
        let name = directory.name();
        let look = |source: io::Error| {
            if source.kind() == io::ErrorKind::NotFound {
                MachineError::NotFound { name: name.clone() }
            } else {
                MachineError::Look {
                    name: name.clone(),
                    source,
                }
            }
        };
        let record: Record = VmDirectory::read_json(&directory.record()).map_err(look)?;
        let spec: VmSpec = VmDirectory::read_json(&directory.spec()).map_err(look)?;
        let process = Process::open(record.process).map_err(look)?;
        Ok(Self {
            process,
            spec: Some(spec),
            qmp_socket: directory.qmp(),
            library_socket: record.library.is_some().then(|| directory.library()),
            agent_socket: Some(directory.agent()),
            record: Some(record),
            directory: Some(directory.clone()),
            name,
        })
    }

    /// The running VM `name` under `state`.
    pub fn find(state: &Path, name: &str) -> Result<Self, MachineError> {
        // A name that could leave the directory is nobody's.
        if super::spec::check_name("name", name).is_err() {
            return Err(MachineError::NotFound { name: name.into() });
        }
        Self::open(&VmDirectory::of(state, name))
    }

    /// All running VMs under `state`, sorted by name: how a new daemon takes over those of a dead one. Directories of VMs
    /// that run no more are removed; one that can't be read is told in the log and left alone.
    pub fn discover(state: &Path) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for directory in VmDirectory::all(state)? {
            match Self::open(&directory) {
                Ok(vm) => found.push(vm),
                Err(MachineError::NotFound { .. }) => {
                    if let Err(error) = Self::clear_if_stale(&directory) {
                        tracing::warn!(vm = directory.name(), %error, "cannot remove the files of a VM that ended");
                    }
                }
                Err(error) => {
                    tracing::warn!(
                        vm = directory.name(),
                        error = &error as &dyn std::error::Error,
                        "left alone"
                    );
                }
            }
        }
        Ok(found)
    }

    /// Removes the directory if its VM has ended; whether it did. False: it runs, or is being started.
    pub fn clear_if_stale(directory: &VmDirectory) -> io::Result<bool> {
        let Some(_lock) = (match directory.lock() {
            // Removed meanwhile by another process.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
            other => other?,
        }) else {
            return Ok(false);
        };
        let record = match VmDirectory::read_json::<Record>(&directory.record()) {
            Ok(record) => {
                match Process::open(record.process) {
                    Ok(_) => return Ok(false),
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    Err(e) => return Err(e),
                }
                Some(record)
            }
            // Whoever started it died between the start and the record.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                for process in unrecorded(directory)? {
                    process.kill()?;
                    if !process.wait_exit(QUIT_TIMEOUT)? {
                        return Err(io::Error::other("a QEMU that was killed does not end"));
                    }
                }
                None
            }
            // It may run well, whatever is wrong with its record.
            Err(error) => return Err(error),
        };
        let noted = || VmDirectory::read_json(&directory.overlays()).unwrap_or_default();
        directory.remove(&record.map_or_else(noted, |record| record.overlays))?;
        Ok(true)
    }

    /// Whether it was being restored, by a daemon that died before that was done.
    #[must_use]
    pub fn is_half_restored(&self) -> bool {
        let directory = self.directory.as_ref();
        directory.is_some_and(|directory| directory.incoming().exists())
    }

    /// Its restore is done.
    pub fn came_in(&self) -> io::Result<()> {
        match self
            .directory
            .as_ref()
            .map(|d| std::fs::remove_file(d.incoming()))
        {
            Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Changes which temporary files go with the VM.
    pub fn change_temporary(&self, change: impl FnOnce(&mut Vec<PathBuf>)) -> io::Result<()> {
        let (Some(directory), Some(record)) = (&self.directory, &self.record) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let mut now: Record = VmDirectory::read_json(&directory.record())?;
        // It may have ended meanwhile, and another have got its name.
        if now.process != record.process {
            return Err(io::ErrorKind::NotFound.into());
        }
        change(&mut now.overlays);
        directory.write_json(&directory.record(), &now)
    }

    /// An already running QEMU, by its QMP socket. Nothing of it is changed.
    pub fn attach(qmp_socket: &Path) -> Result<Self, MachineError> {
        let mut qmp = Qmp::connect(qmp_socket, ANSWER_TIMEOUT)?;
        let bad = |why: String| MachineError::Peer {
            path: qmp_socket.into(),
            why,
        };
        let pid = qmp
            .peer_pid()
            .ok_or_else(|| bad("the kernel does not tell its process".into()))?;
        let look = |e: io::Error| bad(format!("process {}: {e}", pid.as_raw_nonzero()));
        let identity = Identity::of(pid).map_err(look)?;
        let process = Process::open(identity).map_err(look)?;
        let words = endpoints::command_line(pid).map_err(look)?;
        let program = words.first().map_or("", String::as_str);
        // Where QEMU is called 'kvm' its file is not.
        let file =
            std::fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero())).map_err(look)?;
        if !program.contains("qemu") && !file.to_string_lossy().contains("qemu") {
            return Err(bad(format!(
                "its socket was made by '{program}' (process {}), which is no QEMU; give QEMU a -qmp unix:PATH,server=on of its own",
                pid.as_raw_nonzero()
            )));
        }
        let library = endpoints::library(pid).map_err(look)?;
        let agent_socket = endpoints::agent_socket(pid, &mut qmp)?;
        Ok(Self {
            name: endpoints::guest_name(&words)
                .filter(|n| super::spec::check_name("name", n).is_ok())
                .unwrap_or_else(|| format!("qemu-{}", pid.as_raw_nonzero())),
            process,
            spec: None,
            record: None,
            directory: None,
            qmp_socket: qmp_socket.into(),
            library_socket: library.socket.filter(|_| library.loaded),
            agent_socket,
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// QEMU's process.
    #[must_use]
    pub const fn process(&self) -> &Process {
        &self.process
    }

    /// QEMU's process number.
    #[must_use]
    pub const fn pid(&self) -> Pid {
        self.process.pid()
    }

    /// What was asked for; `None` for an attached VM.
    #[must_use]
    pub const fn spec(&self) -> Option<&VmSpec> {
        self.spec.as_ref()
    }

    /// Segments that it maps now, in the order of their slots.
    #[must_use]
    pub fn segments(&self) -> Vec<SegmentSpec> {
        let now = self.directory.as_ref();
        now.and_then(|place| VmDirectory::read_json(&place.segments()).ok())
            .or_else(|| Some(self.spec.as_ref()?.segments.clone()))
            .unwrap_or_default()
    }

    /// What was started; `None` for an attached VM.
    #[must_use]
    pub const fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    /// Its files; `None` for an attached VM.
    #[must_use]
    pub const fn directory(&self) -> Option<&VmDirectory> {
        self.directory.as_ref()
    }

    /// Its trust domain; an attached VM has none and shares with nobody.
    #[must_use]
    pub fn domain(&self) -> Option<&str> {
        self.spec.as_ref()?.domain.as_deref()
    }

    /// Whether memfold's library is in QEMU.
    #[must_use]
    pub const fn has_library(&self) -> bool {
        self.library_socket.is_some()
    }

    /// The library's socket, if it is in QEMU.
    #[must_use]
    pub fn library_socket(&self) -> Option<&Path> {
        self.library_socket.as_deref()
    }

    /// The socket of the agent's port, if the VM has one.
    #[must_use]
    pub fn agent_socket(&self) -> Option<&Path> {
        self.agent_socket.as_deref()
    }

    /// A new connection to the monitor for people and commands. Close it soon: QEMU serves one client at a time.
    pub fn qmp(&self) -> Result<Qmp, QmpError> {
        self.own(Qmp::connect(&self.qmp_socket, ANSWER_TIMEOUT)?)
    }

    /// A connection to a QEMU that memfold didn't start has to be with that one: a guest that has taken it over may put another's socket in the place of its own.
    fn own(&self, qmp: Qmp) -> Result<Qmp, QmpError> {
        if self.spec.is_some() || qmp.peer_pid() == Some(self.pid()) {
            return Ok(qmp);
        }
        Err(QmpError::Connect {
            path: self.qmp_socket.clone(),
            source: io::Error::other("another process than this QEMU listens there"),
        })
    }

    /// A new connection to the daemon's own monitor (an attached VM's only one), to be kept.
    pub fn daemon_qmp(&self) -> Result<Qmp, QmpError> {
        let socket = self.directory.as_ref().map(VmDirectory::daemon_qmp);
        let socket = socket.as_ref().unwrap_or(&self.qmp_socket);
        self.own(Qmp::connect(socket, ANSWER_TIMEOUT)?)
    }

    /// Its RAM now. Read again after boot and after hot-plug: both change it.
    pub fn layout(&self, qmp: &mut Qmp) -> Result<RamLayout, RamError> {
        ram::read(qmp)
    }

    /// What it allows now.
    pub fn conditions(&self, qmp: &mut Qmp) -> Result<VmConditions, RamError> {
        conditions::read(qmp, self.pid(), self.has_library())
    }

    /// The advice that QEMU gave a RAM block.
    pub fn advice(&self, block: &RamBlock) -> io::Result<Advice> {
        endpoints::advice(self.pid(), block)
    }

    /// Connects to the library; `None` if it isn't in QEMU.
    pub fn library_link(&self) -> Option<Result<LibraryLink, LibraryError>> {
        let socket = self.library_socket.as_ref()?;
        // A QEMU that memfold didn't start, and that its guest has taken over, may name the library of another one.
        let only = self.spec.is_none().then(|| self.pid());
        Some(LibraryLink::connect(socket, ANSWER_TIMEOUT, only))
    }

    /// Begins to connect to the agent; `None` if the VM has no port for it.
    pub fn agent_link(
        &self,
        options: AgentOptions,
        sink: impl FnMut(AgentEvent) + Send + 'static,
    ) -> Option<AgentLink> {
        let socket = self.agent_socket.as_ref()?;
        Some(AgentLink::start(socket, options, sink))
    }

    /// What memfold can do with it now, in words.
    pub fn abilities(&self, qmp: &mut Qmp) -> Result<Vec<Ability>, RamError> {
        let conditions = self.conditions(qmp)?;
        let mut fold: Vec<String> = conditions.fold.iter().map(Reason::to_string).collect();
        if !self.has_library() {
            fold.insert(
                0,
                format!(
                    "memfold's library is not in this QEMU (start it with LD_PRELOAD=.../{} and {}=SOCKET)",
                    memfold_host::files::LIBRARY,
                    memfold_wire::library::SOCKET_VARIABLE
                ),
            );
        }
        let mut refold = fold.clone();
        refold.extend(conditions.refold_live.iter().map(Reason::to_string));
        let hints = match self.agent_socket {
            Some(_) => Vec::new(),
            None => vec![format!(
                "it has no virtio-serial port {} on a Unix socket (add one, and the agent in the guest)",
                memfold_wire::agent::PORT_NAME
            )],
        };
        let ability = |what, reasons: Vec<String>| Ability {
            what,
            possible: reasons.is_empty(),
            reasons,
        };
        Ok(vec![
            ability("show its memory in the ledger", Vec::new()),
            ability("get hints from its guest", hints),
            ability("fold its RAM", fold),
            ability("fold again while it runs", refold),
        ])
    }

    /// Ends the VM: asks the guest to shut down and gives it `timeout`; then tells QEMU to quit; then kills it. Its files and
    /// temporary overlays are removed.
    pub fn stop(&self, timeout: Duration) -> Result<StopKind, MachineError> {
        self.end(timeout, &|| false, None)
            .map(|stopped| stopped.kind)
    }

    /// The same. `ask` has the guest's agent shut it down, and says whether the agent took the order. `monitor` carries a command out on a
    /// connection that the caller has already.
    pub fn end(
        &self,
        timeout: Duration,
        ask: &dyn Fn() -> bool,
        monitor: Option<&Ask<'_>>,
    ) -> Result<Stopped, MachineError> {
        let (Some(directory), Some(record)) = (&self.directory, &self.record) else {
            return Err(MachineError::NotOurs {
                name: self.name.clone(),
            });
        };
        let look = |source| MachineError::Look {
            name: self.name.clone(),
            source,
        };
        let own = RefCell::new(None);
        let own_monitor = |command: &str| self.ask_alone(&mut own.borrow_mut(), command);
        let stopped = self
            .end_process(timeout, ask, monitor.unwrap_or(&own_monitor))
            .map_err(look)?
            .ok_or_else(|| self.undying())?;
        remove_files(directory, record).map_err(look)?;
        Ok(stopped)
    }

    /// Kills QEMU, whose guest nobody wants any more, without a question. Its files and temporary overlays are removed.
    pub fn kill(&self) -> Result<(), MachineError> {
        let (Some(directory), Some(record)) = (&self.directory, &self.record) else {
            return Err(MachineError::NotOurs {
                name: self.name.clone(),
            });
        };
        let look = |source| MachineError::Look {
            name: self.name.clone(),
            source,
        };
        self.process.kill().map_err(look)?;
        if !self.process.wait_exit(QUIT_TIMEOUT).map_err(look)? {
            return Err(self.undying());
        }
        remove_files(directory, record).map_err(look)
    }

    fn undying(&self) -> MachineError {
        MachineError::Undying {
            name: self.name.clone(),
            pid: self.pid().as_raw_nonzero().get(),
        }
    }

    /// Carries a command out on a connection of this call's own: to the daemon's monitor, or, if somebody has that, to the other.
    fn ask_alone(&self, own: &mut Option<Qmp>, command: &str) -> Result<Value, QmpError> {
        if own.is_none() {
            let sockets = self.directory.as_ref().map(|d| [d.daemon_qmp(), d.qmp()]);
            let mut tried = sockets
                .iter()
                .flatten()
                .map(|socket| Qmp::connect(socket, STOP_TIMEOUT));
            *own = match tried.next() {
                Some(Err(first)) => tried.next().and_then(Result::ok).ok_or(first).map(Some)?,
                Some(Ok(qmp)) => Some(qmp),
                None => Some(self.qmp()?),
            };
        }
        match own {
            Some(qmp) => qmp.query(command),
            None => self.qmp()?.query(command),
        }
    }

    fn end_process(
        &self,
        timeout: Duration,
        ask: &dyn Fn() -> bool,
        monitor: &Ask<'_>,
    ) -> io::Result<Option<Stopped>> {
        let began = Instant::now();
        let stopped = |kind, overdue, why: Option<String>| {
            Some(Stopped {
                kind,
                overdue,
                took: began.elapsed(),
                why,
            })
        };
        if self.process.has_exited()? {
            return Ok(stopped(StopKind::Already, false, None));
        }
        let asked = if timeout.is_zero() {
            Shutdown::NotAsked("it was to be switched off at once".into())
        } else {
            self.power_down(timeout, ask, monitor)?
        };
        let (overdue, why) = match asked {
            Shutdown::Done => return Ok(stopped(StopKind::PoweredDown, false, None)),
            Shutdown::Gone => return Ok(stopped(StopKind::Already, false, None)),
            Shutdown::NotAsked(why) => (false, why),
            Shutdown::Overdue => {
                let seconds = timeout.as_secs_f64();
                (
                    true,
                    format!("its guest was asked to shut down and had not after {seconds} s"),
                )
            }
            Shutdown::Silent(error) => {
                tracing::warn!(vm = self.name, error, "QEMU does not answer and is killed");
                self.process.kill()?;
                let why =
                    format!("QEMU does not answer ({error}), so its guest could not be asked");
                let ended = self.process.wait_exit(QUIT_TIMEOUT)?;
                return Ok(ended
                    .then(|| stopped(StopKind::Killed, true, Some(why)))
                    .flatten());
            }
        };
        if !timeout.is_zero() {
            tracing::warn!(
                vm = self.name,
                why,
                "switched off; what its guest had not written to disk is lost"
            );
        }
        // QEMU may close the connection before it answers; the wait below tells.
        if let Err(error) = monitor("quit") {
            tracing::debug!(vm = self.name, %error, "quit was not answered");
        }
        if self.process.wait_exit(QUIT_TIMEOUT)? {
            return Ok(stopped(StopKind::Quit, overdue, Some(why)));
        }
        tracing::warn!(vm = self.name, "QEMU did not quit and is killed");
        self.process.kill()?;
        let ended = self.process.wait_exit(QUIT_TIMEOUT)?;
        Ok(ended
            .then(|| stopped(StopKind::Killed, overdue, Some(why)))
            .flatten())
    }

    /// Asks the guest to shut down, until it does: its agent first, or else the power button, again and again. A guest whose kernel is not
    /// up yet hears neither. A guest that stands still cannot hear it at all.
    fn power_down(
        &self,
        timeout: Duration,
        ask: &dyn Fn() -> bool,
        monitor: &Ask<'_>,
    ) -> io::Result<Shutdown> {
        let deadline = Instant::now() + timeout;
        let (mut stood, mut agent_took_it, mut was_asked) = (0, false, false);
        loop {
            let pause = match monitor("query-status") {
                Ok(status) if status["running"] == true => {
                    stood = 0;
                    agent_took_it = agent_took_it || ask();
                    if !agent_took_it {
                        if let Err(error) = monitor("system_powerdown") {
                            tracing::debug!(vm = self.name, %error, "the power button was not pressed");
                        }
                    }
                    was_asked = true;
                    PRESS_AGAIN
                }
                // It may be standing still for a moment, while pages are folded.
                Ok(_) if stood < STOOD_LOOKS => {
                    stood += 1;
                    STOOD_LOOK
                }
                Ok(status) => {
                    let state = status["status"].as_str().unwrap_or("unknown").to_owned();
                    return Ok(Shutdown::NotAsked(format!(
                        "it stands still ({state}), so its guest could not be asked"
                    )));
                }
                Err(_) if self.process.wait_exit(ENDING)? => {
                    return Ok(if was_asked {
                        Shutdown::Done
                    } else {
                        Shutdown::Gone
                    });
                }
                Err(error) => return Ok(Shutdown::Silent(error.to_string())),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if self.process.wait_exit(left.min(pause))? {
                return Ok(if was_asked {
                    Shutdown::Done
                } else {
                    Shutdown::Gone
                });
            }
            if left <= pause {
                return Ok(Shutdown::Overdue);
            }
        }
    }
}

/// Removes the files of a VM that has ended, unless they are gone and another VM has got its name.
fn remove_files(directory: &VmDirectory, record: &Record) -> io::Result<()> {
    let now = VmDirectory::read_json::<Record>(&directory.record());
    if now.as_ref().is_ok_and(|now| now.process != record.process) {
        return Ok(());
    }
    // A snapshot may have put other overlays in their place since.
    let overlays = now.map_or_else(|_| record.overlays.clone(), |record| record.overlays);
    directory.remove(&overlays)
}

/// What became of a guest that was to shut down.
enum Shutdown {
    /// It did.
    Done,
    /// It ended before it was asked.
    Gone,
    /// It was not asked, and why.
    NotAsked(String),
    /// It did not in time.
    Overdue,
    /// QEMU doesn't answer.
    Silent(String),
}

/// QEMU processes that were started for a VM's directory, by the monitor's socket on their command lines.
fn unrecorded(directory: &VmDirectory) -> io::Result<Vec<Process>> {
    let socket = super::command_line::monitor_argument(&directory.qmp());
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
            .and_then(Pid::from_raw)
        else {
            continue;
        };
        // One that ends while we look is none.
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if line
            .split(|byte| *byte == 0)
            .any(|word| word == socket.as_bytes())
        {
            found.extend(Identity::of(pid).and_then(Process::open));
        }
    }
    Ok(found)
}

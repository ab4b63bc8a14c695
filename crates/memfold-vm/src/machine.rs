//! Opens a running VM, so that the daemon can use it: a VM that this daemon or an earlier one
//! started, or a VM to which memfold attached by its QMP socket.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use memfold_wire::library::Advice;
use rustix::process::Pid;

use super::agent_facts::{AgentEvent, AgentOptions};
use super::agent_link::AgentLink;
use super::conditions::{self, VmConditions};
use super::directory::{Record, VmDirectory, missing_is_fine};
use super::endpoints;
use super::layout::{RamBlock, RamLayout};
use super::library_link::{LibraryError, LibraryLink};
use super::name::check_name;
use super::process::{Identity, Process};
use super::qemu_line::monitor_argument;
use super::qemu_user::QemuUser;
use super::qmp::{Qmp, QmpError};
use super::ram::{self, RamError};
use super::segment_spec::SegmentSpec;
use super::spec::VmSpec;

/// Timeout of answers of QEMU's monitor and library.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time that QEMU may take to end, after `quit` or after a kill.
pub(super) const QUIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a VM could not be found, attached to or stopped.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum MachineError {
    #[error("no VM named '{name}' is running")]
    NotFound { name: String },
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("cannot use the process behind QMP socket {path}: {why}")]
    Peer { path: PathBuf, why: String },
    #[error("cannot inspect VM '{name}'")]
    Look {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot read {path}, the description of a running VM")]
    Description {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("VM '{name}' (process {pid}) did not end after SIGKILL")]
    Undying { name: String, pid: i32 },
    #[error("VM '{name}' was not started by memfold; stop the VM with the program that started it")]
    NotOurs { name: String },
}

/// A running VM: its QEMU process, memfold's files of it, and the paths of its sockets.
#[derive(Debug)]
pub struct Vm {
    pub(super) name: String,
    pub(super) process: Process,
    pub(super) spec: Option<VmSpec>,
    pub(super) record: Option<Record>,
    pub(super) directory: Option<VmDirectory>,
    qmp_socket: PathBuf,
    library_socket: Option<PathBuf>,
    agent_socket: Option<PathBuf>,
}

impl Record {
    /// Returns the user that the QEMU of this record has switched to. `spec`: description of its
    /// VM; older versions of memfold recorded the user only there.
    #[must_use]
    pub fn user_of(&self, spec: &VmSpec) -> Option<QemuUser> {
        let named = || QemuUser::named(spec.user.as_ref()?).ok();
        self.user.or_else(named).filter(|_| !spec.keeps_rights())
    }
}

impl Vm {
    /// Opens the running VM that has its files in `directory`. Fails with `NotFound` if the VM has
    /// ended.
    pub fn open(directory: &VmDirectory) -> Result<Self, MachineError> {
        let (mut vm, spec) = Self::open_process(directory)?;
        vm.spec = Some(spec?);
        Ok(vm)
    }

    /// Opens the process of a VM, and reads the VM's description, which fails separately.
    fn open_process(
        directory: &VmDirectory,
    ) -> Result<(Self, Result<VmSpec, MachineError>), MachineError> {
        let name = directory.name();
        let look = |source: io::Error| {
            let (name, is_gone) = (name.clone(), source.kind() == io::ErrorKind::NotFound);
            if is_gone {
                MachineError::NotFound { name }
            } else {
                MachineError::Look { name, source }
            }
        };
        let record: Record = VmDirectory::read_json(&directory.record()).map_err(look)?;
        let process = Process::open(record.process).map_err(look)?;
        let spec = VmDirectory::read_json(&directory.spec()).map_err(|source| {
            // The files are removed after the VM has ended.
            let is_gone = source.kind() == io::ErrorKind::NotFound;
            if is_gone && process.has_exited().unwrap_or(false) {
                return MachineError::NotFound { name: name.clone() };
            }
            MachineError::Description {
                path: directory.spec(),
                source,
            }
        });
        let vm = Self {
            process,
            spec: None,
            qmp_socket: directory.qmp(),
            library_socket: record.library.is_some().then(|| directory.library()),
            agent_socket: Some(directory.agent()),
            record: Some(record),
            directory: Some(directory.clone()),
            name,
        };
        Ok((vm, spec))
    }

    /// Opens the running VM `name` that has its files below the state directory `state`.
    pub fn find(state: &Path, name: &str) -> Result<Self, MachineError> {
        Self::open(&directory_of(state, name)?)
    }

    /// Opens the running VM `name` as [`Vm::find`] does, to end it. This works without the VM's
    /// description. Returns also why the description cannot be read; `None` if it can.
    pub fn find_to_end(
        state: &Path,
        name: &str,
    ) -> Result<(Self, Option<MachineError>), MachineError> {
        let (mut vm, spec) = Self::open_process(&directory_of(state, name)?)?;
        match spec {
            Ok(spec) => {
                vm.spec = Some(spec);
                Ok((vm, None))
            }
            Err(error) => Ok((vm, Some(error))),
        }
    }

    /// Opens all VMs that still run and have their files below the state directory `state`, sorted
    /// by name, as [`Vm::look_for_all`] does. Logs a VM whose files cannot be read.
    pub fn discover(state: &Path) -> io::Result<Vec<Self>> {
        let readable = |(name, vm): (String, Result<Self, MachineError>)| {
            let unreadable = |error: &MachineError| {
                tracing::warn!(
                    vm = name,
                    error = error as &dyn std::error::Error,
                    "cannot read the files of a VM that may be running; they are left unchanged"
                );
            };
            vm.inspect_err(unreadable).ok()
        };
        let all = Self::look_for_all(state)?.into_iter();
        Ok(all.filter_map(readable).collect())
    }

    /// Opens all VMs that still run and have their files below the state directory `state`, sorted
    /// by name. A VM whose files cannot be read may be running, too: it is in the list with the
    /// reason. Removes the directories of ended VMs.
    pub fn look_for_all(state: &Path) -> io::Result<Vec<(String, Result<Self, MachineError>)>> {
        let mut found = Vec::new();
        for directory in VmDirectory::all(state)? {
            let vm = Self::open(&directory);
            if !matches!(vm, Err(MachineError::NotFound { .. })) {
                found.push((directory.name(), vm));
            } else if let Err(error) = Self::clear_if_stale(&directory) {
                tracing::warn!(vm = directory.name(), %error, "cannot remove the files of a VM that ended; the daemon tries again at its next start");
            }
        }
        Ok(found)
    }

    /// Removes a VM's directory if the VM has ended. Returns whether the directory was removed:
    /// false if the VM runs or is being started.
    pub fn clear_if_stale(directory: &VmDirectory) -> io::Result<bool> {
        let Some(_lock) = (match directory.lock() {
            // Another process has removed the directory meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
            other => other?,
        }) else {
            return Ok(false);
        };
        // Whatever else is wrong with the record, the VM may be running.
        let record = VmDirectory::read_json::<Record>(&directory.record()).map(Some);
        let overlays = if let Some(record) = missing_is_fine(record)? {
            if missing_is_fine(Process::open(record.process).map(Some))?.is_some() {
                return Ok(false);
            }
            record.overlays
        } else {
            // The process that started QEMU died before it wrote the record.
            for process in unrecorded(directory)? {
                process.kill()?;
                if !process.wait_exit(QUIT_TIMEOUT)? {
                    return Err(io::Error::other("QEMU did not end after SIGKILL"));
                }
            }
            VmDirectory::read_json(&directory.overlays()).unwrap_or_default()
        };
        directory.remove(&overlays)?;
        Ok(true)
    }

    /// Returns whether a daemon died while it restored this VM from a snapshot.
    #[must_use]
    pub fn is_half_restored(&self) -> bool {
        let directory = self.directory.as_ref();
        directory.is_some_and(|directory| directory.incoming().exists())
    }

    /// Records that the restore of this VM from a snapshot is complete.
    pub fn came_in(&self) -> io::Result<()> {
        let remove = |d: &VmDirectory| missing_is_fine(std::fs::remove_file(d.incoming()));
        self.directory.as_ref().map_or(Ok(()), remove)
    }

    /// Changes the list of temporary files in the VM's record; memfold removes these files with the
    /// VM.
    pub fn change_temporary(&self, change: impl FnOnce(&mut Vec<PathBuf>)) -> io::Result<()> {
        let (Some(directory), Some(record)) = (&self.directory, &self.record) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let mut now: Record = VmDirectory::read_json(&directory.record())?;
        // The VM may have ended meanwhile, and another VM may have its name.
        if now.process != record.process {
            return Err(io::ErrorKind::NotFound.into());
        }
        change(&mut now.overlays);
        directory.write_json(&directory.record(), &now)
    }

    /// Attaches to a QEMU that memfold did not start, by its QMP socket. Changes nothing in the VM.
    pub fn attach(qmp_socket: &Path) -> Result<Self, MachineError> {
        let mut qmp = Qmp::connect(qmp_socket, ANSWER_TIMEOUT)?;
        let bad = |why: String| MachineError::Peer {
            path: qmp_socket.into(),
            why,
        };
        let pid = qmp.peer_pid();
        let pid =
            pid.ok_or_else(|| bad("the kernel does not report the socket's process".into()))?;
        let number = pid.as_raw_nonzero();
        let look = |e: io::Error| bad(format!("process {number}: {e}"));
        let identity = Identity::of(pid).map_err(look)?;
        let process = Process::open(identity).map_err(look)?;
        let words = endpoints::command_line(pid).map_err(look)?;
        let program = words.first().map_or("", String::as_str);
        // If the program's name is 'kvm', the name of its file still contains 'qemu'.
        let file = std::fs::read_link(format!("/proc/{number}/exe")).map_err(look)?;
        if !program.contains("qemu") && !file.to_string_lossy().contains("qemu") {
            return Err(bad(format!(
                "the socket was created by '{program}' (process {number}), which is not QEMU; give QEMU its own -qmp unix:PATH,server=on"
            )));
        }
        let library = endpoints::library(pid).map_err(look)?;
        let agent_socket = endpoints::agent_socket(pid, &mut qmp)?;
        Ok(Self {
            name: endpoints::guest_name(&words)
                .filter(|n| check_name("name", n).is_ok())
                .unwrap_or_else(|| format!("qemu-{number}")),
            process,
            spec: None,
            record: None,
            directory: None,
            qmp_socket: qmp_socket.into(),
            library_socket: library.socket.filter(|_| library.loaded),
            agent_socket,
        })
    }

    /// Returns the VM's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the handle of the VM's QEMU process.
    #[must_use]
    pub const fn process(&self) -> &Process {
        &self.process
    }

    /// Returns the process ID of the VM's QEMU.
    #[must_use]
    pub const fn pid(&self) -> Pid {
        self.process.pid()
    }

    /// Returns the VM's description; `None` if memfold did not start the VM.
    #[must_use]
    pub const fn spec(&self) -> Option<&VmSpec> {
        self.spec.as_ref()
    }

    /// Returns the segments that the VM maps now, in the order of their device slots.
    #[must_use]
    pub fn segments(&self) -> Vec<SegmentSpec> {
        let now = self.directory.as_ref();
        now.and_then(|place| VmDirectory::read_json(&place.segments()).ok())
            .or_else(|| Some(self.spec.as_ref()?.segments.clone()))
            .unwrap_or_default()
    }

    /// Returns what was recorded when the VM was started; `None` if memfold did not start the VM.
    #[must_use]
    pub const fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    /// Returns the user that the VM's QEMU has switched to; `None` if QEMU has kept the daemon's
    /// user, or if memfold did not start the VM.
    #[must_use]
    pub fn user(&self) -> Option<QemuUser> {
        self.record()?.user_of(self.spec()?)
    }

    /// Returns the directory with memfold's files of the VM; `None` if memfold did not start the
    /// VM.
    #[must_use]
    pub const fn directory(&self) -> Option<&VmDirectory> {
        self.directory.as_ref()
    }

    /// Returns the VM's trust domain. A VM that memfold did not start has none here, and shares no
    /// memory.
    #[must_use]
    pub fn domain(&self) -> Option<&str> {
        self.spec.as_ref()?.domain.as_deref()
    }

    /// Returns whether memfold's library is in the VM's QEMU.
    #[must_use]
    pub const fn has_library(&self) -> bool {
        self.library_socket.is_some()
    }

    /// Returns the path of the library's socket; `None` if memfold's library is not in the VM's
    /// QEMU.
    #[must_use]
    pub fn library_socket(&self) -> Option<&Path> {
        self.library_socket.as_deref()
    }

    /// Returns the path of the socket of the agent's port; `None` if the VM has no such port.
    #[must_use]
    pub fn agent_socket(&self) -> Option<&Path> {
        self.agent_socket.as_deref()
    }

    /// Opens a connection to the QEMU monitor that is meant for users and commands. Close it soon,
    /// because QEMU serves one client at a time.
    pub fn qmp(&self) -> Result<Qmp, QmpError> {
        self.own(Qmp::connect(&self.qmp_socket, ANSWER_TIMEOUT)?)
    }

    /// Checks that the peer of a connection is this VM's QEMU, if memfold did not start it. A guest
    /// that has taken over its QEMU may replace the socket by another QEMU's.
    fn own(&self, qmp: Qmp) -> Result<Qmp, QmpError> {
        if self.spec.is_some() || qmp.peer_pid() == Some(self.pid()) {
            return Ok(qmp);
        }
        Err(QmpError::Connect {
            path: self.qmp_socket.clone(),
            source: io::Error::other("a process other than this QEMU listens there"),
        })
    }

    /// Opens a connection to the QEMU monitor that is meant for the daemon, which may keep it open.
    /// A VM that memfold did not start has only one monitor.
    pub fn daemon_qmp(&self) -> Result<Qmp, QmpError> {
        let socket = self.directory.as_ref().map(VmDirectory::daemon_qmp);
        let socket = socket.as_ref().unwrap_or(&self.qmp_socket);
        self.own(Qmp::connect(socket, ANSWER_TIMEOUT)?)
    }

    /// Reads the VM's RAM layout from QEMU. Boot and hot-plug change the layout, so read it again
    /// after both.
    pub fn layout(&self, qmp: &mut Qmp) -> Result<RamLayout, RamError> {
        ram::read(qmp)
    }

    /// Reads from QEMU and the kernel whether the VM's RAM can be folded now.
    pub fn conditions(&self, qmp: &mut Qmp) -> Result<VmConditions, RamError> {
        Ok(self.layout_and_conditions(qmp)?.1)
    }

    /// Reads from QEMU and the kernel the VM's RAM layout, and whether the RAM can be folded now.
    pub fn layout_and_conditions(
        &self,
        qmp: &mut Qmp,
    ) -> Result<(RamLayout, VmConditions), RamError> {
        conditions::read(qmp, self.pid(), self.has_library())
    }

    /// Returns whether the VM's QEMU process holds something that forbids folding, such as a VFIO
    /// device. QEMU is not asked.
    #[must_use]
    pub fn process_forbids_folding(&self) -> bool {
        conditions::process_forbids_folding(self.pid(), self.has_library())
    }

    /// Returns the `madvise` settings that QEMU gave a RAM block of the VM.
    pub fn advice(&self, block: &RamBlock) -> io::Result<Advice> {
        endpoints::advice(self.pid(), block)
    }

    /// Connects to memfold's library in the VM's QEMU; `None` if the library is not there.
    pub fn library_link(&self) -> Option<Result<LibraryLink, LibraryError>> {
        let socket = self.library_socket.as_ref()?;
        // If memfold did not start this QEMU, and its guest has taken it over, it may name the
        // socket of another QEMU's library.
        let only = self.spec.is_none().then(|| self.pid());
        Some(LibraryLink::connect(socket, ANSWER_TIMEOUT, only))
    }

    /// Starts a connection to memfold's agent in the guest, whose events are passed to `sink`;
    /// `None` if the VM has no port for an agent.
    pub fn agent_link(
        &self,
        options: AgentOptions,
        sink: impl FnMut(AgentEvent) + Send + 'static,
    ) -> Option<AgentLink> {
        let socket = self.agent_socket.as_ref()?;
        Some(AgentLink::start(socket, options, sink))
    }
}

/// Returns the directory of VM `name`. A name that could leave the state directory is no VM's name.
fn directory_of(state: &Path, name: &str) -> Result<VmDirectory, MachineError> {
    if check_name("name", name).is_err() {
        return Err(MachineError::NotFound { name: name.into() });
    }
    Ok(VmDirectory::of(state, name))
}

/// Finds QEMU processes that were started for a VM's directory but not recorded; their command
/// lines contain the monitor's socket.
fn unrecorded(directory: &VmDirectory) -> io::Result<Vec<Process>> {
    let socket = monitor_argument(&directory.qmp());
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let number = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        let Some(pid) = number.and_then(Pid::from_raw) else {
            continue;
        };
        // A process that ends meanwhile does not count.
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0);
        if words.any(|word| word == socket.as_bytes()) {
            found.extend(Identity::of(pid).and_then(Process::open));
        }
    }
    Ok(found)
}

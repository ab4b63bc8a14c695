//! Starts a VM as a QEMU process that outlives the daemon.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memfold_host::qemu::{QemuError, QemuFacts};
use memfold_host::{files, kvm};
use memfold_sys::session;
use memfold_units::ByteSize;
use memfold_wire::library::{MONITOR_VARIABLE, SOCKET_VARIABLE};
use rustix::process::Pid;

use super::command_line::{NETWORK, arguments};
use super::connection::{self, ConnectionError};
use super::directory::{MAX_SOCKET_PATH, Record, VmDirectory};
use super::disk_header::{self, ChangedHeader};
use super::forward::Forward;
use super::machine::Vm;
use super::network::MacAddress;
use super::overlay::{self, Backing};
use super::own_files;
use super::process::Identity;
use super::qemu_user::{self, QemuUser, UserError};
use super::qmp::Qmp;
use super::seed_disk;
use super::spec::{AccelChoice, DiskSpec, VmSpec};
use super::spec_error::{SpecError, require};
use super::swap;

/// Longest time until QEMU's monitor answers.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Arguments of a QEMU that waits for a device state without RAM from a file. The state contains no
/// description of the command line.
const INCOMING: [&str; 4] = [
    "-incoming",
    "defer",
    "-global",
    "migration.send-configuration=off",
];

/// Longest wait for a killed QEMU to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Number of bytes of QEMU's output that an error message repeats.
const LOG_TAIL: u64 = 4096;

/// Longest age of QEMU's last output that still explains QEMU's end.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// Why a VM could not be started. After an error, none of the VM's files and processes remain.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum LaunchError {
    #[error("the VM's description is not valid")]
    Spec(#[from] SpecError),
    #[error("cannot find out what the QEMU program supports")]
    Qemu(#[from] QemuError),
    #[error("{program} has version {}.{}.{}; memfold needs 10.0 or newer", version.0, version.1, version.2)]
    TooOld {
        program: PathBuf,
        version: (u64, u64, u64),
    },
    #[error("cannot run QEMU as a user without root's rights")]
    User(#[from] UserError),
    #[error("cannot use accel = \"kvm\": {why}; use \"auto\" or \"tcg\"")]
    Kvm { why: String },
    #[error(
        "memfold's library for QEMU is missing; build it ('make build'), set the variable {} to its path, or start the VM with fold = false",
        files::LIBRARY_VARIABLE
    )]
    Library(#[source] io::Error),
    #[error("a VM named '{name}' is running")]
    NameTaken { name: String },
    #[error(
        "path of state directory {path} is too long: a socket there has a path of {length} bytes, at most {MAX_SOCKET_PATH} are allowed; choose a shorter --state"
    )]
    PathTooLong { path: PathBuf, length: usize },
    #[error("cannot create the VM's files in {path}")]
    Files {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    ChangedHeader(#[from] ChangedHeader),
    #[error("cannot create a temporary overlay for {disk}: {why}")]
    Overlay { disk: PathBuf, why: String },
    #[error("cannot forward port {forward}; use host port 0 to get any free host port")]
    Forward {
        forward: Forward,
        #[source]
        source: io::Error,
    },
    #[error(
        "cannot allocate {size} for a swap disk in {path}; free space there, choose another TMPDIR, or use a smaller --swap"
    )]
    Swap {
        size: ByteSize,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "cannot load the saved device state: the VM was saved with {what} {then}, and this host has {now}"
    )]
    Incoming {
        what: &'static str,
        then: String,
        now: String,
    },
    #[error("cannot connect the network card of VM '{name}'")]
    Network {
        name: String,
        #[source]
        source: ConnectionError,
    },
    #[error("VM '{name}' was stopped while it started")]
    Cancelled { name: String },
    #[error("QEMU did not start ({what}); its output:\n{output}")]
    Start { what: String, output: String },
}

/// A flag by which another thread cancels the start of a VM.
#[derive(Debug, Default)]
pub struct Cancel(AtomicBool);

impl Cancel {
    /// Cancels the start of VM `name` below the state directory `state`. Kills the VM's QEMU if it
    /// was already started, so that no thread waits for it.
    pub fn cancel(&self, state: &Path, name: &str) -> io::Result<()> {
        self.set();
        // If there is no record yet, the starting thread sees the flag after it has written one.
        match Vm::find(state, name) {
            Ok(vm) => vm.process().kill(),
            Err(_) => Ok(()),
        }
    }

    /// Returns whether the start of the VM was cancelled.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Cancels the start of the VM without waiting. The thread that starts the VM then ends QEMU.
    pub fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    fn check(&self, name: &str) -> Result<(), LaunchError> {
        if self.is_set() {
            return Err(LaunchError::Cancelled {
                name: name.to_owned(),
            });
        }
        Ok(())
    }
}

/// Starts a VM with its files below the state directory `state`. Returns when QEMU's monitor
/// answers; the guest may still be booting.
pub fn start(state: &Path, spec: VmSpec) -> Result<Vm, LaunchError> {
    start_unless(&Cancel::default(), state, spec, None)
}

/// What a host must offer so that QEMU can load a device state that was saved earlier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// Version of the QEMU that saved the device state: major, minor, micro.
    pub qemu: (u64, u64, u64),
    /// Machine type of the saved VM, with its version.
    pub machine: String,
    /// Accelerator of the saved VM: `kvm` or `tcg`.
    pub accel: String,
    /// Whether the saved VM's files are still being fetched from another host. Then links in their
    /// paths are kept: what the links lead to is moved when all have arrived.
    pub arriving: bool,
}

/// Starts a VM like [`start`], but ends QEMU and fails if `cancel` is set during the start. With
/// `incoming`, QEMU waits for a device state instead of booting.
pub fn start_unless(
    cancel: &Cancel,
    state: &Path,
    mut spec: VmSpec,
    incoming: Option<&Incoming>,
) -> Result<Vm, LaunchError> {
    let given = spec.clone();
    let of_cloud_init = spec.cloud_init.as_ref().filter(|_| incoming.is_some());
    require(
        of_cloud_init.is_none_or(|of| of.seed.is_some()),
        "cloud_init",
        "a saved VM has the data themselves, and names no files",
    )?;
    spec.validate()?;
    if incoming.is_some_and(|saved| saved.arriving) {
        spec.keep_paths(given);
    }
    if incoming.is_none() {
        spec.deflate_on_oom = spec.balloon;
    }
    let qemu = QemuFacts::probe()?;
    if !qemu.is_supported() {
        return Err(LaunchError::TooOld {
            program: qemu.program,
            version: qemu.version,
        });
    }
    for forward in &mut spec.forwards {
        *forward = forward.claim().map_err(|source| LaunchError::Forward {
            forward: forward.clone(),
            source,
        })?;
    }
    if spec.network.needs_tap() && spec.mac.is_none() {
        spec.mac = Some(MacAddress::of_vm(&spec.name));
    }
    if let Some(cloud_init) = &mut spec.cloud_init {
        cloud_init.settle(&spec.name)?;
    }
    let accel = choose_accel(&spec, &qemu, state)?;
    if let Some(incoming) = incoming {
        fits(incoming, &qemu, accel)?;
    }
    // A saved VM's memory is filled by the library, even if the VM is not folded.
    let needs_library = spec.fold || incoming.is_some();
    let library = needs_library.then(files::library).transpose();
    let library = library.map_err(LaunchError::Library)?;
    let user = QemuUser::choose(&spec)?;
    let directory = VmDirectory::of(state, &spec.name);
    let length = directory.console().as_os_str().len();
    if length > MAX_SOCKET_PATH {
        return Err(LaunchError::PathTooLong {
            path: directory.path().into(),
            length,
        });
    }
    claim(&directory)?;
    let mut attempt = Attempt {
        directory: &directory,
        spec: &spec,
        qemu: &qemu,
        accel,
        library,
        incoming,
        overlays: Vec::new(),
        user,
        child: None,
    };
    let vm = attempt.run(cancel);
    if vm.is_err() {
        attempt.undo();
    }
    vm.map_err(|error| unknown_machine(error, incoming, &qemu))
}

/// Explains QEMU's error message, if the reason is that this QEMU no longer has the machine type of
/// a saved state.
fn unknown_machine(
    error: LaunchError,
    incoming: Option<&Incoming>,
    qemu: &QemuFacts,
) -> LaunchError {
    match (incoming, &error) {
        (Some(incoming), LaunchError::Start { output, .. })
            if output.contains("unsupported machine type") =>
        {
            let now = format!("QEMU {}, which lacks it", text(qemu.version));
            other("machine type", incoming.machine.clone(), now)
        }
        _ => error,
    }
}

fn other(what: &'static str, then: String, now: String) -> LaunchError {
    LaunchError::Incoming { what, then, now }
}

fn text(version: (u64, u64, u64)) -> String {
    let (major, minor, micro) = version;
    format!("{major}.{minor}.{micro}")
}

/// Checks that this QEMU can load the saved device state.
fn fits(incoming: &Incoming, qemu: &QemuFacts, accel: &str) -> Result<(), LaunchError> {
    if qemu.version < incoming.qemu {
        return Err(other("QEMU", text(incoming.qemu), text(qemu.version)));
    }
    if accel != incoming.accel {
        return Err(other(
            "accelerator",
            incoming.accel.clone(),
            accel.to_owned(),
        ));
    }
    Ok(())
}

fn choose_accel(
    spec: &VmSpec,
    qemu: &QemuFacts,
    state: &Path,
) -> Result<&'static str, LaunchError> {
    match spec.accel {
        AccelChoice::Tcg => Ok("tcg"),
        // There is no probe here: a user who names KVM may boot something else than Linux.
        AccelChoice::Kvm => {
            let opened = File::options().read(true).write(true).open("/dev/kvm");
            let why = |e| format!("/dev/kvm: {e}");
            opened
                .map(|_| "kvm")
                .map_err(|e| LaunchError::Kvm { why: why(e) })
        }
        AccelChoice::Auto => {
            let images = files::guest_images().unwrap_or_default();
            let verdict = kvm::probe(qemu, images.values().next(), state);
            Ok(if verdict.is_usable() { "kvm" } else { "tcg" })
        }
    }
}

/// Returns a function that converts an I/O error to a [`LaunchError`] about the VM's files.
fn failed(directory: &VmDirectory) -> impl Fn(io::Error) -> LaunchError + Copy {
    move |source| LaunchError::Files {
        path: directory.path().into(),
        source,
    }
}

/// Creates the VM's directory. Removes a directory that an ended VM of this name left.
fn claim(directory: &VmDirectory) -> Result<(), LaunchError> {
    let failed = failed(directory);
    match directory.create() {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            if !Vm::clear_if_stale(directory).map_err(failed)? {
                let name = directory.name();
                return Err(LaunchError::NameTaken { name });
            }
            directory.create().map_err(failed)
        }
        other => other.map_err(failed),
    }
}

/// A start in progress, with the files to remove if it fails.
struct Attempt<'a> {
    directory: &'a VmDirectory,
    spec: &'a VmSpec,
    qemu: &'a QemuFacts,
    accel: &'a str,
    library: Option<PathBuf>,
    incoming: Option<&'a Incoming>,
    overlays: Vec<PathBuf>,
    user: Option<QemuUser>,
    child: Option<Child>,
}

impl Attempt<'_> {
    /// Creates the VM's files. Of the VM's disks, only temporary overlays and the swap disk are
    /// created.
    fn make_files(&mut self) -> Result<(), LaunchError> {
        let (directory, spec) = (self.directory, self.spec);
        let failed = failed(directory);
        directory
            .write_json(&directory.spec(), spec)
            .and_then(|()| directory.write_json(&directory.segments(), &spec.segments))
            .map_err(failed)?;
        own_files::make(directory, spec, self.user).map_err(failed)?;
        seed_disk::make(directory, spec, self.user).map_err(failed)?;
        let disks = || spec.disks.iter().filter(|disk| disk.snapshot);
        let places: Vec<PathBuf> = disks()
            .enumerate()
            .map(|(number, disk)| overlay_place(disk, number, &spec.name))
            .collect::<Result<_, _>>()?;
        let swap = spec.swap.map(|_| swap::place(&spec.name)).transpose();
        let swap = swap.map_err(failed)?.zip(spec.swap);
        let all: Vec<&PathBuf> = places.iter().chain(swap.iter().map(|(p, _)| p)).collect();
        // This process may die at any moment, so the paths are recorded before the files are made.
        directory
            .write_json(&directory.overlays(), &all)
            .map_err(failed)?;
        for (disk, overlay) in disks().zip(places) {
            make_overlay(disk, &overlay)?;
            self.overlays.push(overlay.clone());
            qemu_user::give(&overlay, self.user).map_err(|source| LaunchError::Files {
                path: overlay,
                source,
            })?;
        }
        if let Some((path, size)) = swap {
            let failed = |source| LaunchError::Swap {
                size,
                path: path.clone(),
                source,
            };
            swap::create(&path, size.0, true).map_err(failed)?;
            self.overlays.push(path.clone());
            qemu_user::give(&path, self.user).map_err(failed)?;
        }
        if self.incoming.is_some() {
            File::create(directory.incoming()).map_err(failed)?;
        }
        Ok(())
    }

    /// Returns the command that starts QEMU: arguments, environment, working directory, output.
    fn command(&self, machine: &str) -> io::Result<Command> {
        let (directory, spec) = (self.directory, self.spec);
        // QEMU appends to the log, so the daemon can empty it when it is too long.
        let log = File::options()
            .append(true)
            .create(true)
            .open(directory.qemu_log())?;
        let mut command = qemu_command(&self.qemu.program, log)?;
        let arguments = arguments(
            spec,
            machine,
            self.accel,
            directory,
            &self.overlays,
            self.user,
        );
        // The command line of a VM that memfold did not start may name files without a directory.
        let place = match &spec.foreign {
            Some(_) => Some(directory.path()),
            None => spec.qemu_directory.as_deref().filter(|p| p.is_dir()),
        };
        command
            .args(self.incoming.into_iter().flat_map(|_| INCOMING))
            .args(arguments)
            .current_dir(place.unwrap_or(Path::new("/")));
        // Root may lock any amount of memory; QEMU's user may lock as much as this limit allows.
        if self.user.is_some() && locks_memory(command.get_args()) {
            session::lift_lock_limit(&mut command);
        }
        if let Some(library) = &self.library {
            preload(&mut command, library, directory)?;
        }
        Ok(command)
    }

    fn run(&mut self, cancel: &Cancel) -> Result<Vm, LaunchError> {
        // In guests that use another timer, the HPET still ticks 250 times a second, each time
        // through QEMU's main loop. The HPET has device state, so a restored VM keeps its setting.
        let machine = self.incoming.map_or_else(
            || format!("{},hpet=off", self.qemu.machine),
            |incoming| incoming.machine.clone(),
        );
        let directory = self.directory;
        let failed = failed(directory);
        let _lock = directory.lock().map_err(failed)?;
        disk_header::check(&self.spec.disks)?;
        self.make_files()?;
        let mut command = self.command(&machine).map_err(failed)?;
        self.connect(&mut command)?;
        let program = || self.qemu.program.clone();
        let spawned = session::detach(&mut command).spawn();
        let spawned = spawned.map_err(|source| QemuError::Run {
            program: program(),
            source,
        })?;
        let child = self.child.insert(spawned);
        let record = Record {
            process: Identity::of(Pid::from_child(child)).map_err(failed)?,
            qemu: program(),
            version: self.qemu.version,
            machine,
            accel: self.accel.to_owned(),
            library: self.library.take(),
            overlays: self.overlays.clone(),
            user: self.user,
        };
        directory
            .write_json(&directory.record(), &record)
            .map_err(failed)?;
        let started = wait_for_monitor(child, directory, Duration::from_secs(2), cancel);
        // If the start was cancelled, QEMU's last output does not matter.
        cancel.check(&self.spec.name)?;
        started?;
        let vm = Vm::open(directory).map_err(|e| LaunchError::Start {
            what: e.to_string(),
            output: log_tail(directory),
        })?;
        if let Some(child) = self.child.take() {
            reap(child);
        }
        Ok(vm)
    }

    /// Connects the VM's network card, and passes the tap's descriptor to QEMU.
    fn connect(&self, command: &mut Command) -> Result<(), LaunchError> {
        let spec = self.spec;
        let Some(address) = spec.mac.filter(|_| spec.foreign.is_none()) else {
            return Ok(());
        };
        let connected = connection::connect(&spec.network, address, &self.directory.macvtap());
        let tap = connected.map_err(|source| LaunchError::Network {
            name: spec.name.clone(),
            source,
        })?;
        if let Some(tap) = tap {
            let number = session::pass(command, tap);
            command.args(["-netdev", &format!("tap,id={NETWORK},fd={number}")]);
        }
        Ok(())
    }

    fn undo(&mut self) {
        if let Some(mut child) = self.child.take() {
            // This fails only if the child has ended.
            let _ = child.kill();
            let end = Instant::now() + KILL_TIMEOUT;
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
            // QEMU may wait for a disk that does not answer; the kernel ends QEMU after the disk
            // has answered.
            reap(child);
        }
        if let Err(error) = self.directory.remove(&self.overlays) {
            tracing::warn!(directory = %self.directory.path().display(), %error, "cannot remove the files of a VM that did not start; remove them by hand");
        }
    }
}

/// Returns whether a QEMU with these arguments locks memory also after its start: all of it, or
/// what devices of the host access.
fn locks_memory<'a>(arguments: impl Iterator<Item = &'a OsStr>) -> bool {
    let mut arguments = arguments.filter_map(OsStr::to_str);
    arguments.any(|text| {
        ["mem-lock=on", "vfio-", "vhost-vdpa"]
            .iter()
            .any(|word| text.contains(word))
    })
}

/// First letters of the names of variables with the daemon's credentials for object stores, which a
/// guest that has taken over its QEMU must not find.
const SECRET: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];

/// Returns a command for QEMU that writes its output to a log file.
pub(super) fn qemu_command(program: &Path, log: File) -> io::Result<Command> {
    let mut command = Command::new(program);
    command
        // This variable is for the daemon, not for QEMU (sd_notify(3)).
        .env_remove("NOTIFY_SOCKET")
        .env_remove("WATCHDOG_USEC")
        .env_remove("WATCHDOG_PID")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in names.filter(|name| SECRET.iter().any(|prefix| name.starts_with(prefix))) {
        command.env_remove(name);
    }
    Ok(command)
}

/// Waits for the child's end on a separate thread, so that it does not remain a zombie while the
/// daemon lives.
pub(super) fn reap(mut child: Child) {
    let thread = std::thread::Builder::new()
        .name("reap-qemu".into())
        .spawn(move || child.wait());
    if let Err(error) = thread {
        tracing::warn!(%error, "cannot start the thread that waits for QEMU's end; no action is needed");
    }
}

/// Waits for QEMU's monitor, whose answers may then take up to `timeout` each.
pub(super) fn wait_for_monitor(
    child: &mut Child,
    directory: &VmDirectory,
    timeout: Duration,
    cancel: &Cancel,
) -> Result<Qmp, LaunchError> {
    let deadline = Instant::now() + START_TIMEOUT;
    let failed = |what: String| LaunchError::Start {
        what,
        output: log_tail(directory),
    };
    loop {
        cancel.check(&directory.name())?;
        match child.try_wait() {
            Ok(Some(status)) => return Err(failed(status.to_string())),
            Ok(None) => {}
            Err(e) => return Err(failed(e.to_string())),
        }
        // The socket exists before QEMU has created its devices. The greeting comes after that,
        // unless QEMU ends first.
        match Qmp::connect(&directory.qmp(), timeout) {
            Ok(qmp) => return Ok(qmp),
            Err(e) if Instant::now() >= deadline => return Err(failed(e.to_string())),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Makes QEMU load memfold's library, which listens on a socket in the VM's directory and gets its
/// own QMP monitor over a socket pair: QEMU has one end, and the library in the same process has
/// the other. A socket with a path would be out of reach for a QEMU without root's rights.
fn preload(command: &mut Command, library: &Path, directory: &VmDirectory) -> io::Result<()> {
    let (qemus, librarys) = UnixStream::pair()?;
    let qemus = session::pass(command, qemus.into());
    let librarys = session::pass(command, librarys.into());
    // The entries of this process's own variable follow.
    let mut preloaded = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|v| !v.is_empty()) {
        preloaded.push(":");
        preloaded.push(others);
    }
    command
        .args(["-chardev", &format!("socket,id=library,fd={qemus}")])
        .args(["-mon", "chardev=library,mode=control"])
        .env("LD_PRELOAD", preloaded)
        .env(SOCKET_VARIABLE, directory.library())
        .env(MONITOR_VARIABLE, librarys.to_string());
    Ok(())
}

/// Returns the end of QEMU's log of a VM: at most 4 KiB, as text.
pub fn log_tail(directory: &VmDirectory) -> String {
    let tail = file_end(&directory.qemu_log(), LOG_TAIL).unwrap_or_default();
    String::from_utf8_lossy(&tail).trim().to_owned()
}

/// Returns the last bytes of a file, at most `most`. A QEMU that its guest controls can give its
/// log any length.
pub fn file_end(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
    let mut end = Vec::new();
    file.take(most).read_to_end(&mut end)?;
    Ok(end)
}

/// Returns the last line of QEMU's log if it explains why QEMU ended by itself, such as a failed
/// assertion. `None` if the line is older than 10 s, or if a signal ended QEMU.
pub fn last_words(directory: &VmDirectory) -> Option<String> {
    let written = fs::metadata(directory.qemu_log()).ok()?.modified().ok()?;
    let is_of_the_end = written.elapsed().is_ok_and(|age| age < LAST_WORDS);
    let tail = log_tail(directory);
    let last = tail.lines().last()?;
    (is_of_the_end && !last.contains("terminating on signal")).then(|| last.to_owned())
}

fn overlay_error(disk: &DiskSpec, error: &dyn std::fmt::Display) -> LaunchError {
    LaunchError::Overlay {
        disk: disk.path.clone(),
        why: error.to_string(),
    }
}

/// Returns the path for a temporary overlay.
fn overlay_place(disk: &DiskSpec, number: usize, name: &str) -> Result<PathBuf, LaunchError> {
    let place = overlay::directory().map_err(|error| overlay_error(disk, &error))?;
    let unique = overlay::unique();
    Ok(place.join(format!("memfold-{name}-{number}-{unique:x}.qcow2")))
}

/// Creates an overlay over a disk.
fn make_overlay(disk: &DiskSpec, overlay: &Path) -> Result<(), LaunchError> {
    let backing = Backing {
        file: &disk.path,
        format: disk.format().driver(),
        virtual_bytes: disk.streamed.as_ref().map(|of| of.virtual_bytes),
    };
    let path = overlay.display();
    overlay::create(overlay, &backing)
        .map_err(|error| overlay_error(disk, &format_args!("{path}: {error}")))
}

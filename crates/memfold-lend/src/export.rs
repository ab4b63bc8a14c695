//! The export of one lease: an nbdkit process that holds the lease's bytes in its memory and serves
//! them.
//!
//! Each lease has its own process, with nbdkit's `data` plugin and these options:
//! - The memory is private to the process. No other borrower's server can reach the memory, and
//!   none of it is in a file system. When the process ends, the kernel clears the pages before
//!   their next use.
//! - `allocator=malloc,mlock=true`, and one byte written at the very end, make nbdkit allocate and
//!   lock all memory before the first client connects. So a lender that is short of memory fails to
//!   start the export, later writes never fail for lack of memory, and nothing is swapped.
//! - `limit` and `exitlast` (order: see [`FILTERS`]) allow one connection and never a second.
//!   QEMU's client reconnects by itself, and writes that went only to the other copy meanwhile
//!   would be missing in this export. An export ends with its connection.
//!
//! Over TCP, the export uses TLS with a pre-shared key, which the registry gives to the borrower
//! only (TLS-PSK has no certificate that could expire). The export listens on the lender's
//! configured address. The borrower is told this address, or the address of a forwarder in between.
//!
//! For iSCSI, the export's process is a tgtd instead; [`iscsi`](super::iscsi) describes it.
//!
//! Zeroed or trimmed blocks stay allocated (nbdkit's `common/allocators/malloc.c` fills them with
//! zeroes), so that a later write needs no new memory.

use std::fs::{File, Permissions};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfold_vm::Process;
use memfold_vm::process::is_stopped;
use rustix::pipe::{PipeFlags, pipe_with};

use super::connection;
use super::endpoint::{Address, Endpoint, Key, Transport};
use super::iscsi::target;
use super::lease::LeaseId;

pub use super::listen::{Listen, TcpListen};

/// Time limit for nbdkit to allocate and lock its memory, for each GiB. The whole limit is at least
/// [`START_LEAST`].
const START_PER_GIB: Duration = Duration::from_secs(5);
const START_LEAST: Duration = Duration::from_secs(10);

/// Number of bytes at the end of nbdkit's output that an error message repeats.
const LOG_TAIL: usize = 2048;

/// Maximum number of bytes of nbdkit's output that are kept. The output needs a limit, because any
/// stranger who connects can make nbdkit log a line.
const LOG_LIMIT: u64 = 128 << 10;

/// nbdkit filters, the outermost first. The outermost filter is notified first when the client
/// disconnects: `exitlast` ends the whole server before `limit` would let another client in.
const FILTERS: [&str; 2] = ["exitlast", "limit"];

/// Shell script that starts nbdkit. The script passes a listening socket as systemd does
/// (descriptor 3, with the process number of nbdkit). A second shell waits for the end of a pipe
/// (descriptor 4) whose other end the daemon holds. When the daemon ends for any reason, the second
/// shell kills nbdkit. nbdkit's own `--exit-with-parent` is not enough, because it lets a silent
/// client stay connected. A death signal (`PR_SET_PDEATHSIG`) does not help either, because nbdkit
/// resets it at start. The second shell ends with nbdkit, and acts only while nbdkit is its parent,
/// so the process number cannot belong to another process. When the host runs out of memory, the
/// kernel kills exports before other processes; a core dump contains no lent memory.
const SHELL: &str = r#"{ echo 1000 >/proc/self/oom_score_adj; echo 0 >/proc/self/coredump_filter; } 2>/dev/null
exec 3<&0 4<&1 </dev/null 1>&2
setpriv --pdeathsig KILL /bin/sh -c '[ "$PPID" = "$1" ] || exit; read -r _ <&4; kill -KILL "$1"' watch $$ 3<&- >/dev/null 2>&1 &
LISTEN_FDS=1 LISTEN_PID=$$ exec nbdkit "$@" 4<&-"#;

/// Reason why a lease could not be exported. No process or file of the export is left after the
/// error.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The program nbdkit is not installed.
    #[error("cannot start nbdkit: {0}; install it (apt install nbdkit, or make setup)")]
    Missing(#[source] io::Error),
    /// A file or a socket cannot be created.
    #[error("cannot use {path}")]
    Files {
        /// Path of the file, or address of the socket.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// nbdkit ended before it was ready, or took too long to become ready.
    #[error("nbdkit did not start to export {bytes} bytes ({what}); nbdkit's output: {output}")]
    Start {
        /// Number of bytes that nbdkit had to export.
        bytes: u64,
        /// Exit status of nbdkit, or how many bytes were locked at the time limit.
        what: String,
        /// The end of nbdkit's output.
        output: String,
    },
}

/// A running export. The export ends when this value is dropped, when the daemon ends, and when the
/// *thread* that started it ends, because nbdkit sets `PR_SET_PDEATHSIG`, which refers to the
/// thread.
#[derive(Debug)]
pub struct Export {
    child: Child,
    /// The daemon's end of the pipe; its closing tells the shell that the daemon has ended.
    #[allow(dead_code)] // held
    alive: OwnedFd,
    files: Vec<PathBuf>,
    endpoint: Endpoint,
    bytes: u64,
    log: PathBuf,
    /// For iSCSI, the files of the helper process `target`, and tgtd itself once the export is
    /// ready.
    iscsi: Option<(target::Files, Option<Process>)>,
    /// Time by which the export must be ready.
    deadline: Instant,
    stopped_looks: u32,
    /// Number of bytes of the log that have been read.
    heard: u64,
}

/// State of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// The export's process serves a client or waits for one.
    Serving,
    /// The export's process has ended: its client disconnected, or somebody killed the process.
    Ended,
    /// The export's process is stopped (`SIGSTOP`, a debugger), so its client waits.
    Stopped,
}

impl Export {
    /// Starts to export `bytes` of new, locked memory; [`is_ready`](Self::is_ready) tells when the
    /// export is ready. The export's files are created in `directory`. The connection ends when the
    /// borrower's host does not answer for `patience`.
    ///
    /// # Errors
    /// Fails if nbdkit or tgtd cannot be started, or a file or socket cannot be created.
    pub fn start(
        directory: &Path,
        listen: Listen,
        id: LeaseId,
        bytes: u64,
        patience: Duration,
    ) -> Result<Self, ExportError> {
        let mut files = Vec::new();
        let started = start(directory, listen, id, (bytes, patience), &mut files);
        if started.is_err() {
            remove(&files);
        }
        let Started {
            child,
            alive,
            endpoint,
            log,
            iscsi,
        } = started?;
        let gib = u32::try_from(bytes >> 30).unwrap_or(u32::MAX);
        let patience = START_PER_GIB.saturating_mul(gib).max(START_LEAST);
        Ok(Self {
            child,
            alive,
            files,
            endpoint,
            bytes,
            log,
            iscsi: iscsi.map(|files| (files, None)),
            deadline: Instant::now() + patience,
            stopped_looks: 0,
            heard: 0,
        })
    }

    /// Returns whether all memory is allocated and locked. nbdkit accepts no client before. `VmLck`
    /// in `/proc/PID/status` shows the locked memory without using nbdkit's only connection.
    ///
    /// # Errors
    /// Fails if the export ended or took too long; then it never becomes ready, and must be
    /// dropped.
    pub fn is_ready(&mut self) -> Result<bool, ExportError> {
        let locked = locked_bytes(self.child.id());
        let what = match self.child.try_wait() {
            Ok(Some(status)) => status.to_string(),
            Err(error) => error.to_string(),
            Ok(None) if locked >= self.bytes && self.is_served()? => return Ok(true),
            Ok(None) if Instant::now() < self.deadline => return Ok(false),
            Ok(None) => format!("{locked} of them locked in time"),
        };
        Err(ExportError::Start {
            bytes: self.bytes,
            what,
            output: tail(&self.log),
        })
    }

    /// Returns whether a server accepts the borrower. nbdkit does so as soon as its memory is
    /// locked; for iSCSI, this function looks for the tgtd.
    fn is_served(&mut self) -> Result<bool, ExportError> {
        let Some((files, server)) = &mut self.iscsi else {
            return Ok(true);
        };
        if server.is_none() {
            *server = target::ready(files).map_err(|error| ExportError::Start {
                bytes: self.bytes,
                what: error.to_string(),
                output: tail(&self.log),
            })?;
        }
        Ok(server.is_some())
    }

    /// Returns how many connections broke off or were refused since the last call.
    pub fn refused(&mut self) -> u64 {
        use std::io::{Seek, SeekFrom};

        let Ok(mut log) = File::options().read(true).write(true).open(&self.log) else {
            return 0;
        };
        let mut said = Vec::new();
        // If the log cannot be read, no connections are counted.
        let read = log.seek(SeekFrom::Start(self.heard)).and_then(|_| {
            let mut log = (&log).take(LOG_LIMIT);
            log.read_to_end(&mut said)
        });
        self.heard += read.unwrap_or(0) as u64;
        if self.heard >= LOG_LIMIT && log.set_len(0).is_ok() {
            self.heard = 0;
        }
        let lines = said.split(|byte| *byte == b'\n');
        let is_error = |line: &&[u8]| line.windows(7).any(|word| word == b" error:");
        lines.filter(is_error).count() as u64
    }

    /// Returns address, protocol and key for the borrower.
    #[must_use]
    pub const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the size of the export in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the process number of nbdkit, or of the helper process `target`.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills the export's process and waits for at most `patience` until the memory is free.
    /// Returns whether the memory is free.
    pub fn kill(&mut self, patience: Duration) -> bool {
        // The call fails only for a child that has ended. SIGKILL also ends a stopped process.
        let _ = self.child.kill();
        let end = Instant::now() + patience;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.end_server(end.saturating_duration_since(Instant::now()))
    }

    /// Waits for the end of tgtd, which holds the memory open. Returns whether tgtd has ended.
    fn end_server(&self, patience: Duration) -> bool {
        let Some((_, Some(server))) = &self.iscsi else {
            return true;
        };
        // The call fails only if the process has ended.
        let _ = server.kill();
        server.wait_exit(patience).unwrap_or(true)
    }

    /// Returns the state of the export now.
    pub fn health(&mut self) -> Health {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return Health::Ended;
        }
        // A single stop may be a short one by a debugger, so two checks in a row must find the
        // process stopped.
        self.stopped_looks = if is_stopped(self.child.id()) {
            self.stopped_looks + 1
        } else {
            0
        };
        if self.stopped_looks >= 2 {
            Health::Stopped
        } else {
            Health::Serving
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // The call fails only for a child that has ended. SIGKILL also ends a stopped process.
        let _ = self.child.kill();
        // The child's memory may be in use until the child is reaped.
        let _ = self.child.wait();
        self.end_server(START_LEAST);
        remove(&self.files);
    }
}

fn remove(files: &[PathBuf]) {
    for file in files {
        if let Err(error) = std::fs::remove_file(file) {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(file = %file.display(), %error, "cannot remove a file of an ended export; remove the file by hand");
            }
        }
    }
}

/// Parts of an export that was just started.
struct Started {
    child: Child,
    alive: OwnedFd,
    endpoint: Endpoint,
    log: PathBuf,
    iscsi: Option<target::Files>,
}

fn listen_here(path: PathBuf) -> Result<(OwnedFd, Endpoint), ExportError> {
    let socket = UnixListener::bind(&path).map_err(failed(&path))?;
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).map_err(failed(&path))?;
    let endpoint = Endpoint {
        address: Address::Unix(path),
        key: None,
        transport: Transport::Nbd,
    };
    Ok((socket.into(), endpoint))
}

fn listen_with_key(
    tcp: TcpListen,
    id: LeaseId,
    patience: Duration,
    keys: &Path,
) -> Result<(OwnedFd, Endpoint), ExportError> {
    let named = PathBuf::from(tcp.ip.to_string());
    let socket = tcp.bind().map_err(failed(&named))?;
    // Accepted connections inherit the timeout from the socket, so the export of a borrower that
    // was cut off ends.
    connection::keep_alive(&socket, patience).map_err(failed(&named))?;
    let port = socket.local_addr().map_err(failed(&named))?.port();
    let key = new_key(id).map_err(failed(Path::new("/dev/urandom")))?;
    write_key(keys, &key).map_err(failed(keys))?;
    Ok((socket.into(), tcp.endpoint(port, key, Transport::Nbd)))
}

fn start(
    directory: &Path,
    listen: Listen,
    id: LeaseId,
    (bytes, patience): (u64, Duration),
    files: &mut Vec<PathBuf>,
) -> Result<Started, ExportError> {
    let mut place = |name: &str| {
        let path = directory.join(format!("{id}.{name}"));
        files.push(path.clone());
        path
    };
    let (log_path, socket_path, keys_path) = (place("log"), place("sock"), place("psk"));
    remove(std::slice::from_ref(&socket_path));
    remove(std::slice::from_ref(&log_path));
    // The log is opened for appending, so that it can be truncated.
    let log = File::options()
        .append(true)
        .create_new(true)
        .open(&log_path)
        .map_err(failed(&log_path))?;
    if let Listen::Iscsi(tcp) = listen {
        let iscsi = target::Files {
            key: keys_path,
            socket: directory.join(format!("{id}.tgt")),
            ready: place("ready"),
        };
        files.extend(iscsi.all());
        return start_iscsi(tcp, id, bytes, log, log_path, iscsi);
    }
    let mut tls = Vec::new();
    let (socket, endpoint): (OwnedFd, _) = match listen {
        Listen::Unix => listen_here(socket_path)?,
        Listen::Tcp(tcp) | Listen::Iscsi(tcp) => {
            tls.push("--tls=require".to_owned());
            tls.push(format!("--tls-psk={}", keys_path.display()));
            listen_with_key(tcp, id, patience, &keys_path)?
        }
    };
    let (ends, alive) = pipe()?;
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", SHELL, "nbdkit"])
        .args(["--foreground", "--log=stderr"])
        .args(FILTERS.map(|filter| format!("--filter={filter}")))
        .args(tls)
        .arg("data")
        .arg(format!("data=@{} 0", bytes.saturating_sub(1)))
        .arg(format!("size={bytes}"))
        .args(["allocator=malloc,mlock=true", "limit=1"])
        .current_dir("/")
        // These variables belong to the daemon, not to an export (sd_notify(3)).
        .env_remove("NOTIFY_SOCKET")
        .env_remove("WATCHDOG_USEC")
        .env_remove("WATCHDOG_PID")
        .stdin(socket)
        .stdout(ends)
        .stderr(log);
    let child = command.spawn().map_err(ExportError::Missing)?;
    Ok(Started {
        child,
        alive,
        endpoint,
        log: log_path,
        iscsi: None,
    })
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> ExportError {
    let path = path.to_owned();
    move |source| ExportError::Files { path, source }
}

/// Creates a pipe. Returns the end for the child, which notices when the daemon ends, and the end
/// that the daemon holds.
fn pipe() -> Result<(OwnedFd, OwnedFd), ExportError> {
    pipe_with(PipeFlags::CLOEXEC).map_err(|error| failed(Path::new("a pipe"))(error.into()))
}

fn start_iscsi(
    tcp: TcpListen,
    id: LeaseId,
    bytes: u64,
    log: File,
    log_path: PathBuf,
    files: target::Files,
) -> Result<Started, ExportError> {
    let named = PathBuf::from(tcp.ip.to_string());
    remove(&files.all());
    // tgtd binds the port itself. If another process takes the port first, tgtd reports an error
    // and ends.
    let bound = tcp.bind().and_then(|socket| socket.local_addr());
    let portal = bound.map_err(failed(&named))?;
    let key = new_key(id).map_err(failed(Path::new("/dev/urandom")))?;
    write_key(&files.key, &key).map_err(failed(&files.key))?;
    let (ends, alive) = pipe()?;
    let child = target::command(bytes, portal, &files)
        .and_then(|mut command| {
            command
                .stdin(ends)
                .stdout(Stdio::null())
                .stderr(log)
                .spawn()
        })
        .map_err(failed(Path::new("the program memfold itself")))?;
    Ok(Started {
        child,
        alive,
        endpoint: tcp.endpoint(portal.port(), key, Transport::Iscsi),
        log: log_path,
        iscsi: Some(files),
    })
}

fn new_key(id: LeaseId) -> io::Result<Key> {
    use std::fmt::Write as _;
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let mut hex = String::new();
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(hex, "{byte:02x}");
    }
    Ok(Key {
        identity: format!("lease-{id}"),
        hex,
    })
}

/// Writes a key file in the format of `GnuTLS`, readable by its owner only.
pub fn write_key(path: &Path, key: &Key) -> io::Result<()> {
    use std::io::Write as _;
    remove(&[path.to_owned()]);
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    writeln!(file, "{}:{}", key.identity, key.hex)
}

fn tail(log: &Path) -> String {
    let log = std::fs::read(log).unwrap_or_default();
    let tail = &log[log.len().saturating_sub(LOG_TAIL)..];
    String::from_utf8_lossy(tail).trim().to_owned()
}

/// Returns `VmLck` of a process in bytes; 0 if it cannot be read.
fn locked_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[cfg(test)]
#[path = "export_tests.rs"]
mod tests;

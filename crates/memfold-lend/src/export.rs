//! Exports one lease: an nbdkit process holds the lease's bytes in its memory and serves them to
//! the borrower as a network disk.
//!
//! Each lease has its own process, with nbdkit's `data` plugin and these options:
//! - The memory is private to the process: no process of another lease can reach it, and it is in
//!   no file system. When the process ends, the kernel clears the pages before their next use.
//! - `allocator=malloc,mlock=true`, and one byte written at the very end, make nbdkit allocate and
//!   lock all memory before the first client connects. So a lender that is short of memory fails to
//!   start the export, later writes never fail for lack of memory, and nothing is swapped.
//! - `limit` and `exitlast` (order: see [`FILTERS`]) allow one connection and never a second.
//!   QEMU's client would reconnect by itself. Writes that went only to the other copy of the swap
//!   disk meanwhile would then be missing in this export. So an export ends with its connection.
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
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use memfold_vm::Process;
use memfold_vm::process::is_stopped;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, kill_process};

use super::endpoint::{Endpoint, Key, Promised, Transport};
use super::files::{self, Removed};
use super::iscsi::target;
use super::lease::LeaseId;
use super::{child, connection};

pub use super::endpoint::{Listen, TcpListen};

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

/// Reason why a lease could not be exported. After the error, no process or file of the export is
/// left.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The program nbdkit is not installed.
    #[error("cannot start nbdkit: {0}; install it (apt install nbdkit, or make setup)")]
    Missing(#[source] io::Error),
    /// A file or a socket of the export cannot be created.
    #[error("cannot create {path} for an export (server of lent memory)")]
    Files {
        /// Path of the export's file, or address of its socket.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// nbdkit ended before it was ready, or took too long to become ready.
    #[error("nbdkit did not start to export {bytes} bytes ({what}); nbdkit's output: {output}")]
    Start {
        /// Size of the lease that nbdkit had to export, in bytes.
        bytes: u64,
        /// Exit status of nbdkit, or how many bytes were locked at the time limit.
        what: String,
        /// The end of nbdkit's output.
        output: String,
    },
}

/// The running process that serves a lease's RAM. The process ends when this value is dropped, when
/// the daemon ends, and when the *thread* that started it ends, because nbdkit sets
/// `PR_SET_PDEATHSIG`, which refers to the thread.
#[derive(Debug)]
pub struct Export {
    child: Child,
    /// The daemon's end of the pipe; its closing tells the child that the daemon has ended.
    #[allow(dead_code)] // held
    alive: OwnedFd,
    /// Address, protocol and key for the borrower.
    pub(super) endpoint: Endpoint,
    pub(super) bytes: u64,
    log: PathBuf,
    /// For iSCSI, the files of the helper process `target`, and tgtd itself once the export is
    /// ready.
    iscsi: Option<(target::Files, Option<Process>)>,
    /// For iSCSI, the port of tgtd.
    _port: Option<Promised>,
    /// Time by which the export must be ready.
    deadline: Instant,
    stopped_looks: u32,
    /// Number of bytes of the log that have been read.
    heard: u64,
    /// The export's files, which are removed after its processes have ended.
    #[allow(dead_code)] // held
    files: Removed,
}

/// Whether the process of an export still serves its lease.
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
    /// Starts a process that serves `bytes` bytes of new, locked memory for lease `id`.
    /// [`is_ready`](Self::is_ready) tells when the process is ready. Its files are created in
    /// `directory`. Over NBD with TLS, the connection ends when the borrower's host does not answer
    /// for [`LAST_PATIENCE`](connection::LAST_PATIENCE): a borrower that has another copy now may
    /// lose it, and this memory is then its only one.
    ///
    /// # Errors
    /// Fails if nbdkit or tgtd cannot be started, or a file or socket cannot be created.
    pub fn start(
        directory: &Path,
        listen: Listen,
        id: LeaseId,
        bytes: u64,
    ) -> Result<Self, ExportError> {
        let place = |name: &str| directory.join(format!("{id}.{name}"));
        let (log_file, socket, key_file) = (place("log"), place("sock"), place("psk"));
        let mut files = vec![log_file.clone(), socket.clone(), key_file.clone()];
        let iscsi = target::Files {
            key: key_file.clone(),
            socket: place("tgt"),
            ready: place("ready"),
        };
        if matches!(listen, Listen::Iscsi(_)) {
            files.extend(iscsi.all());
        }
        let files = Removed(files);
        files.remove();
        // The log is opened for appending, so that it can be truncated.
        let mut options = File::options();
        let log = options.append(true).create_new(true).open(&log_file);
        let log = log.map_err(failed(&log_file))?;
        let pipe = pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from);
        let (theirs, alive) = pipe.map_err(failed("a pipe"))?;
        let (mut server, mut port) = (None, None);
        let (endpoint, child) = match listen {
            Listen::Unix => {
                let listener = UnixListener::bind(&socket).map_err(failed(&socket))?;
                let private = Permissions::from_mode(0o600);
                std::fs::set_permissions(&socket, private).map_err(failed(&socket))?;
                let child = nbdkit(bytes, &[], listener.into(), theirs, log)?;
                (Endpoint::unix(socket), child)
            }
            Listen::Tcp(tcp) => {
                let (listener, address) = bound(tcp)?;
                // Accepted connections inherit the timeout from the socket, so the export of a
                // borrower that was cut off ends.
                connection::keep_alive(&listener, connection::LAST_PATIENCE)
                    .map_err(failed(tcp.ip.to_string()))?;
                let endpoint =
                    tcp.endpoint(address.port(), new_key(id, &key_file)?, Transport::Nbd);
                let keys = format!("--tls-psk={}", key_file.display());
                let tls = ["--tls=require", &keys];
                (endpoint, nbdkit(bytes, &tls, listener.into(), theirs, log)?)
            }
            Listen::Iscsi(tcp) => {
                // tgtd binds the port itself. If another process takes the port first, tgtd reports
                // an error and ends.
                let promised = tcp.promise().map_err(failed(tcp.ip.to_string()))?;
                let portal = promised.0;
                let key = new_key(id, &key_file)?;
                let child = target::command(bytes, portal, &iscsi)
                    .and_then(|mut command| command.stdin(theirs).stderr(log).spawn())
                    .map_err(failed("the program memfold itself"))?;
                server = Some((iscsi, None));
                port = Some(promised);
                (tcp.endpoint(portal.port(), key, Transport::Iscsi), child)
            }
        };
        let gib = u32::try_from(bytes >> 30).unwrap_or(u32::MAX);
        let limit = START_PER_GIB.saturating_mul(gib).max(START_LEAST);
        Ok(Self {
            child,
            alive,
            endpoint,
            bytes,
            log: log_file,
            iscsi: server,
            _port: port,
            deadline: Instant::now() + limit,
            stopped_looks: 0,
            heard: 0,
            files,
        })
    }

    /// Returns whether the export's memory is allocated and locked, and clients are accepted.
    /// `VmLck` in `/proc/PID/status` shows the locked memory without using nbdkit's only
    /// connection.
    ///
    /// # Errors
    /// Fails if the export's process ended or took too long. The export then never becomes ready
    /// and must be dropped.
    pub fn is_ready(&mut self) -> Result<bool, ExportError> {
        let locked = locked_bytes(self.child.id());
        let what = match self.child.try_wait() {
            Ok(Some(status)) => status.to_string(),
            Err(error) => error.to_string(),
            Ok(None) if locked >= self.bytes && self.is_served()? => return Ok(true),
            Ok(None) if Instant::now() < self.deadline => return Ok(false),
            Ok(None) => format!("{locked} of them locked in time"),
        };
        Err(self.not_started(what))
    }

    fn not_started(&self, what: String) -> ExportError {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let tail = &log[log.len().saturating_sub(LOG_TAIL)..];
        ExportError::Start {
            bytes: self.bytes,
            what,
            output: String::from_utf8_lossy(tail).trim().to_owned(),
        }
    }

    /// Returns whether a server accepts the borrower. nbdkit does so as soon as its memory is
    /// locked; for iSCSI, this function looks for the tgtd.
    fn is_served(&mut self) -> Result<bool, ExportError> {
        let Some((files, None)) = &self.iscsi else {
            return Ok(true);
        };
        let server = target::ready(files).map_err(|error| self.not_started(error.to_string()))?;
        let is_there = server.is_some();
        if let Some((_, known)) = &mut self.iscsi {
            *known = server;
        }
        Ok(is_there)
    }

    /// Returns how many connections to the export broke off or were refused since the last call.
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

    /// Returns the ID of the export's process: nbdkit, or for iSCSI the helper process `target`.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Resumes the export's process after `SIGSTOP`. A debugger may keep the process stopped.
    pub fn resume(&self) {
        // The call fails only for a process that has ended.
        let _ = kill_process(Pid::from_child(&self.child), Signal::CONT);
    }

    /// Kills the export's process and waits for at most `patience` until its memory is free.
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

    /// Returns whether the export's process still serves the lease. A process counts as stopped
    /// when two calls in a row find it stopped.
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
    }
}

fn failed(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> ExportError {
    let path = path.into();
    move |source| ExportError::Files { path, source }
}

fn bound(tcp: TcpListen) -> Result<(TcpListener, SocketAddr), ExportError> {
    let bound = tcp.bind().and_then(|listener| {
        let address = listener.local_addr()?;
        Ok((listener, address))
    });
    bound.map_err(failed(tcp.ip.to_string()))
}

/// Starts nbdkit, which accepts a client at `listener`, and which ends with the other end of the
/// pipe `theirs`.
fn nbdkit(
    bytes: u64,
    tls: &[&str],
    listener: OwnedFd,
    theirs: OwnedFd,
    log: File,
) -> Result<Child, ExportError> {
    child::command("/bin/sh")
        .args(["-c", SHELL, "nbdkit"])
        .args(["--foreground", "--log=stderr"])
        .args(FILTERS.map(|filter| format!("--filter={filter}")))
        .args(tls)
        .arg("data")
        .arg(format!("data=@{} 0", bytes.saturating_sub(1)))
        .arg(format!("size={bytes}"))
        .args(["allocator=malloc,mlock=true", "limit=1"])
        .stdin(listener)
        .stdout(theirs)
        .stderr(log)
        .spawn()
        .map_err(ExportError::Missing)
}

/// Makes the key of a lease and writes it to a file.
fn new_key(id: LeaseId, file: &Path) -> Result<Key, ExportError> {
    let random: [u8; 32] = files::random().map_err(failed("/dev/urandom"))?;
    let key = Key {
        identity: format!("lease-{id}"),
        hex: files::hex(&random),
    };
    key.write(file).map_err(failed(file))?;
    Ok(key)
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

//! One lease's export: an nbdkit process that holds its bytes.
//!
//! Why a process a lease, nbdkit's `data` plugin and these filters:
//! - its memory is its own: no other tenant's server can reach it, nothing of it lies in a file
//!   system, and when it ends the kernel has the pages back, which it never hands out without
//!   clearing them;
//! - `allocator=malloc,mlock=true` and a byte written at the very end have all of it allocated and
//!   locked before the first client comes: a lender that is short of memory fails to start an
//!   export, and a write to one never fails for want of memory, nor is it swapped;
//! - `limit` and `exitlast` (in this order of closing: see [`FILTERS`]) serve one connection and no
//!   second: QEMU's client reconnects by itself, and what it had written meanwhile to the other
//!   copy alone would be missing here. An export that was left is gone.
//!
//! Over TCP: TLS with a key shared beforehand, which the registry tells the borrower alone
//! (TLS-PSK: no certificate that could expire). An export listens on the address that the lender
//! was given and announces that one, or another if there is a forwarder between.
//!
//! By iSCSI it is a tgtd instead, and [`iscsi`](super::iscsi) tells what does all that there.
//!
//! What is zeroed or trimmed stays allocated (nbdkit's `common/allocators/malloc.c` fills it with
//! zeroes), so that a later write needs nothing.

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

/// How long nbdkit may take to allocate and lock its memory, for each GiB and at least.
const START_PER_GIB: Duration = Duration::from_secs(5);
const START_LEAST: Duration = Duration::from_secs(10);

/// Bytes of nbdkit's output that an error repeats.
const LOG_TAIL: usize = 2048;

/// Most bytes of nbdkit's output that are kept: strangers could have it say something with each
/// connection.
const LOG_LIMIT: u64 = 128 << 10;

/// From the client inwards. When the client goes, the outermost hears of it first: `exitlast` has
/// the whole server end before `limit` would let another one in.
const FILTERS: [&str; 2] = ["exitlast", "limit"];

/// What nbdkit is started by. It takes a socket that listens already, as systemd passes one
/// (descriptor 3, and who it is for). Beside it a shell waits for the end of a pipe (descriptor 4)
/// whose other end this process holds: when this process ends, however it does, the shell kills
/// nbdkit, whose own `--exit-with-parent` lets a client that is there stay as long as it is silent.
/// nbdkit sets its death signal anew when it starts (`PR_SET_PDEATHSIG`), so that ours would not
/// stay. The shell ends with nbdkit, and acts only while that is its parent: the number can't be
/// another process's then. A host without memory ends lent memory first, and dumps none of it.
const SHELL: &str = r#"{ echo 1000 >/proc/self/oom_score_adj; echo 0 >/proc/self/coredump_filter; } 2>/dev/null
exec 3<&0 4<&1 </dev/null 1>&2
setpriv --pdeathsig KILL /bin/sh -c '[ "$PPID" = "$1" ] || exit; read -r _ <&4; kill -KILL "$1"' watch $$ 3<&- >/dev/null 2>&1 &
LISTEN_FDS=1 LISTEN_PID=$$ exec nbdkit "$@" 4<&-"#;

/// Why a lease could not be exported. Nothing is left of it then.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// nbdkit isn't there.
    #[error("cannot start nbdkit: {0}; install it (apt install nbdkit, or make setup)")]
    Missing(#[source] io::Error),
    /// Files or sockets can't be made.
    #[error("cannot use {path}")]
    Files {
        /// Which.
        path: PathBuf,
        /// From the kernel.
        #[source]
        source: io::Error,
    },
    /// nbdkit ended, or took too long.
    #[error("nbdkit did not export {bytes} bytes ({what}); it said: {output}")]
    Start {
        /// How many it was to export.
        bytes: u64,
        /// What happened.
        what: String,
        /// The end of its output.
        output: String,
    },
}

/// A running export. It ends when this is dropped, with this process, and with the *thread* that
/// started it: nbdkit sets `PR_SET_PDEATHSIG`, which means the thread.
#[derive(Debug)]
pub struct Export {
    child: Child,
    /// The end of the pipe that says that this process lives.
    #[allow(dead_code)] // held
    alive: OwnedFd,
    files: Vec<PathBuf>,
    endpoint: Endpoint,
    bytes: u64,
    log: PathBuf,
    /// By iSCSI: what its process is told by, and tgtd as soon as it is ready.
    iscsi: Option<(target::Files, Option<Process>)>,
    /// When it has to be ready.
    deadline: Instant,
    stopped_looks: u32,
    /// How far its output has been read.
    heard: u64,
}

/// What an export does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// It serves, or waits to.
    Serving,
    /// It has ended: its client has gone, or somebody killed it.
    Ended,
    /// It stands still (`SIGSTOP`, a debugger), so that its client waits.
    Stopped,
}

impl Export {
    /// Begins to export `bytes` of new, locked memory: [`is_ready`](Self::is_ready) tells when. Its
    /// files are in `directory`. A borrower's host that isn't heard of is waited for with
    /// `patience`.
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

    /// Whether all its memory is allocated and locked, which is so before it answers at all:
    /// `VmLck` tells without taking the one connection that it serves. An error: it never will;
    /// drop it.
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

    /// nbdkit answers as soon as its memory is locked; tgtd is told of it then.
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

    /// How many connections have broken off or were refused since this was asked last.
    pub fn refused(&mut self) -> u64 {
        use std::io::{Seek, SeekFrom};

        let Ok(mut log) = File::options().read(true).write(true).open(&self.log) else {
            return 0;
        };
        let mut said = Vec::new();
        // What can't be read is not counted.
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

    /// How it is reached.
    #[must_use]
    pub const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it, and waits for so long until its memory is free; whether it is.
    pub fn kill(&mut self, patience: Duration) -> bool {
        // Fails only for a child that has ended; and SIGKILL ends one that stands still too.
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

    /// tgtd ends with the process beside it, which may take a moment; whether it has. It has the
    /// memory open.
    fn end_server(&self, patience: Duration) -> bool {
        let Some((_, Some(server))) = &self.iscsi else {
            return true;
        };
        // What can't be asked for has gone.
        let _ = server.kill();
        server.wait_exit(patience).unwrap_or(true)
    }

    /// What it does now.
    pub fn health(&mut self) -> Health {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return Health::Ended;
        }
        // One look may catch a debugger's blink.
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
        // Fails only for a child that has ended; and SIGKILL ends one that stands still too.
        let _ = self.child.kill();
        // Until it is waited for its memory may be there yet.
        let _ = self.child.wait();
        self.end_server(START_LEAST);
        remove(&self.files);
    }
}

fn remove(files: &[PathBuf]) {
    for file in files {
        if let Err(error) = std::fs::remove_file(file) {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(file = %file.display(), %error, "cannot remove an export's file; remove it by hand");
            }
        }
    }
}

/// What has begun.
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
    // The connection has it from the socket: a borrower that was cut off doesn't keep its export.
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
    // Written to at its end, so that it can be emptied.
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
        // The daemon's, not an export's (sd_notify(3)).
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

/// What a child hears of this process's end by, and the end to hold.
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
    // tgtd binds it itself. If another takes it meanwhile, tgtd says so and ends.
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
        // Writing to a String can't fail.
        let _ = write!(hex, "{byte:02x}");
    }
    Ok(Key {
        identity: format!("lease-{id}"),
        hex,
    })
}

/// Writes a key as `GnuTLS` reads it, for its owner alone.
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

/// `VmLck` of a process, 0 if it can't be read.
fn locked_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[cfg(test)]
#[path = "export_tests.rs"]
mod tests;

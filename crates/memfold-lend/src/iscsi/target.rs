//! The process on the lending host that serves one lease by iSCSI. It allocates the lease's memory
//! and starts tgtd, an iSCSI target, which serves this memory. Both processes end when tgtd's first
//! session ends, when the daemon ends, or when somebody stops tgtd (`SIGSTOP`).

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfold_host::private_memory;
use memfold_sys::locked::LockedFile;
use memfold_vm::process::is_stopped;
use memfold_vm::{Identity, Process};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::Pid;

use super::tgt::{CONTROL, Tgt};
use super::{LOOK, at, ends_with_us, process};
use crate::child::Owned;
use crate::connection::Wire;
use crate::endpoint::Key;
use crate::files;
use crate::pressure::Sample;

/// Time limit for tgtd to start.
const START: Duration = Duration::from_secs(10);

/// Time between two polls while there is no session. A second session could begin in this time.
const FIRST: Duration = Duration::from_millis(20);

/// Number of bytes of the host's memory that must stay available.
const LEAVE: u64 = 64 << 20;

/// Paths of the files of one lease that is served by iSCSI.
#[derive(Clone, Debug)]
pub struct Files {
    /// Path of the file with the lease's key, which the borrower sends to log in (CHAP).
    pub key: PathBuf,
    /// Beginning of the path of tgtd's control socket (`TGT_IPC_SOCKET`).
    pub socket: PathBuf,
    /// Path of the file that contains tgtd's [`Identity`]. It is written when tgtd serves the
    /// lease.
    pub ready: PathBuf,
}

impl Files {
    /// Returns the paths of all files of the lease's target that may exist.
    #[must_use]
    pub fn all(&self) -> Vec<PathBuf> {
        let control = Tgt::at(&self.socket).socket;
        vec![
            self.key.clone(),
            self.ready.clone(),
            self.ready.with_extension("part"),
            control.with_extension(format!("{CONTROL}.lock")),
            control,
        ]
    }
}

/// Returns the command that starts the helper process `target` for a lease of `bytes` bytes at the
/// address `portal`. Its standard input must be the end of a pipe that stays open as long as the
/// daemon lives.
pub fn command(bytes: u64, portal: SocketAddr, files: &Files) -> io::Result<Command> {
    let mut command = process("target")?;
    let (key, socket, ready) = (&files.key, &files.socket, &files.ready);
    for (option, file) in [("--key", key), ("--socket", socket), ("--ready", ready)] {
        command.arg(option).arg(file);
    }
    let (bytes, portal) = (bytes.to_string(), portal.to_string());
    command.args(["--bytes", &bytes, "--portal", &portal]);
    command.stdout(Stdio::null());
    Ok(command)
}

/// Returns the tgtd that serves a lease; `None` until tgtd is ready.
pub fn ready(files: &Files) -> io::Result<Option<Process>> {
    let Ok(text) = std::fs::read(&files.ready) else {
        return Ok(None);
    };
    Process::open(serde_json::from_slice::<Identity>(&text)?).map(Some)
}

/// Runs the helper process `target`: serves `bytes` bytes at the address `portal` until the first
/// session ends. Messages go to standard error.
pub fn serve(bytes: u64, portal: SocketAddr, files: &Files) -> io::Result<()> {
    private_memory::protect_with_children().map_err(at("core dumps"))?;
    let key = Key::read(&files.key).map_err(at("its key"))?;
    let memory = allocate(bytes)?;
    let mut process = Owned(start_tgtd(portal, files, &memory)?);
    let tgt = Tgt::at(&files.socket);
    let deadline = Instant::now() + START;
    while !tgt.is_there() {
        if let Some(status) = process.0.try_wait()? {
            return Err(io::Error::other(format!("tgtd has ended ({status})")));
        }
        if Instant::now() > deadline {
            return Err(io::Error::other("tgtd accepts no orders"));
        }
        std::thread::sleep(FIRST);
    }
    let from = if portal.ip().is_loopback() {
        portal.ip().to_string()
    } else {
        "ALL".to_owned()
    };
    // tgtd opens the memory through its own standard input, because the memory's file has no name.
    // The serial number is random, so that no other disk has the same.
    tgt.set_up(
        &key,
        Path::new("/proc/self/fd/0"),
        &from,
        &files::hex(&files::random::<6>()?),
    )?;
    let server = Process::open(Identity::of(Pid::from_child(&process.0))?)?;
    files::write_json(&files.ready, &server.identity())?;
    watch(&mut process.0, &server, &tgt, portal)
}

fn allocate(bytes: u64) -> io::Result<LockedFile> {
    let available = Sample::glance(Path::new("/proc"))?.available_bytes;
    if available < bytes.saturating_add(LEAVE) {
        return Err(io::Error::other(format!(
            "cannot lock {bytes} bytes: {available} are available on this host"
        )));
    }
    // When the host runs out of memory, the kernel kills tgtd before the host's own VMs. Writing
    // the file may be forbidden.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    LockedFile::new("memfold-lent", bytes)
        .map_err(|error| at("cannot allocate and lock memory")(error.into()))
}

fn start_tgtd(portal: SocketAddr, files: &Files, memory: &LockedFile) -> io::Result<Child> {
    // tgtd's own pings (nop_interval) stay off: under load, tgtd misses libiscsi's answers to them
    // and ends healthy sessions.
    let options = format!("portal={portal}");
    ends_with_us("tgtd")
        .args(["--foreground", "--control-port", CONTROL])
        .args(["--nr_iothreads", "4", "--iscsi", &options])
        .env("TGT_IPC_SOCKET", &files.socket)
        .stdin(Stdio::from(memory.as_fd().try_clone_to_owned()?))
        .stdout(Stdio::null())
        .spawn()
        .map_err(at("cannot start tgtd; install it (apt install tgt)"))
}

fn watch(child: &mut Child, server: &Process, tgt: &Tgt, portal: SocketAddr) -> io::Result<()> {
    let input = io::stdin();
    let mut wires = Vec::new();
    let mut is_taken = false;
    let mut stopped = 0;
    loop {
        let patience = if is_taken { LOOK } else { FIRST };
        let mut fds = vec![PollFd::new(&input, PollFlags::IN)];
        fds.extend(wires.iter().map(Wire::poll_end));
        let limit = Timespec::try_from(patience).map_err(io::Error::other)?;
        retry_on_intr(|| poll(&mut fds, Some(&limit)))?;
        let daemon_has_ended = !fds[0].revents().is_empty();
        let broken = fds[1..].iter().any(|fd| !fd.revents().is_empty());
        drop(fds);
        if daemon_has_ended {
            return Ok(());
        }
        if let Some(status) = child.try_wait()? {
            return Err(io::Error::other(format!("tgtd has ended ({status})")));
        }
        stopped = if is_stopped(child.id()) {
            stopped + 1
        } else {
            0
        };
        if stopped >= 2 {
            return Err(io::Error::other("tgtd is stopped"));
        }
        if stopped > 0 {
            // A stopped tgtd would not answer.
            continue;
        }
        if !is_taken && tgt.has_session()? {
            // There must be only one session, so tgtd stops listening.
            tgt.close(portal)?;
            is_taken = true;
        } else if is_taken && (broken || wires.is_empty()) && !tgt.has_session()? {
            memfold_host::say!("the borrower's session has ended");
            return Ok(());
        } else if broken {
            // The connection of a stranger ended, or tgtd has not yet noticed the end of the
            // session.
            std::thread::sleep(FIRST);
        }
        if is_taken && (broken || wires.is_empty()) {
            wires = Wire::served_by(server, portal)?;
            wires.retain(|wire| !wire.is_cut());
        }
    }
}

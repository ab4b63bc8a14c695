//! The daemon's side of a relay: starts it, finds it again after a restart, queries it, and ends
//! it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfold_sys::session;
use memfold_vm::process::is_stopped;
use memfold_vm::{Identity, Process};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::asks::{self, Answer, Ask};
use super::ended::Ended;
use super::orders::{Orders, Said};

/// How long a relay may take to connect to all its lenders. Each may take 3 s for each of a few
/// answers.
const READY: Duration = Duration::from_secs(10);

/// Longest thing that it says.
const MAX_SAID: usize = 4096;

/// How long one that is to end may take.
const END: Duration = Duration::from_secs(1);

/// How long a relay may take to accept who asks it.
const ASK: Duration = Duration::from_millis(500);

/// A relay that runs, or ran: kept in the VM's note, so that the next daemon finds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// Its process.
    pub process: Identity,
    /// Where its client connected. The file is gone by then.
    pub socket: PathBuf,
}

/// Why there is no relay. Nothing is left of it then.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// It can't be started.
    #[error("cannot start {program} as the relay")]
    Start {
        /// The program.
        program: PathBuf,
        /// From the kernel.
        #[source]
        source: io::Error,
    },
    /// It says that it can't.
    #[error("{why}")]
    Failed {
        /// Which lender is at fault, if one is.
        lender: Option<usize>,
        /// In words.
        why: String,
    },
}

/// Starts a relay, which writes what it has to say to `log`; gives it once it is connected to all
/// its lenders and listens.
///
/// # Errors
/// It can't be started, or a lender isn't what it should be.
pub fn start(program: &Path, orders: &Orders, log: File) -> Result<Running, RelayError> {
    let failed = |source| RelayError::Start {
        program: program.to_owned(),
        source,
    };
    // What a daemon has left that was killed before QEMU was connected.
    remove_sockets(orders);
    let mut command = Command::new(program);
    command
        .arg("relay")
        .current_dir("/")
        // The daemon's, not a relay's (sd_notify(3)).
        .env_remove("NOTIFY_SOCKET")
        .env_remove("WATCHDOG_USEC")
        .env_remove("WATCHDOG_PID")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log);
    let mut child = session::detach(&mut command).spawn().map_err(failed)?;
    let begun = instruct(&mut child, orders);
    let running = begun.and_then(|said| match said {
        Said::Ready => identity(&child).map_err(failed),
        Said::Failed { lender, why } => Err(RelayError::Failed { lender, why }),
    });
    match running {
        Ok(process) => {
            reap(child);
            Ok(Running {
                process,
                socket: orders.socket.clone(),
            })
        }
        Err(error) => {
            // Fails only for a child that has ended.
            let _ = child.kill();
            let _ = child.wait();
            remove_sockets(orders);
            Err(error)
        }
    }
}

fn remove_sockets(orders: &Orders) {
    for file in [&orders.socket, &asks::place(&orders.socket)] {
        let _ = std::fs::remove_file(file);
    }
}

fn identity(child: &Child) -> io::Result<Identity> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    Identity::of(pid.ok_or_else(|| io::Error::other("the relay has no process number"))?)
}

fn instruct(child: &mut Child, orders: &Orders) -> Result<Said, RelayError> {
    let failed = |why: String| RelayError::Failed { lender: None, why };
    let text = serde_json::to_vec(orders).map_err(|error| failed(error.to_string()))?;
    if let Some(mut input) = child.stdin.take() {
        // One that has ended already says why.
        let _ = input.write_all(&text);
    }
    let mut said = Vec::new();
    let end = Instant::now() + READY;
    if let Some(mut output) = child.stdout.take() {
        while !said.ends_with(b"\n") && said.len() < MAX_SAID {
            let left = end.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(|error| failed(error.to_string()))?;
            let mut fds = [PollFd::new(&output, PollFlags::IN)];
            match poll(&mut fds, Some(&left)) {
                Ok(0) => {
                    return Err(failed(format!(
                        "no connection to all lenders in {} s",
                        READY.as_secs()
                    )));
                }
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed(error.to_string())),
            }
            let mut some = [0; 512];
            match output.read(&mut some) {
                Ok(0) => break,
                Ok(count) => said.extend_from_slice(&some[..count]),
                Err(error) => return Err(failed(error.to_string())),
            }
        }
    }
    serde_json::from_slice(&said).map_err(|_| {
        failed(
            "the relay ended without a message; relay.log in the VM's directory may say why".into(),
        )
    })
}

/// Waits for the child's end on a thread of its own, so that it never stays a zombie while we live.
fn reap(mut child: Child) {
    let thread = std::thread::Builder::new()
        .name("reap-relay".into())
        .spawn(move || child.wait());
    if let Err(error) = thread {
        tracing::warn!(%error, "no thread to wait for a relay's end; nothing is needed");
    }
}

impl Running {
    /// Whether it stands still (`SIGSTOP`, a debugger), so that its client waits.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        let pid = self.process.pid.unsigned_abs();
        is_stopped(pid) && Process::open(self.process).is_ok()
    }

    /// Asks it something.
    ///
    /// # Errors
    /// It has ended, or is of a version that can't be asked.
    pub fn ask(&self, ask: &Ask) -> io::Result<Asked> {
        let mut stream = memfold_host::socket::connect(&asks::place(&self.socket), ASK)?;
        stream.set_nonblocking(true)?;
        let mut line = serde_json::to_vec(ask)?;
        line.push(b'\n');
        stream.write_all(&line)?;
        Ok(Asked {
            stream,
            said: Vec::new(),
        })
    }

    /// Sees to it that it has ended, whose client's connection has; how it ended, if it said so.
    #[must_use]
    pub fn end(&self) -> Option<Ended> {
        if let Ok(process) = Process::open(self.process) {
            if !process.wait_exit(END).unwrap_or(true) {
                if let Err(error) = process.kill() {
                    tracing::warn!(%error, "cannot kill an unused relay; end its process by hand");
                }
            }
        }
        let file = Ended::file(&self.socket);
        let said = std::fs::read(&file).ok();
        for file in [&file, &self.socket, &asks::place(&self.socket)] {
            match std::fs::remove_file(file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(file = %file.display(), %error, "cannot remove a relay's file; remove it by hand");
                }
                _ => {}
            }
        }
        serde_json::from_slice(&said?).ok()
    }
}

/// A question that isn't answered yet.
#[derive(Debug)]
pub struct Asked {
    stream: UnixStream,
    said: Vec<u8>,
}

impl Asked {
    /// The answer, if it is there.
    ///
    /// # Errors
    /// There will be none.
    pub fn answer(&mut self) -> io::Result<Option<Answer>> {
        let mut some = [0; 512];
        loop {
            match self.stream.read(&mut some) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.said.extend_from_slice(&some[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
            if self.said.ends_with(b"\n") || self.said.len() > MAX_SAID {
                return Ok(Some(serde_json::from_slice(&self.said)?));
            }
        }
    }
}

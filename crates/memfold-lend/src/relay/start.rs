//! The daemon's part of a relay, the process between QEMU and a lending host: starts the process,
//! finds it again after a restart of the daemon, asks it questions, and ends it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use memfold_sys::session;
use memfold_vm::process::is_stopped;
use memfold_vm::{Identity, Process};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::asks::{self, Answer, Ask};
use super::messages::{Ended, Orders, Said};
use crate::{child, files};

/// Time limit for a relay to connect to all lenders. Each lender may take 3 s for each of a few
/// answers.
const READY: Duration = Duration::from_secs(10);

/// Maximum length of the relay's answer in bytes.
const MAX_SAID: usize = 4096;

/// Time limit for a relay to end.
const END: Duration = Duration::from_secs(1);

/// Time limit for a relay to accept a question.
const ASK: Duration = Duration::from_millis(500);

/// A relay process that runs or has run. The record of the VM's swap disk contains this value, so
/// that the next daemon finds the relay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// Process ID and start time of the relay.
    pub process: Identity,
    /// Path of the socket for the relay's client. The file is removed after the client has
    /// connected.
    pub socket: PathBuf,
}

/// Reason why a relay could not be started. After the error, no process or socket of the relay is
/// left.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The program that should run as the relay cannot be started.
    #[error("cannot start {program} as the relay process between QEMU and the lender")]
    Start {
        /// Path of the program that should run as the relay.
        program: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The relay process reported why it could not start.
    #[error("{why}")]
    Failed {
        /// Number of the lender at fault, in stripe order; `None` if no lender is.
        lender: Option<usize>,
        /// Error message of the relay.
        why: String,
    },
}

/// Starts a relay process, which writes its messages to `log`. Returns when the relay listens and
/// is connected to all lenders.
///
/// # Errors
/// Fails if the relay cannot be started, or a lender cannot be reached or used.
pub fn start(program: &Path, orders: &Orders, log: File) -> Result<Running, RelayError> {
    let failed = |source| RelayError::Start {
        program: program.to_owned(),
        source,
    };
    // A daemon that was killed before QEMU connected has left sockets behind.
    remove_sockets(orders);
    let mut command = child::command(program);
    let mut child = session::detach(&mut command)
        .arg("relay")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(failed)?;
    let running = match instruct(&mut child, orders) {
        Ok(Said::Ready) => Identity::of(Pid::from_child(&child)).map_err(failed),
        Ok(Said::Failed { lender, why }) => Err(RelayError::Failed { lender, why }),
        Err(why) => Err(RelayError::Failed { lender: None, why }),
    };
    match running {
        Ok(process) => {
            if let Err(error) = child::reap(child, || ()) {
                tracing::warn!(%error, "cannot start a thread that waits for the end of a relay process (between QEMU and a lender); no action is needed");
            }
            let socket = orders.socket.clone();
            Ok(Running { process, socket })
        }
        Err(error) => {
            // The call fails only for a child that has ended.
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

fn instruct(child: &mut Child, orders: &Orders) -> Result<Said, String> {
    let text = serde_json::to_vec(orders).map_err(|error| error.to_string())?;
    let (Some(mut input), Some(mut output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err("the relay has no pipes".into());
    };
    // If the write fails, the relay has ended and reports the reason itself.
    let _ = input.write_all(&text);
    drop(input);
    let said = child::first_line(&mut output, READY).map_err(|error| match error.kind() {
        io::ErrorKind::TimedOut => {
            format!("no connection to all lenders in {} s", READY.as_secs())
        }
        _ => error.to_string(),
    })?;
    serde_json::from_slice(&said).map_err(|_| {
        "the relay ended without a message; relay.log in the VM's directory may say why".into()
    })
}

impl Running {
    /// Returns whether `SIGSTOP` or a debugger has stopped the relay process, so that its client
    /// waits.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        let pid = self.process.pid.unsigned_abs();
        is_stopped(pid) && Process::open(self.process).is_ok()
    }

    /// Resumes a relay process that `SIGSTOP` has stopped. A debugger may keep it stopped.
    ///
    /// # Errors
    /// Fails if the relay has ended.
    pub fn resume(&self) -> io::Result<()> {
        Process::open(self.process)?.resume()
    }

    /// Sends a question to the relay and does not wait for the answer.
    ///
    /// # Errors
    /// Fails if the relay has ended, or its version accepts no questions.
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

    /// Returns for how long the relay's client has waited for its oldest request to a lender.
    ///
    /// # Errors
    /// Fails if the relay does not answer within `limit`, or its version does not say it.
    pub fn waited(&self, limit: Duration) -> io::Result<Duration> {
        let mut asked = self.ask(&Ask::Waited)?;
        asked.stream.set_nonblocking(false)?;
        asked.stream.set_read_timeout(Some(limit))?;
        match asked.answer()? {
            Some(Answer::Waited(ms)) => Ok(Duration::from_millis(ms)),
            Some(other) => Err(io::Error::other(format!("{other:?}"))),
            None => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Ends a relay whose client has disconnected: waits for up to 1 s, then kills the process, and
    /// removes the relay's files. Returns the record of the relay's end, if the relay wrote one.
    #[must_use]
    pub fn end(&self) -> Option<Ended> {
        let ended = match Process::open(self.process) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(process) if process.wait_exit(END).unwrap_or(true) => Ok(()),
            Ok(process) => process.kill(),
        };
        if let Err(error) = ended {
            tracing::warn!(%error, "cannot kill an unused relay process (between QEMU and a lender); kill the process by hand");
        }
        let file = Ended::file(&self.socket);
        let said = std::fs::read(&file).ok();
        for file in [&file, &self.socket, &asks::place(&self.socket)] {
            if let Err(error) = files::remove(file) {
                tracing::warn!(file = %file.display(), %error, "cannot remove a file of an ended relay process (between QEMU and a lender); remove the file by hand");
            }
        }
        serde_json::from_slice(&said?).ok()
    }
}

/// A question that was sent to a relay, and whose answer may not have arrived yet.
#[derive(Debug)]
pub struct Asked {
    stream: UnixStream,
    said: Vec<u8>,
}

impl Asked {
    /// Returns the relay's answer; `None` if it has not arrived completely.
    ///
    /// # Errors
    /// Fails if no answer will arrive.
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

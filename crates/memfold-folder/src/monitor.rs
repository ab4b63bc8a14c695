//! Stops a VM for a moment while memfold's library in QEMU folds pages. The library has a QMP
//! connection of its own to its QEMU for this purpose.
//!
//! The daemon does not stop the VM, because it may die before it resumes the VM. The library lives
//! exactly as long as the VM.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longest wait for one answer of QEMU, shorter than the daemon's wait for a reply. `stop` first
/// drains I/O, so a slow disk delays the answer.
const PATIENCE: Duration = Duration::from_secs(4);

/// Connection to QEMU's monitor (QMP).
#[derive(Debug, Default)]
pub struct Monitor {
    /// Path of the QMP socket, for the first connection and for new connections after errors.
    /// `None` if the given connection is the only one.
    path: Option<PathBuf>,
    link: Option<Link>,
    /// Whether [`Monitor::hold`] has stopped the VM and [`Monitor::release`] has not resumed it.
    held: bool,
    /// Whether the VM still has to be resumed, because QEMU has refused every `cont`.
    is_stuck: bool,
}

impl Monitor {
    /// Creates a monitor that connects to the QMP socket at `path`, which no other client may use.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self {
            path: Some(path),
            ..Self::default()
        }
    }

    /// Creates a monitor from a connection that QEMU's monitor serves already. The connection works
    /// even after QEMU has dropped its privileges.
    pub fn connected(stream: UnixStream) -> io::Result<Self> {
        Ok(Self {
            link: Some(Link::new(stream)?),
            ..Self::default()
        })
    }

    /// Creates a monitor whose VM still has to be resumed.
    #[cfg(test)]
    pub(crate) fn stuck(stream: UnixStream) -> io::Result<Self> {
        let mut monitor = Self::connected(stream)?;
        monitor.is_stuck = true;
        Ok(monitor)
    }

    /// Stops the VM (vCPUs, and I/O after it has drained) until the returned guard is dropped.
    /// Returns `None` if the VM was not running, or is being migrated; then the library must not
    /// resume the VM. A migration that ends now would leave the VM stopped at its new place.
    pub fn stop(&mut self) -> io::Result<Option<Stopped<'_>>> {
        let status = self.ask("query-status")?;
        if status["status"] != "running" || is_migrating(&self.ask("query-migrate")?) {
            return Ok(None);
        }
        let began = Instant::now();
        // From here on the VM may be stopped, whatever QEMU answers.
        let mut stopped = Stopped {
            monitor: self,
            began,
            at_rest: began,
        };
        stopped.monitor.ask("stop")?;
        stopped.at_rest = Instant::now();
        Ok(Some(stopped))
    }

    /// Stops the VM until [`Monitor::release`]. Returns `false`, and does nothing, if the VM was
    /// not running.
    pub fn hold(&mut self) -> io::Result<bool> {
        let stopped = self.stop()?.map(std::mem::forget).is_some();
        self.held |= stopped;
        Ok(stopped)
    }

    /// Resumes the VM if [`Monitor::hold`] has stopped it. Returns whether `hold` had stopped the
    /// VM.
    pub fn release(&mut self) -> bool {
        let held = std::mem::take(&mut self.held);
        if held {
            self.go_on();
        }
        held
    }

    fn go_on(&mut self) {
        self.is_stuck = false;
        for _ in 0..100 {
            let Err(error) = self.resume_if_paused() else {
                return;
            };
            say!("memfold: QEMU's monitor did not resume the VM ({error}); retrying");
            std::thread::sleep(Duration::from_millis(100));
        }
        self.is_stuck = true;
        say!("memfold: the VM is still paused; retrying until QEMU resumes it");
    }

    pub(crate) const fn is_stuck(&self) -> bool {
        self.is_stuck
    }

    /// Resumes the VM if it is still stopped because QEMU has refused every `cont`.
    pub fn go_on_if_stuck(&mut self) {
        if self.is_stuck && self.resume_if_paused().is_ok() {
            self.is_stuck = false;
            say!("memfold: the VM runs again");
        }
    }

    /// Resumes the VM if it is paused. QEMU executes commands in order, so it answers after a
    /// `stop` that is still unanswered. In other states the VM must not run: after a migration,
    /// another QEMU runs it.
    fn resume_if_paused(&mut self) -> io::Result<()> {
        let answer = self.ask("query-status")?;
        match answer["status"].as_str() {
            Some("paused") => self.ask("cont").map(drop),
            // If the migration fails, the VM is paused again.
            Some("finish-migrate") => Err(io::Error::other("a migration of the VM ends now")),
            _ => Ok(()),
        }
    }

    /// Runs a QMP command without arguments. After an error, the next command uses a new connection
    /// if the monitor has a path.
    fn ask(&mut self, command: &str) -> io::Result<Value> {
        let mut link = match (self.link.take(), &self.path) {
            (Some(link), _) => link,
            (None, Some(path)) => Link::new(UnixStream::connect(path)?)?,
            (None, None) => return Err(io::ErrorKind::NotConnected.into()),
        };
        let answer = link.ask(command);
        if answer.is_ok() || self.path.is_none() {
            self.link = Some(link);
        }
        answer
    }
}

/// Returns whether a migration is under way, by QEMU's answer to `query-migrate`.
fn is_migrating(answer: &Value) -> bool {
    let status = answer["status"].as_str().unwrap_or("none");
    !matches!(status, "none" | "completed" | "failed" | "cancelled")
}

/// Guard of a stopped VM. Dropping the guard resumes the VM.
#[derive(Debug)]
pub struct Stopped<'a> {
    monitor: &'a mut Monitor,
    began: Instant,
    at_rest: Instant,
}

impl Stopped<'_> {
    /// Returns the time since the VM came to rest.
    #[must_use]
    pub fn since(&self) -> Duration {
        self.at_rest.elapsed()
    }

    /// Resumes the VM. Returns the time from the request to stop until the VM was resumed.
    pub fn go_on(self) -> Duration {
        let began = self.began;
        drop(self);
        began.elapsed()
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.monitor.go_on();
    }
}

/// One QMP connection. Every command has a number, so a late answer is not mistaken for the answer
/// to the next command.
#[derive(Debug)]
struct Link {
    stream: BufReader<UnixStream>,
    /// Received bytes of an incomplete line.
    line: Vec<u8>,
    is_greeted: bool,
    last_id: u64,
}

impl Link {
    fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self {
            stream: BufReader::new(stream),
            line: Vec::new(),
            is_greeted: false,
            last_id: 0,
        })
    }

    fn ask(&mut self, command: &str) -> io::Result<Value> {
        if !self.is_greeted {
            // Sent only once, because QEMU executes the command even if its answer comes too late,
            // and refuses a second one.
            self.is_greeted = true;
            self.exchange("qmp_capabilities")?;
        }
        self.exchange(command)
    }

    fn exchange(&mut self, command: &str) -> io::Result<Value> {
        self.last_id += 1;
        let id = self.last_id;
        let mut text = json!({ "execute": command, "id": id }).to_string();
        text.push('\n');
        self.stream.get_mut().write_all(text.as_bytes())?;
        loop {
            let mut answer = self.read_line()?;
            // Skip the greeting, events, and late answers to earlier commands.
            if answer["id"] != id {
                continue;
            }
            if let Some(error) = answer.get("error") {
                return Err(io::Error::other(format!("{command}: {}", error["desc"])));
            }
            return Ok(answer["return"].take());
        }
    }

    fn read_line(&mut self) -> io::Result<Value> {
        // After an error, the bytes received so far stay in `line`.
        if self.stream.read_until(b'\n', &mut self.line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let read = serde_json::from_slice(&self.line);
        self.line.clear();
        Ok(read?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_answer_of_qemus_monitor_is_not_taken_as_the_answer_to_the_next_command() {
        let (ours, mut qemu) = UnixStream::pair().unwrap();
        let mut monitor = Monitor::connected(ours).unwrap();
        let soon = Duration::from_millis(50);
        let link = monitor.link.as_mut().unwrap();
        link.stream.get_mut().set_read_timeout(Some(soon)).unwrap();
        let mut say = |text: &str| writeln!(qemu, "{text}").unwrap();
        say(r#"{"QMP": {}}"#);
        // No answer comes: first the greeting is missing, then the answer to the command.
        let error = monitor.ask("query-status").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        say(r#"{"id": 1, "return": {}}"#);
        let error = monitor.ask("query-status").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        say(r#"{"id": 2, "return": "late"}"#);
        say(r#"{"event": "RESUME"}"#);
        say(r#"{"id": 3, "return": "right"}"#);
        assert_eq!(monitor.ask("query-status").unwrap(), "right");
        say(r#"{"id": 4, "error": {"desc": "no"}}"#);
        assert!(monitor.ask("stop").unwrap_err().to_string().contains("no"));
        drop(qemu);
        assert!(monitor.ask("stop").is_err());
    }
}

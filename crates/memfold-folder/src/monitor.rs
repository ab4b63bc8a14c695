//! Stopping the VM for a moment, by a QMP connection of the library's own.
//!
//! The library does it itself because it lives and dies with its VM: whatever becomes of the daemon
//! meanwhile, the VM goes on.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longest wait for one answer; less than the daemon waits for a reply. `stop` drains I/O first, so
/// a slow disk makes it slow.
const PATIENCE: Duration = Duration::from_secs(4);

/// QEMU's monitor.
#[derive(Debug)]
pub struct Monitor {
    /// Where to connect, when it is first needed and after an error. None: there is this one
    /// connection, for good.
    path: Option<PathBuf>,
    link: Option<Link>,
    /// Whether the VM stands still because of [`Monitor::hold`].
    held: bool,
}

impl Monitor {
    /// The QMP socket at `path`, which nobody else may use.
    #[must_use]
    pub const fn new(path: PathBuf) -> Self {
        Self {
            path: Some(path),
            link: None,
            held: false,
        }
    }

    /// A connection that QEMU serves already. It needs no rights, which QEMU may have given up by
    /// then.
    pub fn connected(stream: UnixStream) -> io::Result<Self> {
        Ok(Self {
            path: None,
            link: Some(Link::new(stream)?),
            held: false,
        })
    }

    /// Stops vCPUs and drains I/O. `None` if the VM was not running; then it is not ours to let go
    /// on.
    pub fn stop(&mut self) -> io::Result<Option<Stopped<'_>>> {
        let status = self.ask("query-status")?;
        if status["status"] != "running" {
            return Ok(None);
        }
        let began = Instant::now();
        // From here on the VM may be stopped, whatever the answer.
        let mut stopped = Stopped {
            monitor: self,
            began,
            at_rest: began,
        };
        stopped.monitor.ask("stop")?;
        stopped.at_rest = Instant::now();
        Ok(Some(stopped))
    }

    /// Stops the VM until [`Monitor::release`]. `false` if it was not running.
    pub fn hold(&mut self) -> io::Result<bool> {
        let stopped = self.stop()?.map(std::mem::forget).is_some();
        self.held |= stopped;
        Ok(stopped)
    }

    /// Lets the VM go on if [`Monitor::hold`] has stopped it; whether it had.
    pub fn release(&mut self) -> bool {
        let held = std::mem::take(&mut self.held);
        if held {
            self.go_on();
        }
        held
    }

    fn go_on(&mut self) {
        // QEMU carries commands out in their order, so this comes after a `stop` that is still
        // unanswered.
        for _ in 0..100 {
            match self.ask("cont") {
                Ok(_) => return,
                Err(error) => {
                    say!("memfold: QEMU's monitor refused 'cont' ({error}); retrying");
                }
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Runs a command without arguments. After an error the next one connects anew, if it can.
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

/// A VM that stands still until this is dropped.
#[derive(Debug)]
pub struct Stopped<'a> {
    monitor: &'a mut Monitor,
    began: Instant,
    at_rest: Instant,
}

impl Stopped<'_> {
    /// How long it has stood still.
    #[must_use]
    pub fn since(&self) -> Duration {
        self.at_rest.elapsed()
    }

    /// Lets the VM go on, and says how long that took from the asking.
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

/// One connection. An answer that did not come in time is told by its number from that of a later
/// question.
#[derive(Debug)]
struct Link {
    stream: BufReader<UnixStream>,
    /// What has come of a line.
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
            // Once only: QEMU carries it out also if its answer comes too late, and refuses a
            // second one.
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
            // The greeting, events, and what comes too late.
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
        // After an error, what has come stays in `line`.
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
    fn a_late_answer_is_not_taken_for_the_next_one() {
        let (ours, mut qemu) = UnixStream::pair().unwrap();
        let mut monitor = Monitor::connected(ours).unwrap();
        let soon = Duration::from_millis(50);
        let link = monitor.link.as_mut().unwrap();
        link.stream.get_mut().set_read_timeout(Some(soon)).unwrap();
        let mut say = |text: &str| writeln!(qemu, "{text}").unwrap();
        say(r#"{"QMP": {}}"#);
        // No answer yet: at first none to the greeting, then none to the question.
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

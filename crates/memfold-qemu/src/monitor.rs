//! Stopping the VM for a moment, by a QMP socket of the library's own.
//!
//! The library does it itself because it lives and dies with its VM: whatever becomes of the daemon meanwhile, the VM goes on.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longest wait for one answer; less than the daemon waits for a reply. `stop` drains I/O first, so a slow disk makes it slow.
const PATIENCE: Duration = Duration::from_secs(4);

/// QEMU's monitor. Connects when it is first needed.
#[derive(Debug)]
pub struct Monitor {
    path: PathBuf,
    link: Option<BufReader<UnixStream>>,
    /// Whether the VM stands still because of [`Monitor::hold`].
    held: bool,
}

impl Monitor {
    /// The QMP socket at `path`, which nobody else may use.
    #[must_use]
    pub const fn new(path: PathBuf) -> Self {
        Self {
            path,
            link: None,
            held: false,
        }
    }

    /// Stops vCPUs and drains I/O. `None` if the VM was not running; then it is not ours to let go on.
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
        // QEMU carries commands out in their order, so this comes after a `stop` that is still unanswered.
        for _ in 0..100 {
            match self.ask("cont") {
                Ok(_) => return,
                Err(error) => eprintln!(
                    "memfold: QEMU's monitor at {} does not take 'cont' ({error}); trying again",
                    self.path.display()
                ),
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Runs a command without arguments. After an error the next one connects anew.
    fn ask(&mut self, command: &str) -> io::Result<Value> {
        let mut link = match self.link.take() {
            Some(link) => link,
            None => connect(&self.path)?,
        };
        let answer = exchange(&mut link, command)?;
        self.link = Some(link);
        Ok(answer)
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

fn connect(path: &std::path::Path) -> io::Result<BufReader<UnixStream>> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut link = BufReader::new(stream);
    // The greeting.
    read_line(&mut link)?;
    exchange(&mut link, "qmp_capabilities")?;
    Ok(link)
}

fn exchange(link: &mut BufReader<UnixStream>, command: &str) -> io::Result<Value> {
    let mut text = json!({ "execute": command }).to_string();
    text.push('\n');
    link.get_mut().write_all(text.as_bytes())?;
    loop {
        let mut answer = read_line(link)?;
        if let Some(value) = answer.get_mut("return") {
            return Ok(value.take());
        }
        if let Some(error) = answer.get("error") {
            return Err(io::Error::other(format!("{command}: {}", error["desc"])));
        }
        // Events come in between.
    }
}

fn read_line(link: &mut BufReader<UnixStream>) -> io::Result<Value> {
    let mut text = String::new();
    if link.read_line(&mut text)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_str(&text)?)
}

//! Stops a VM in three steps: memfold asks the guest to shut down, then tells QEMU to quit, then
//! kills QEMU. Each step follows only if the one before did not end the VM in time.

use std::cell::RefCell;
use std::io;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use super::directory::{Record, VmDirectory, missing_is_fine};
use super::machine::{MachineError, QUIT_TIMEOUT, Vm};
use super::qmp::{Qmp, QmpError};

/// Timeout of monitor answers while a VM is stopped.
const STOP_TIMEOUT: Duration = Duration::from_secs(4);

/// Interval between repeated requests to shut down.
const PRESS_AGAIN: Duration = Duration::from_secs(2);

/// Longest time from the close of QEMU's monitor to its end.
const ENDING: Duration = Duration::from_millis(500);

/// Number of consecutive checks that must find the VM paused before it counts as paused. The next
/// constant: the time between two checks.
const STOOD_LOOKS: u32 = 3;
const STOOD_LOOK: Duration = Duration::from_millis(100);

/// A function that executes a command of QEMU's monitor and returns QEMU's answer.
pub type Ask<'a> = dyn Fn(&str) -> Result<Value, QmpError> + 'a;

/// How a VM ended when it was stopped.
#[derive(Clone, Debug, PartialEq)]
pub struct Stopped {
    /// Which step ended the VM.
    pub kind: StopKind,
    /// Whether the guest was asked to shut down and did not do so in time.
    pub overdue: bool,
    /// Time from the request to stop the VM to the end of QEMU.
    pub took: Duration,
    /// Why QEMU was told to quit or was killed, as text; `None` if neither was needed.
    pub why: Option<String>,
}

/// Which step ended a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopKind {
    /// The VM had ended before it was to be stopped.
    Already,
    /// The guest shut down when it was asked.
    PoweredDown,
    /// QEMU was told to quit, because the guest could not be asked or did not shut down in time.
    Quit,
    /// QEMU was killed, because it did not answer or did not quit.
    Killed,
}

impl Vm {
    /// Stops the VM: asks the guest to shut down and waits for `timeout`, then tells QEMU to quit,
    /// then kills QEMU. With `timeout` zero, the guest is not asked. Removes the VM's files and
    /// temporary overlays.
    pub fn stop(&self, timeout: Duration) -> Result<StopKind, MachineError> {
        self.end(timeout, &|| false, None)
            .map(|stopped| stopped.kind)
    }

    /// Stops the VM like [`stop`](Self::stop). `ask` requests the shutdown through the guest's
    /// agent, and returns whether the agent accepted the request. `monitor` executes QMP commands
    /// on a connection that the caller has already; `None`: on a new connection.
    pub fn end(
        &self,
        timeout: Duration,
        ask: &dyn Fn() -> bool,
        monitor: Option<&Ask<'_>>,
    ) -> Result<Stopped, MachineError> {
        let (directory, record) = self.started()?;
        let look = |source| self.look(source);
        let own = RefCell::new(None);
        let own_monitor = |command: &str| ask_alone(directory, &mut own.borrow_mut(), command);
        let stopped = self
            .end_process(timeout, ask, monitor.unwrap_or(&own_monitor))
            .map_err(look)?
            .ok_or_else(|| self.undying())?;
        remove_files(directory, record).map_err(look)?;
        Ok(stopped)
    }

    /// Kills QEMU without asking the guest to shut down. Removes the VM's files and temporary
    /// overlays.
    pub fn kill(&self) -> Result<(), MachineError> {
        let (directory, record) = self.started()?;
        let look = |source| self.look(source);
        self.process.kill().map_err(look)?;
        if !self.process.wait_exit(QUIT_TIMEOUT).map_err(look)? {
            return Err(self.undying());
        }
        remove_files(directory, record).map_err(look)
    }

    /// Returns directory and record of a VM that memfold started, or an error for other VMs.
    fn started(&self) -> Result<(&VmDirectory, &Record), MachineError> {
        let started = self.directory.as_ref().zip(self.record.as_ref());
        started.ok_or_else(|| MachineError::NotOurs {
            name: self.name.clone(),
        })
    }

    fn look(&self, source: io::Error) -> MachineError {
        MachineError::Look {
            name: self.name.clone(),
            source,
        }
    }

    fn undying(&self) -> MachineError {
        MachineError::Undying {
            name: self.name.clone(),
            pid: self.pid().as_raw_nonzero().get(),
        }
    }

    fn end_process(
        &self,
        timeout: Duration,
        ask: &dyn Fn() -> bool,
        monitor: &Ask<'_>,
    ) -> io::Result<Option<Stopped>> {
        let began = Instant::now();
        let stopped = |kind, overdue, why| Stopped {
            kind,
            overdue,
            took: began.elapsed(),
            why,
        };
        let kill = |overdue, why| {
            self.process.kill()?;
            let ended = self.process.wait_exit(QUIT_TIMEOUT)?;
            Ok(ended.then(|| stopped(StopKind::Killed, overdue, Some(why))))
        };
        let by_itself = |kind| Ok(Some(stopped(kind, false, None)));
        if self.process.has_exited()? {
            return by_itself(StopKind::Already);
        }
        let asked = if timeout.is_zero() {
            Shutdown::NotAsked("switching off at once was asked for".into())
        } else {
            self.power_down(timeout, ask, monitor)?
        };
        let (overdue, why) = match asked {
            Shutdown::Ended(kind) => return by_itself(kind),
            Shutdown::NotAsked(why) => (false, why),
            Shutdown::Overdue => {
                let seconds = timeout.as_secs_f64();
                let why = "the guest was asked to shut down and did not within";
                (true, format!("{why} {seconds} s"))
            }
            Shutdown::Silent(error) => {
                tracing::warn!(
                    vm = self.name,
                    error,
                    "QEMU did not answer and was killed; find out what QEMU waited for"
                );
                let why =
                    format!("QEMU does not answer ({error}), so the guest could not be asked");
                return kill(true, why);
            }
        };
        if !timeout.is_zero() {
            tracing::warn!(
                vm = self.name,
                why,
                "VM switched off, data that the guest had not written to disk is lost; use a longer --timeout or the guest agent"
            );
        }
        // QEMU may close the connection before it answers; the wait below shows whether it quits.
        if let Err(error) = monitor("quit") {
            tracing::debug!(vm = self.name, %error, "QEMU did not answer the QMP command 'quit'");
        }
        if self.process.wait_exit(QUIT_TIMEOUT)? {
            return Ok(Some(stopped(StopKind::Quit, overdue, Some(why))));
        }
        tracing::warn!(
            vm = self.name,
            "QEMU did not quit and was killed; no action is needed unless this repeats"
        );
        kill(overdue, why)
    }

    /// Asks the guest to shut down: through its agent, or else with the power button. This is
    /// repeated, because a guest whose kernel is still booting reacts to neither. A paused guest
    /// cannot react at all.
    fn power_down(
        &self,
        timeout: Duration,
        ask: &dyn Fn() -> bool,
        monitor: &Ask<'_>,
    ) -> io::Result<Shutdown> {
        let deadline = Instant::now() + timeout;
        let (mut stood, mut agent_took_it, mut if_ended) = (0, false, StopKind::Already);
        loop {
            let pause = match monitor("query-status") {
                Ok(status) if status["running"] == true => {
                    stood = 0;
                    agent_took_it = agent_took_it || ask();
                    if !agent_took_it {
                        if let Err(error) = monitor("system_powerdown") {
                            tracing::debug!(vm = self.name, %error, "cannot press the guest's virtual power button");
                        }
                    }
                    if_ended = StopKind::PoweredDown;
                    PRESS_AGAIN
                }
                // The VM may be stopped only for a moment, while its pages are folded.
                Ok(_) if stood < STOOD_LOOKS => {
                    stood += 1;
                    STOOD_LOOK
                }
                Ok(status) => {
                    let state = status["status"].as_str().unwrap_or("unknown").to_owned();
                    return Ok(Shutdown::NotAsked(format!(
                        "the VM is not running ({state}), so the guest could not be asked"
                    )));
                }
                Err(_) if self.process.wait_exit(ENDING)? => return Ok(Shutdown::Ended(if_ended)),
                Err(error) => return Ok(Shutdown::Silent(error.to_string())),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if self.process.wait_exit(left.min(pause))? {
                return Ok(Shutdown::Ended(if_ended));
            }
            if left <= pause {
                return Ok(Shutdown::Overdue);
            }
        }
    }
}

/// Executes a command on a new connection to the daemon's monitor, or to the other monitor if the
/// first is in use.
fn ask_alone(
    directory: &VmDirectory,
    own: &mut Option<Qmp>,
    command: &str,
) -> Result<Value, QmpError> {
    let qmp = match own.take() {
        Some(qmp) => qmp,
        None => Qmp::connect(&directory.daemon_qmp(), STOP_TIMEOUT)
            .or_else(|first| Qmp::connect(&directory.qmp(), STOP_TIMEOUT).map_err(|_| first))?,
    };
    own.insert(qmp).query(command)
}

/// Removes the files of an ended VM, unless another VM has its name now.
fn remove_files(directory: &VmDirectory, record: &Record) -> io::Result<()> {
    // Whoever holds the lock is starting another VM of this name.
    let Some(_lock) = missing_is_fine(directory.lock())? else {
        return Ok(());
    };
    // Another thread may have removed the files, and a new VM may not have its record yet.
    let now: Option<Record> = VmDirectory::read_json(&directory.record()).ok();
    let Some(now) = now.filter(|now| now.process == record.process) else {
        return Ok(());
    };
    // A snapshot may have replaced the overlays since the start.
    directory.remove(&now.overlays)
}

/// Result of asking a guest to shut down.
enum Shutdown {
    /// The guest shut down, or the VM ended before the guest was asked.
    Ended(StopKind),
    /// The guest was not asked; the text says why.
    NotAsked(String),
    /// The guest did not shut down in time.
    Overdue,
    /// QEMU does not answer.
    Silent(String),
}

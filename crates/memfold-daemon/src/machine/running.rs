//! Whether a VM runs, and how it goes on or ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use memfold_vm::process::is_stopped;
use memfold_vm::{AgentError, Qmp, QmpError, Stopped};
use tracing::{debug, info, warn};

use crate::error::DaemonError;
use crate::machine::Machine;
use crate::run_state::{RunState, SILENT};

/// How long a guest's agent may take to have its guest shut down.
const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(5);

/// How a guest shuts down by itself.
const POWER_OFF: &str =
    "if command -v systemctl > /dev/null; then systemctl poweroff; else poweroff; fi";

/// What is to be done for a VM that goes on by itself.
const GOES_ON: &str = "free space on the file system of that file: the VM then resumes by itself (the guest notices only the time)";

impl Machine {
    /// Whether it is to go on by itself when there is room for what it writes to its disks.
    fn resumes_when_room(&self) -> bool {
        self.vm.spec().is_some_and(|spec| spec.resume_when_room)
    }

    /// Whether it may go on by itself now.
    pub(crate) fn may_resume_when_room(&self) -> bool {
        self.resumes_when_room() && !self.being_saved.load(Ordering::Relaxed)
    }

    /// With what is to be done about this VM.
    pub(crate) fn with_own_fix(&self, mut state: RunState) -> RunState {
        if !state.full.is_empty() && self.resumes_when_room() {
            state.fix = Some(GOES_ON.into());
        }
        state
    }

    /// Whether it runs, as seen last.
    pub fn state(&self) -> RunState {
        self.state.lock().clone()
    }

    /// Whether it runs now. What isn't known, because somebody else uses the monitor for longer
    /// than `patience` or a snapshot is being made, is as it was.
    pub(crate) fn look_at_state(self: &Arc<Self>, patience: Duration) -> RunState {
        self.look(patience, |qmp, before| self.hear_pauses(qmp, before))
    }

    /// The same. `heard` is given the monitor and the state of before, once QEMU has answered.
    fn look(&self, patience: Duration, heard: impl FnOnce(&mut Qmp, &RunState)) -> RunState {
        let pid = self.pid().as_raw_nonzero().get();
        if is_stopped(pid.unsigned_abs()) {
            return RunState::stopped(pid);
        }
        if self.being_saved.load(Ordering::Relaxed) {
            return self.state();
        }
        let mut qmp = self.monitor.lock_within(patience);
        let before = self.state();
        let asked = RunState::ask(&self.name, &mut qmp);
        if asked.is_ok() {
            heard(&mut qmp, &before);
        }
        match asked {
            Ok(now) if now.name == before.name => before,
            Ok(now) => self.with_own_fix(now),
            Err(QmpError::Busy { .. }) => before,
            // It hangs still, whatever the words are.
            Err(_) if before.name == SILENT && qmp.is_silent() => before,
            Err(error) => RunState::silent(&self.name, &error),
        }
    }

    /// Notes whether it runs; a change is told.
    pub(crate) fn note_state(&self, now: &RunState) {
        let before = {
            let mut state = self.state.lock();
            std::mem::replace(&mut *state, now.clone())
        };
        if before == *now {
            return;
        }
        if now.is_running() {
            info!(vm = self.name, was = before.name, "VM runs again");
        } else if now.name == "prelaunch" {
            info!(vm = self.name, "VM waits for 'cont' (-S)");
        } else if matches!(
            now.name.as_str(),
            "inmigrate" | "save-vm" | "restore-vm" | "finish-migrate"
        ) {
            info!(
                vm = self.name,
                state = now.name,
                "VM waits while its state is saved or loaded"
            );
        } else {
            warn!(
                vm = self.name,
                state = now.name,
                cause = now.cause.as_deref().unwrap_or("unknown"),
                fix = now.fix.as_deref().unwrap_or("none known"),
                "VM is not running; see 'fix'"
            );
        }
    }

    /// Why a command in its guest has no answer, if that is because the VM stands still. One that
    /// never ran is as one that boots.
    pub fn stands_still(&self) -> Option<RunState> {
        let stands = |state: &RunState| !state.is_running() && state.name != "prelaunch";
        // Longer than for a moment.
        for look in 0..3 {
            if look > 0 {
                std::thread::sleep(Duration::from_millis(100));
            }
            let now = self.look(Duration::from_secs(1), |_, _| {});
            if !stands(&now) {
                return None;
            }
            if look == 2 || now.name == SILENT {
                return Some(now);
            }
        }
        None
    }

    /// Refuses what would wait for a guest that stands still; `what` is not done.
    pub fn check_runs(&self, what: &str) -> Result<(), DaemonError> {
        match self.stands_still() {
            Some(state) => Err(state.refusal(&self.name, what)),
            None => Ok(()),
        }
    }

    /// Lets it go on that stands still, whatever the reason was.
    pub fn resume(&self) -> Result<RunState, DaemonError> {
        let mut qmp = self.monitor();
        qmp.query("cont")?;
        let now = RunState::ask(&self.name, &mut qmp)?;
        drop(qmp);
        self.note_state(&now);
        Ok(now)
    }

    /// Ends the VM: its guest is asked to shut down, and after `timeout` it is switched off.
    pub fn stop(&self, timeout: Duration) -> Result<Stopped, DaemonError> {
        if let Some(domain) = self.libvirt() {
            return Err(DaemonError::BadRequest(format!(
                "VM '{}' was not started by memfold but is libvirt's domain '{domain}'; end it with virsh shutdown, or destroy",
                self.name
            )));
        }
        // By the monitor that the daemon has: others may sit on theirs.
        let monitor = |command: &str| self.monitor().query(command);
        Ok(self
            .vm
            .end(timeout, &|| self.ask_to_shut_down(), Some(&monitor))?)
    }

    /// Has the agent shut the guest down; whether it took the order. Without an agent, as while the
    /// guest boots, nobody does.
    fn ask_to_shut_down(&self) -> bool {
        let Some(agent) = self.agent().filter(|agent| agent.session().is_some()) else {
            return false;
        };
        match agent.run(POWER_OFF, POWER_OFF_TIMEOUT) {
            Ok(done) => done.code == 0,
            // It went before it could say so.
            Err(AgentError::Lost) => true,
            Err(error) => {
                debug!(vm = self.name, %error, "the agent does not shut the guest down");
                false
            }
        }
    }
}

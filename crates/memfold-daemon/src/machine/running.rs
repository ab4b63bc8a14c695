//! Run state of a VM (running, stopped, silent), and how the VM is paused, resumed or
//! stopped.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use memfold_vm::process::is_stopped;
use memfold_vm::{AgentError, Qmp, QmpError, QmpGuard, Stopped};
use memfold_wire::order::GuestOrder;
use tracing::{debug, info, warn};

use crate::error::{DaemonError, refused};
use crate::machine::Machine;
use crate::run_state::{RunState, SILENT};

/// Time limit for the agent's answer to the shutdown command.
const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(5);

/// Advice to the operator of a stopped VM that resumes by itself.
const GOES_ON: &str = "free space on the file system of that file: the VM then resumes by itself (the guest notices only the time)";

impl Machine {
    /// Returns whether the VM resumes by itself when its full disks have free space.
    fn resumes_when_room(&self) -> bool {
        self.settings().resume_when_room
    }

    /// Returns whether the VM may be resumed automatically now, which excludes a VM that is being
    /// saved.
    pub(crate) fn may_resume_when_room(&self) -> bool {
        self.resumes_when_room() && !self.marks.being_saved.load(Ordering::Relaxed)
    }

    /// Replaces the advice in `state` by [`GOES_ON`] if this VM resumes by itself.
    pub(crate) fn with_own_fix(&self, mut state: RunState) -> RunState {
        if !state.full.is_empty() && self.resumes_when_room() {
            state.fix = Some(GOES_ON.into());
        }
        state
    }

    /// Returns the VM's run state, as QEMU last reported it.
    pub fn state(&self) -> RunState {
        self.marks.state.lock().clone()
    }

    /// Reads the VM's run state. Returns the previous state while a snapshot is being saved, or if
    /// other threads use the monitor for longer than `patience`.
    pub(crate) fn look_at_state(self: &Arc<Self>, patience: Duration) -> RunState {
        self.look(patience, |qmp, before| self.hear_pauses(qmp, before))
    }

    /// Returns the VM's state if QEMU's process is stopped by a signal or a debugger.
    pub(super) fn stopped(&self) -> Option<RunState> {
        let pid = self.raw_pid();
        is_stopped(pid.unsigned_abs()).then(|| RunState::stopped(pid))
    }

    /// Reads the VM's run state. After QEMU has answered, calls `heard` with the monitor and the
    /// previous state.
    fn look(&self, patience: Duration, heard: impl FnOnce(&mut Qmp, &RunState)) -> RunState {
        if let Some(stopped) = self.stopped() {
            return stopped;
        }
        if self.marks.being_saved.load(Ordering::Relaxed) {
            return self.state();
        }
        let mut qmp = self.monitor.lock_within(patience);
        let before = self.state();
        let asked = RunState::ask(&self.role.name, &mut qmp);
        if asked.is_ok() {
            heard(&mut qmp, &before);
        }
        match asked {
            Ok(now) if now.name == before.name => before,
            Ok(now) => self.with_own_fix(now),
            Err(QmpError::Busy { .. }) => before,
            // QEMU still hangs: the old text is kept even if the error message differs.
            Err(_) if before.name == SILENT && qmp.is_silent() => before,
            Err(error) => RunState::silent(&self.role.name, &error),
        }
    }

    /// Stores the VM's run state, and logs a change.
    pub(crate) fn note_state(&self, now: &RunState) {
        let before = std::mem::replace(&mut *self.marks.state.lock(), now.clone());
        if before == *now {
            return;
        }
        let vm = self.name();
        match now.name.as_str() {
            "running" => info!(vm, was = before.name, "VM runs again"),
            "prelaunch" => info!(
                vm,
                "VM waits for the QMP command 'cont' (QEMU was started with -S)"
            ),
            "inmigrate" | "save-vm" | "restore-vm" | "finish-migrate" => info!(
                vm,
                state = now.name,
                "VM waits while its state is saved or loaded"
            ),
            _ => warn!(
                vm,
                state = now.name,
                cause = now.cause.as_deref().unwrap_or("unknown"),
                fix = now.fix.as_deref().unwrap_or("none known"),
                "VM is not running; see 'fix'"
            ),
        }
    }

    /// Returns the VM's run state if the VM is stopped, which explains why a command in its guest
    /// gets no answer. A VM that waits for its first start (`prelaunch`) counts as booting.
    pub fn stands_still(&self) -> Option<RunState> {
        let stands = |state: &RunState| !state.is_running() && state.name != "prelaunch";
        // Only a stop that lasts for three checks counts.
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

    /// Refuses an operation that would wait for a stopped guest. `what`: name of the operation, for
    /// the error message.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] if the VM is stopped.
    pub fn check_runs(&self, what: &str) -> Result<(), DaemonError> {
        let stands = self.stands_still();
        stands.map_or(Ok(()), |state| Err(state.refusal(self.name(), what)))
    }

    /// Pauses the VM until it is resumed. Returns the VM's new state.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] while the VM is being saved, because the save would resume the VM.
    pub fn pause(&self) -> Result<RunState, DaemonError> {
        let qmp = self.monitor();
        if self.marks.being_saved.load(Ordering::Relaxed) {
            return Err(refused(
                format!("cannot pause VM '{}': the VM is being saved", self.name()),
                "pause the VM after the save",
            ));
        }
        self.switch(qmp, "stop")
    }

    /// Resumes the VM, whatever stopped it. Returns the VM's new state.
    pub fn resume(&self) -> Result<RunState, DaemonError> {
        self.switch(self.monitor(), "cont")
    }

    /// Sends a QMP command that changes the VM's run state. Returns the VM's new state.
    fn switch(
        &self,
        mut qmp: QmpGuard<'_>,
        command: &'static str,
    ) -> Result<RunState, DaemonError> {
        // QEMU's event is read later, and then the state has changed.
        self.marks.pauses.lock().see(&self.state());
        qmp.query(command)?;
        let now = RunState::ask(&self.role.name, &mut qmp)?;
        drop(qmp);
        self.note_state(&now);
        Ok(now)
    }

    /// Stops the VM: asks the guest to shut down, and switches the VM off after `timeout`.
    pub fn stop(&self, timeout: Duration) -> Result<Stopped, DaemonError> {
        if let Some(domain) = self.libvirt() {
            return Err(DaemonError::BadRequest(format!(
                "VM '{}' was not started by memfold but is libvirt's domain '{domain}'; end it with virsh shutdown, or destroy",
                self.role.name
            )));
        }
        // The daemon's own monitor connection is used, because the other sockets may be occupied.
        let monitor = |command: &str| self.monitor().query(command);
        Ok(self
            .vm
            .end(timeout, &|| self.ask_to_shut_down(), Some(&monitor))?)
    }

    /// Asks the guest's agent to shut the guest down. Returns whether the agent accepted; `false`
    /// if no agent is connected, for example while the guest boots.
    fn ask_to_shut_down(&self) -> bool {
        let Some(agent) = self.agent().filter(|agent| agent.session().is_some()) else {
            return false;
        };
        match agent.run(GuestOrder::PowerOff, POWER_OFF_TIMEOUT) {
            Ok(done) => done.code == 0,
            // The connection was lost because the guest shut down before the agent could answer.
            Err(AgentError::Lost) => true,
            Err(error) => {
                debug!(vm = self.name(), %error, "the guest's agent did not shut the guest down");
                false
            }
        }
    }
}

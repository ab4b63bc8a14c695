//! Operations on VMs that run or are being started: stop, pause, resume, run a command.

use std::path::Path;
use std::time::{Duration, Instant};

use memfold_api::VmInfo;
use memfold_fold::Command;
use memfold_host::chain;
use memfold_units::ByteSize;
use memfold_vm::{
    CommandResult, MachineError, Record, StopKind, Stopped, StreamEvent, StreamRequest,
    StreamedCommand, Trim, Vm, VmDirectory,
};
use memfold_wire::memory::TrimResult;
use tracing::warn;

use crate::arrivals::{SETTLE, Way};
use crate::error::DaemonError;
use crate::machine::Machine;
use crate::threads;
use crate::vm_registry::ADOPTION_PATIENCE;
use crate::vms::Vms;

impl Vms {
    /// Shuts a VM down, or kills a VM that is still being started. `timeout`: time that the guest
    /// has to shut down.
    pub fn stop(&self, name: &str, timeout: Duration) -> Result<Stopped, DaemonError> {
        if let Some(stopped) = self.stop_arriving(name, timeout)? {
            return Ok(stopped);
        }
        let stopped = self.below.registry.machine(name)?.stop(timeout)?;
        // The VM's watch thread removes it from the table. The caller expects the VM to be gone, so
        // this waits up to 10 s.
        let (limit, pause) = (Duration::from_secs(10), Duration::from_millis(20));
        threads::wait_until(limit, pause, || !self.below.registry.contains(name));
        Ok(stopped)
    }

    /// Pauses a VM until it is resumed.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] while the VM is being saved; [`DaemonError::BadRequest`] for a
    /// libvirt domain.
    pub fn pause(&self, name: &str) -> Result<VmInfo, DaemonError> {
        let machine = self.below.registry.machine(name)?;
        not_of_libvirt(&machine, "pause", "suspend")?;
        // The library resumes a VM that it has stopped for a moment, and would resume a VM that was
        // paused in that moment. Whoever else holds this right may have told it to wait, too.
        let alone = machine.try_save().filter(|_| machine.vm().has_library());
        let waits = alone.is_some() && self.below.folding.leave_alone(&machine);
        let paused = machine.pause();
        if waits {
            let _ = self.below.folding.tell(Command::Release(machine.id()));
        }
        drop(alone);
        paused?;
        Ok(machine.info())
    }

    /// Resumes a VM that is stopped.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] if the VM does not run afterwards; [`DaemonError::BadRequest`]
    /// for a libvirt domain.
    pub fn resume(&self, name: &str) -> Result<VmInfo, DaemonError> {
        let machine = self.below.registry.machine(name)?;
        not_of_libvirt(&machine, "resume", "resume")?;
        let now = machine.resume()?;
        if !now.is_running() {
            return Err(now.refusal(name, "the VM does not resume"));
        }
        Ok(machine.info())
    }

    /// Begins a VM's time to live again.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] if the VM has none.
    pub fn extend(&self, name: &str) -> Result<VmInfo, DaemonError> {
        let machine = self.below.registry.machine(name)?;
        machine.extend_ttl()?;
        Ok(machine.info())
    }

    /// Runs a command in a guest. Waits first for the agent of a VM that has just started, and for
    /// the guest's clock if it is about to be set.
    pub fn exec(
        &self,
        name: &str,
        script: &str,
        timeout: Duration,
    ) -> Result<CommandResult, DaemonError> {
        let machine = self.below.registry.machine(name)?;
        machine.check_runs("no command was run")?;
        machine.wait_first_session();
        machine.wait_clock();
        machine
            .run(script, timeout)
            .map_err(|error| match machine.stands_still() {
                Some(state) => state.refusal(name, &error.to_string()),
                None => error.into(),
            })
    }

    /// Starts a command in a guest whose input and output are sent while it runs. `sink` gets the
    /// command's events, and must return at once. If the guest's clock is about to be set, waits
    /// for that first.
    pub fn stream(
        &self,
        name: &str,
        request: StreamRequest,
        sink: impl Fn(StreamEvent) + Send + 'static,
    ) -> Result<StreamedCommand, DaemonError> {
        let machine = self.below.registry.machine(name)?;
        machine.check_runs("no command was run")?;
        machine.wait_first_session();
        machine.wait_clock();
        machine
            .stream(request, sink)
            .map_err(|error| match machine.stands_still() {
                Some(state) => state.refusal(name, &error.to_string()),
                None => error.into(),
            })
    }

    /// Makes a guest's agent reclaim clean page cache, and waits for the result.
    pub fn trim(&self, name: &str, trim: &Trim) -> Result<TrimResult, DaemonError> {
        let machine = self.below.registry.machine(name)?;
        machine.check_runs("no page cache was trimmed")?;
        machine.wait_first_session();
        machine.trim(trim)
    }

    /// Returns the size that a guest really has: its RAM without the pages in its balloon.
    pub fn balloon_size(&self, name: &str) -> Result<ByteSize, DaemonError> {
        self.below.registry.machine(name)?.balloon_size()
    }

    /// Sets the size that a guest should have. `None`: all of its RAM. The guest reaches it later.
    pub fn set_balloon(&self, name: &str, target: Option<ByteSize>) -> Result<(), DaemonError> {
        let machine = self.below.registry.machine(name)?;
        match target {
            Some(target) => machine.set_balloon(target),
            None => machine.restore_balloon(),
        }
    }

    /// Waits until a guest's agent has connected.
    pub fn wait_agent(&self, name: &str, timeout: Duration) -> Result<(), DaemonError> {
        Ok(self.below.registry.machine(name)?.wait_agent(timeout)?)
    }

    /// Stops a VM that is being started or adopted; returns `None` if there is no such VM of this
    /// name.
    fn stop_arriving(&self, name: &str, timeout: Duration) -> Result<Option<Stopped>, DaemonError> {
        let Some(arrival) = self.below.registry.arrivals().get(name) else {
            return Ok(None);
        };
        let owned = || name.to_owned();
        if matches!(arrival.way, Way::Attaching(_)) {
            return Err(MachineError::NotOurs { name: owned() }.into());
        }
        let arrivals = self.below.registry.arrivals();
        // A VM whose QEMU answers is adopted soon, and then stopped in the usual way.
        if arrival.way == Way::Adopting && arrivals.wait_gone(&arrival, SETTLE) {
            return Ok(None);
        }
        let (began, state) = (Instant::now(), self.below.registry.state());
        let stopped = if arrival.way == Way::Adopting {
            let stopped = end_unadopted(state, name, timeout);
            arrival.cancel.set();
            stopped?
        } else {
            warn!(
                vm = name,
                "VM was stopped while it started, so QEMU was killed; no action is needed"
            );
            let cancelled = arrival.cancel.cancel(state, name);
            let failed = |source| MachineError::Look {
                name: owned(),
                source,
            };
            cancelled.map_err(failed)?;
            Stopped {
                kind: StopKind::Killed,
                overdue: false,
                took: began.elapsed(),
                why: Some("the VM was still being started".into()),
            }
        };
        if !arrivals.wait_gone(&arrival, ADOPTION_PATIENCE) {
            let record = VmDirectory::read_json::<Record>(&VmDirectory::of(state, name).record());
            let (name, pid) = (owned(), record.map_or(0, |record| record.process.pid));
            return Err(MachineError::Undying { name, pid }.into());
        }
        Ok(Some(stopped))
    }
}

/// Ends a running VM that is not adopted yet, also if that failed because its description cannot be
/// read.
fn end_unadopted(state: &Path, name: &str, timeout: Duration) -> Result<Stopped, MachineError> {
    let (vm, unreadable) = Vm::find_to_end(state, name)?;
    let stopped = vm.end(timeout, &|| false, None)?;
    if let Some(error) = unreadable {
        warn!(
            vm = name,
            error = chain(&error),
            "VM stopped whose description cannot be read; no action is needed"
        );
    }
    Ok(stopped)
}

/// Refuses a libvirt domain, for whose run state libvirt is responsible. `what`: the operation, for
/// the error message. `virsh`: name of virsh's command for that.
fn not_of_libvirt(machine: &Machine, what: &str, virsh: &str) -> Result<(), DaemonError> {
    let Some(domain) = machine.libvirt() else {
        return Ok(());
    };
    let name = machine.name();
    Err(DaemonError::BadRequest(format!(
        "VM '{name}' is libvirt's domain '{domain}'; {what} it with virsh {virsh}"
    )))
}

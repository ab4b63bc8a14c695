//! Gives VMs back what right-sizing has taken: what is in their balloons, and memory that their
//! guests were told to unplug. Finds out what the balloons of VMs hold that come from a snapshot or
//! from another QEMU, because that counts as taken, too.
//!
//! The thread that looks at all VMs does most of this. QEMU has one second for each answer there.

use memfold_units::ByteSize;
use memfold_vm::{Qmp, VmSpec, balloon, virtio_mem};
use tracing::{debug, info, warn};

use crate::error::DaemonError;
use crate::machine::Machine;
use crate::rightsizing::{Rightsizing, is_shared};
use crate::size_records::MovedBalloon;

impl Rightsizing {
    /// Lets a guest keep the plugged memory that it was told to unplug, and has not unplugged yet.
    /// An earlier daemon may have told it, too.
    pub(super) fn stop_unplugging(&self, machine: &Machine) {
        let own = machine.vm().spec().filter(|spec| spec.foreign.is_none());
        let can_plug = own.is_some_and(|spec| spec.pluggable().is_some());
        if machine.is_silent().is_some()
            || !self.state.lock().unplugs.may_unplug(machine.id(), can_plug)
        {
            return;
        }
        let Some(mut qmp) = machine.idle_monitor() else {
            return;
        };
        let stopped = qmp.briefly(|qmp| {
            let device = virtio_mem::read(qmp)?;
            let unplugs = device.filter(|device| device.requested < device.plugged);
            unplugs.map_or(Ok(()), |device| virtio_mem::request(qmp, device.plugged))
        });
        // If QEMU does not answer, the next look tries again.
        if stopped.is_err() {
            return;
        }
        // Nobody tells the guest anything else meanwhile, because the monitor is in use.
        self.state.lock().unplugs.note(machine.id(), false);
    }

    /// Notes that a VM was restored from a snapshot. What its balloon held when it was saved counts
    /// as put there by right-sizing, because no other program moves the balloon of a VM that
    /// memfold started: the guest gets it back at once, or when it needs it while right-sizing is
    /// on.
    pub(crate) fn note_restored(&self, machine: &Machine) {
        if !has_own_balloon(machine.vm().spec()) {
            return;
        }
        let noted = self.note_held(machine, &mut machine.monitor());
        match noted {
            Ok(None) => {}
            Ok(Some(held)) => {
                info!(vm = machine.name(), %held, "right-sizing: the restored VM was saved with memory in its balloon, and gets it back");
            }
            Err(error) => {
                warn!(vm = machine.name(), %error, "cannot find out whether the restored VM was saved with memory in its balloon; compare its size in 'memfold rightsize status' with its RAM");
            }
        }
    }

    /// Notes, once, that a VM has come from another QEMU by a migration. What its balloon holds
    /// counts as after a restore: the daemon of the other host knew what to give back, and this one
    /// does not.
    pub(super) fn note_received(&self, machine: &Machine) {
        if !machine.has_unseen_balloon() || !machine.state().is_running() {
            return;
        }
        if !has_own_balloon(machine.vm().spec()) {
            return machine.note_balloon_known();
        }
        if machine.is_silent().is_some() {
            return;
        }
        // If the monitor is in use, the next look tries again.
        let Some(mut qmp) = machine.idle_monitor() else {
            return;
        };
        // Somebody may have moved the balloon since.
        if !machine.has_unseen_balloon() {
            return;
        }
        let noted = qmp.briefly(|qmp| self.note_held(machine, qmp));
        drop(qmp);
        match noted {
            Ok(held) => {
                machine.note_balloon_known();
                if let Some(held) = held {
                    info!(vm = machine.name(), %held, "right-sizing: the VM came from another QEMU with memory in its balloon, and gets it back");
                }
            }
            Err(error) => {
                debug!(vm = machine.name(), %error, "cannot find out what the balloon of a VM holds that came from another QEMU; trying again at the next look");
            }
        }
    }

    /// Records what a VM's balloon holds as put there by right-sizing, and returns how much that
    /// is; `None`: nothing.
    fn note_held(&self, machine: &Machine, qmp: &mut Qmp) -> Result<Option<ByteSize>, DaemonError> {
        let (full, size) = balloon::sizes(qmp)?;
        let held = full.0.saturating_sub(size.0);
        if held == 0 {
            return Ok(None);
        }
        self.records.change(machine, |record| {
            let moved = || MovedBalloon::moved(None, full, size, full);
            record.moved.get_or_insert_with(moved);
        })?;
        Ok(Some(ByteSize(held)))
    }

    /// Gives a guest back what right-sizing has put into its balloon. If that is not possible now,
    /// the next look tries again.
    pub(super) fn give_all_back(&self, machine: &Machine) {
        // Until the migration ends, QEMU does not know what the guest was told to unplug, nor what
        // its balloon holds.
        if machine.state().is_incoming() {
            return;
        }
        self.stop_unplugging(machine);
        let moved = self.records.get(machine).moved;
        let Some(moved) = moved.filter(|_| machine.is_silent().is_none()) else {
            return;
        };
        // While the VM is saved, for example, the monitor is in use.
        let Some(mut qmp) = machine.idle_monitor() else {
            return;
        };
        let result = qmp.briefly(|qmp| self.return_balloon(machine, qmp, moved));
        drop(qmp);
        let mut state = self.state.lock();
        match result {
            Ok(size) => {
                state.owed.remove(&machine.id());
                drop(state);
                if let Some(size) = size {
                    info!(vm = machine.name(), %size, "right-sizing: the VM gets back what was in its balloon");
                }
            }
            // The VM was told; only whether it has everything is not known yet.
            Err(_) if moved.is_returned() => {}
            Err(error) => {
                let is_new = state.owed.insert(machine.id());
                drop(state);
                if is_new {
                    warn!(vm = machine.name(), %error, "cannot give a VM back what is in its balloon; retrying every 2 s");
                }
            }
        }
    }

    /// Tells a guest to take back what right-sizing has put into its balloon, and records that.
    /// Returns the size that the VM gets; `None`: nothing is left to give back.
    fn return_balloon(
        &self,
        machine: &Machine,
        qmp: &mut Qmp,
        moved: MovedBalloon,
    ) -> Result<Option<ByteSize>, DaemonError> {
        let (ram, size) = balloon::sizes(qmp)?;
        let seen = moved.seen(size, ram, is_shared(machine));
        let Some(owed) = seen.filter(|seen| !seen.is_returned()) else {
            self.records.change(machine, |record| record.moved = seen)?;
            return Ok(None);
        };
        let returned = owed.given_back(size, ram);
        balloon::restore(qmp, Some(returned.before()))?;
        self.records
            .change(machine, |record| record.moved = Some(returned))?;
        Ok(Some(returned.before()))
    }
}

/// Returns whether memfold started a VM that has a balloon. No other program moves that balloon,
/// also if the VM is a copy of one that memfold did not start. `spec`: the VM's description;
/// `None`: memfold did not start the VM.
fn has_own_balloon(spec: Option<&VmSpec>) -> bool {
    spec.is_some_and(|spec| spec.balloon)
}

#[cfg(test)]
mod tests {
    use memfold_vm::foreign::Foreign;

    use super::*;

    #[test]
    fn the_balloon_of_a_restored_vm_is_memfolds_own_whoever_started_the_vm_that_was_saved() {
        let mut spec = VmSpec::new("restored", ByteSize::mib(512));
        assert!(has_own_balloon(Some(&spec)));
        spec.foreign = Some(Foreign::default());
        assert!(has_own_balloon(Some(&spec)));
        spec.balloon = false;
        assert!(!has_own_balloon(Some(&spec)));
        assert!(!has_own_balloon(None));
    }
}

//! Settings that an operator can change while a VM runs. A change is recorded in the VM's directory,
//! so the next daemon knows it, and ends with the VM.

use memfold_fold::Command;
use memfold_vm::{Vm, VmDirectory};
use serde::{Deserialize, Serialize};

use crate::error::{DaemonError, refused, state_error};
use crate::machine::Machine;

/// Why a VM is not folded whose setting `fold` is false.
const SWITCHED_OFF: &str = "folding of this VM was switched off (memfold vm set NAME fold=true)";

/// Settings of a running VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    /// Whether more of the VM's memory may be folded.
    pub fold: bool,
    /// Whether the VM resumes by itself when its full disk has free space.
    pub resume_when_room: bool,
}

impl Settings {
    /// Returns the settings of a VM: those that were changed since its start, or those of its
    /// description.
    pub fn of(vm: &Vm) -> Self {
        let changed = vm.directory().map(VmDirectory::settings);
        let changed = changed.and_then(|path| VmDirectory::read_json(&path).ok());
        let spec = vm.spec();
        changed.unwrap_or(Self {
            fold: vm.has_library(),
            resume_when_room: spec.is_some_and(|spec| spec.resume_when_room),
        })
    }
}

impl Machine {
    /// Returns the VM's settings.
    pub(crate) fn settings(&self) -> Settings {
        *self.settings.lock()
    }

    /// Returns the reason why the VM is not folded, if an operator has switched folding off.
    pub(super) fn switched_off(&self) -> Option<String> {
        let name = self.name();
        (!self.settings().fold && self.vm.has_library()).then(|| SWITCHED_OFF.replace("NAME", name))
    }

    /// Changes the settings of the running VM, and records them. Memory that is folded stays
    /// folded.
    pub(crate) fn change_settings(&self, new: Settings) -> Result<(), DaemonError> {
        let Some(directory) = self.vm.directory() else {
            return Err(refused(
                format!("VM '{}' was not started by memfold", self.name()),
                "change the VM with the program that started it",
            ));
        };
        if new.fold && !self.vm.has_library() {
            return Err(refused(
                format!(
                    "VM '{}' runs without memfold's library, so it cannot be folded now",
                    self.name()
                ),
                "set 'fold' with --next-start if the VM is defined, and stop and start the VM",
            ));
        }
        let path = directory.settings();
        directory
            .write_json(&path, &new)
            .map_err(state_error(&path))?;
        *self.settings.lock() = new;
        self.tell(Command::Problem(self.role.id, self.problem()));
        Ok(())
    }
}

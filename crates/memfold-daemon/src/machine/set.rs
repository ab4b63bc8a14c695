//! Changes the settings of a running VM.

use memfold_fold::Command;

use crate::error::{DaemonError, refused, state_error};
use crate::machine::Machine;
use crate::machine::settings::Settings;

/// Why a VM is not folded whose setting `fold` is false.
const SWITCHED_OFF: &str = "folding of this VM was switched off (memfold vm set NAME fold=true)";

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
        self.extend();
        self.tell(Command::Problem(self.role.id, self.problem()));
        Ok(())
    }
}

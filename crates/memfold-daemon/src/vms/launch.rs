//! Starts a VM's QEMU process and adds the VM to the daemon's table.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use memfold_api::VmInfo;
use memfold_vm::{Cancel, MachineError, Vm, VmDirectory, VmSpec};
use tracing::warn;

use crate::arrivals::Way;
use crate::error::{DaemonError, state_error};
use crate::machine::Origin;
use crate::vms::Vms;

impl Vms {
    /// Starts a VM's QEMU by calling `how`, and adds the VM to the daemon's table. A VM that cannot
    /// be added is killed.
    pub fn launch(
        self: &Arc<Self>,
        mut spec: VmSpec,
        how: impl FnOnce(&Path, VmSpec, &Cancel) -> Result<Vm, DaemonError>,
    ) -> Result<VmInfo, DaemonError> {
        let right = self.below.registry.start_right()?;
        let entry = self.below.registry.arrive(&spec, Way::Starting)?;
        let (name, domain) = (spec.name.clone(), spec.domain.clone());
        let uses = self.below.segments.take(&mut spec)?;
        self.below.ksm.keep_from_merging(&mut spec, &right);
        drop(right);
        let vm = how(self.below.registry.state(), spec, &entry.arrival.cancel)?;
        let came = vm
            .came_in()
            .map_err(state_error(self.below.registry.state()));
        let machine = came.and_then(|()| self.take_on(vm, &name, domain, Origin::Started));
        if machine.is_err() {
            end_unknown(self.below.registry.state(), &name);
        }
        drop((entry, uses));
        Ok(machine?.info())
    }
}

/// Kills a VM that was started and could not be adopted, because no list would show it.
fn end_unknown(state: &Path, name: &str) {
    let ended = match Vm::find(state, name) {
        Ok(vm) => vm.stop(Duration::ZERO).map(drop),
        // The VM has ended by itself and left its files.
        Err(MachineError::NotFound { name }) => Vm::clear_if_stale(&VmDirectory::of(state, &name))
            .map(drop)
            .map_err(|source| MachineError::Look { name, source }),
        Err(error) => Err(error),
    };
    if let Err(error) = ended {
        warn!(
            vm = name,
            error = &error as &dyn std::error::Error,
            "cannot adopt the started VM, and cannot end it; restart the daemon to adopt the VM"
        );
    }
}

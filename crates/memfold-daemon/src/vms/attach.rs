//! Attaches the daemon to QEMU processes that memfold did not start.

use std::sync::Arc;

use memfold_api::{AttachRequest, VmInfo};
use memfold_vm::Vm;

use crate::arrivals::Entry;
use crate::error::DaemonError;
use crate::interrupted_save;
use crate::machine::Origin;
use crate::vms::Vms;

impl Vms {
    /// Attaches to a running QEMU by its QMP socket.
    pub fn attach(self: &Arc<Self>, request: &AttachRequest) -> Result<VmInfo, DaemonError> {
        self.check_free(request)?;
        self.attach_as(Vm::attach(&request.qmp)?, request, None, None)
    }

    fn check_free(&self, request: &AttachRequest) -> Result<(), DaemonError> {
        let name = &request.name;
        for (field, text) in [("name", Some(name)), ("domain", request.domain.as_ref())] {
            if let Some(text) = text {
                memfold_vm::check_name(field, text)
                    .map_err(|e| DaemonError::BadRequest(e.to_string()))?;
            }
        }
        // Each of the two locks is released before the other is taken.
        let is_arriving = self.below.registry.arrivals().get(name).is_some();
        if is_arriving || self.below.registry.contains(name) {
            return Err(DaemonError::NameTaken(name.clone()));
        }
        Ok(())
    }

    /// Adopts a QEMU process whose monitor is connected. `libvirt`: its domain name, if libvirt
    /// started it.
    pub(crate) fn attach_as(
        self: &Arc<Self>,
        vm: Vm,
        request: &AttachRequest,
        libvirt: Option<String>,
        entry: Option<&Entry>,
    ) -> Result<VmInfo, DaemonError> {
        if entry.is_none() {
            self.check_free(request)?;
        }
        let name = &request.name;
        if let Some(known) = self.below.registry.with_pid(vm.pid()) {
            return Err(DaemonError::BadRequest(format!(
                "this QEMU is already known as '{}'",
                known.name()
            )));
        }
        let origin = match libvirt {
            Some(domain) => Origin::Libvirt(domain),
            None => Origin::Attached(request.qmp.clone()),
        };
        let machine = self.take_on(vm, name, request.domain.clone(), origin)?;
        self.write_attached();
        if interrupted_save::is_cut_off(self.below.registry.state(), &machine) {
            interrupted_save::undo_soon(self.below.registry.state().to_owned(), machine.clone());
        }
        Ok(machine.info())
    }
}

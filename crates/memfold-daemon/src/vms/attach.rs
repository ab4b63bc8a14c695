//! Attaches the daemon to QEMU processes that memfold did not start (`memfold vm attach`). Records
//! these VMs in a file, so that the next daemon attaches to them again.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use memfold_api::{AttachRequest, VmInfo};
use memfold_vm::Vm;
use tracing::warn;

use crate::arrivals::Entry;
use crate::error::DaemonError;
use crate::interrupted_save;
use crate::json_file::write_json;
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
        let domain = request.domain.iter().map(|domain| ("domain", domain));
        for (field, text) in std::iter::once(("name", name)).chain(domain) {
            memfold_vm::check_name(field, text)
                .map_err(|e| DaemonError::BadRequest(e.to_string()))?;
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

    fn attached_file(&self) -> PathBuf {
        self.below.registry.state().join("attached.json")
    }

    pub(super) fn read_attached(&self) -> Vec<AttachRequest> {
        let bytes = std::fs::read(self.attached_file()).unwrap_or_default();
        let list: Vec<AttachRequest> = serde_json::from_slice(&bytes).unwrap_or_default();
        *self.attached.lock() = by_name(list.iter().cloned());
        list
    }

    /// Records the attached VMs for the next daemon, if they have changed.
    pub(super) fn write_attached(&self) {
        // Many VMs are attached at the same time after the daemon's start.
        let mut written = self.attached.lock();
        // Attached VMs that this daemon has not reached yet are included.
        let arriving = self.below.registry.arrivals().all();
        let arriving = arriving.iter().filter_map(|a| a.attach_request().cloned());
        let machines = self.below.registry.machines();
        let attached = machines.iter().filter_map(|m| m.attach_request());
        let now = by_name(arriving.chain(attached));
        if *written == now {
            return;
        }
        match write_json(&self.attached_file(), &now.values().collect::<Vec<_>>()) {
            Ok(()) => *written = now,
            Err(error) => {
                warn!(%error, "cannot record which VMs are attached; free space, and attach these VMs again after the daemon's next start");
            }
        }
    }
}

fn by_name(list: impl Iterator<Item = AttachRequest>) -> BTreeMap<String, AttachRequest> {
    list.map(|request| (request.name.clone(), request))
        .collect()
}

//! Attaches the daemon to QEMU processes that memfold did not start (`memfold vm attach`). Records
//! these VMs in a file, so that the next daemon attaches to them again.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use memfold_api::{AttachRequest, VmInfo};
use memfold_units::ByteSize;
use memfold_vm::{Vm, VmSpec};
use tracing::warn;

use crate::arrivals::{AttachedVm, Entry, Way};
use crate::error::DaemonError;
use crate::interrupted_save;
use crate::json_file::write_json;
use crate::machine::Origin;
use crate::vm_registry;
use crate::vms::Vms;

impl Vms {
    /// Attaches to a running QEMU by its QMP socket.
    pub fn attach(self: &Arc<Self>, request: &AttachRequest) -> Result<VmInfo, DaemonError> {
        check_names(request)?;
        if self.below.registry.is_taken(&request.name) {
            return Err(DaemonError::NameTaken(request.name.clone()));
        }
        self.attach_as(Vm::attach(&request.qmp)?, request, None)
    }

    /// Reserves a VM's name, and adopts its QEMU, whose monitor is connected. `libvirt`: its domain
    /// name, if libvirt started it.
    pub(crate) fn attach_as(
        self: &Arc<Self>,
        vm: Vm,
        request: &AttachRequest,
        libvirt: Option<String>,
    ) -> Result<VmInfo, DaemonError> {
        check_names(request)?;
        let recorded = libvirt.is_none().then(|| AttachedVm {
            request: request.clone(),
            process: vm.process().identity(),
        });
        let entry = self.arrive_attached(request, recorded)?;
        self.attach_arrived(vm, request, libvirt, &entry)
    }

    /// Adds a VM to the list of those that are being adopted. `recorded`: its entry in
    /// `attached.json`, if it has one.
    pub(super) fn arrive_attached(
        &self,
        request: &AttachRequest,
        recorded: Option<AttachedVm>,
    ) -> Result<Entry, DaemonError> {
        let mut spec = VmSpec::new(request.name.clone(), ByteSize(0));
        spec.domain.clone_from(&request.domain);
        self.below.registry.arrive(&spec, Way::Attaching(recorded))
    }

    /// Adopts a QEMU whose name is reserved by `_entry`.
    pub(super) fn attach_arrived(
        self: &Arc<Self>,
        vm: Vm,
        request: &AttachRequest,
        libvirt: Option<String>,
        _entry: &Entry,
    ) -> Result<VmInfo, DaemonError> {
        let name = &request.name;
        if let Some(known) = self.below.registry.with_pid(vm.pid()) {
            return Err(vm_registry::known_as(&known));
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

    pub(super) fn read_attached(&self) -> Vec<AttachedVm> {
        let bytes = std::fs::read(self.attached_file()).unwrap_or_default();
        let list: Vec<AttachedVm> = serde_json::from_slice(&bytes).unwrap_or_default();
        *self.attached.lock() = by_name(list.iter().cloned());
        list
    }

    /// Records the attached VMs for the next daemon, if they have changed.
    pub(super) fn write_attached(&self) {
        // Many VMs are attached at the same time after the daemon's start.
        let mut written = self.attached.lock();
        // Attached VMs that this daemon has not reached yet are included.
        let arriving = self.below.registry.arrivals().all();
        let arriving = arriving.iter().filter_map(|a| a.attached().cloned());
        let machines = self.below.registry.machines();
        let attached = machines.iter().filter_map(|m| m.attached());
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

fn by_name(list: impl Iterator<Item = AttachedVm>) -> BTreeMap<String, AttachedVm> {
    list.map(|vm| (vm.request.name.clone(), vm)).collect()
}

fn check_names(request: &AttachRequest) -> Result<(), DaemonError> {
    let domain = request.domain.iter().map(|domain| ("domain", domain));
    for (field, text) in std::iter::once(("name", &request.name)).chain(domain) {
        memfold_vm::check_name(field, text).map_err(|e| DaemonError::BadRequest(e.to_string()))?;
    }
    Ok(())
}

//! The VM that a save turns into a snapshot: its description, the record of its QEMU process, and
//! its temporary files.

use std::path::PathBuf;

use memfold_vm::{QemuUser, Qmp, Record, Vm, VmDirectory, VmSpec, foreign};

use super::error::{SnapshotError, failed};

/// The VM that is saved: its description, and the record of its QEMU process (`process.json`).
#[derive(Clone, Debug)]
pub struct Subject {
    pub(super) spec: VmSpec,
    pub(super) record: Record,
    /// The VM's directory; `None` for a VM that memfold did not start.
    pub(super) directory: Option<VmDirectory>,
}

impl Subject {
    /// Describes the running VM that will be saved. `name` and `domain` are its name and trust
    /// domain. Returns an error if a VM with such hardware cannot be saved.
    pub fn of(
        vm: &Vm,
        (name, domain): (&str, Option<&str>),
        qmp: &mut Qmp,
    ) -> Result<Self, SnapshotError> {
        let (Some(spec), Some(record)) = (vm.spec(), vm.record()) else {
            let (spec, record) = foreign::describe(vm, name, domain, qmp)?;
            return Ok(Self {
                spec,
                record,
                directory: None,
            });
        };
        if spec.swap.is_some() {
            return Err(SnapshotError::Impossible(
                "the VM has a swap disk (swap = ...), whose content a snapshot would lack; start the VM without a swap disk".into(),
            ));
        }
        Ok(Self {
            spec: spec.clone(),
            record: record.clone(),
            directory: vm.directory().cloned(),
        })
    }

    /// Returns the description of the VM that is saved.
    #[must_use]
    pub const fn spec(&self) -> &VmSpec {
        &self.spec
    }

    /// Returns whether QEMU emulates the VM's CPUs (TCG) instead of running them with KVM.
    #[must_use]
    pub fn is_emulated(&self) -> bool {
        self.record.accel != "kvm"
    }

    /// Returns the user that the VM's QEMU has switched to.
    pub(super) fn user(&self) -> Option<QemuUser> {
        self.record.user_of(&self.spec)
    }

    pub(super) fn record_now(&self) -> Record {
        let directory = self.directory.as_ref();
        let now = directory.and_then(|place| VmDirectory::read_json(&place.record()).ok());
        now.filter(|now: &Record| now.process == self.record.process)
            .unwrap_or_else(|| self.record.clone())
    }

    /// Returns the temporary overlays of the VM that exist.
    pub(super) fn overlays_now(&self) -> Vec<PathBuf> {
        let mut overlays = self.record_now().overlays;
        overlays.retain(|overlay| overlay.exists());
        overlays
    }

    /// Records which temporary files belong to the VM.
    pub(super) fn write_overlays(&self, overlays: &[PathBuf]) -> Result<(), SnapshotError> {
        let Some(directory) = &self.directory else {
            return Ok(());
        };
        // The VM may have ended meanwhile, and another VM may have its name.
        let is_other = |now: Record| now.process != self.record.process;
        if VmDirectory::read_json(&directory.record()).is_ok_and(is_other) {
            return Ok(());
        }
        let mut record = self.record_now();
        record.overlays = overlays.to_vec();
        let path = directory.record();
        directory.write_json(&path, &record).map_err(failed(&path))
    }
}

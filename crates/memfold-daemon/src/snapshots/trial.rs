//! Trial start of a snapshot's VM: QEMU is started with the options of `restore`, loads no state,
//! and is killed again.

use std::path::{Path, PathBuf};
use std::time::Duration;

use memfold_snapshot::{Manifest, restore};
use memfold_vm::{Incoming, Vm, VmSpec, overlay};
use tracing::warn;

use crate::error::DaemonError;
use crate::snapshots::Snapshots;

/// Returns the directory for VMs of trial starts. No list shows these VMs, and no daemon adopts
/// them.
fn place(state: &Path) -> PathBuf {
    state.join("trial")
}

/// Ends trial VMs that a killed daemon has left.
pub(crate) fn clear(state: &Path) {
    for vm in Vm::discover(&place(state)).unwrap_or_default() {
        end(&vm);
    }
}

fn end(vm: &Vm) {
    if let Err(error) = vm.stop(Duration::ZERO) {
        warn!(
            vm = vm.name(),
            error = &error as &dyn std::error::Error,
            "cannot stop the QEMU process of a trial start of the VM; kill the process by hand"
        );
    }
}

impl Snapshots {
    /// Starts QEMU with the options of a restore, and kills it again.
    ///
    /// # Errors
    ///
    /// A [`DaemonError`] that says why a VM cannot be started from the snapshot.
    pub(super) fn try_restore(&self, spec: VmSpec, manifest: &Manifest) -> Result<(), DaemonError> {
        let mut spec = spec.for_trial(format!("try-{:x}", overlay::unique()));
        self.below.segments.find(&mut spec)?;
        let incoming = Incoming {
            qemu: manifest.qemu,
            machine: manifest.machine.clone(),
            accel: manifest.accel.clone(),
        };
        let vm = memfold_vm::start_incoming(&place(self.below.registry.state()), spec, &incoming)?;
        let fits = vm
            .daemon_qmp()
            .map_err(DaemonError::from)
            .and_then(|mut qmp| Ok(restore::fits(&mut qmp, manifest)?));
        end(&vm);
        fits
    }
}

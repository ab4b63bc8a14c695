//! Verifies snapshots: checksums, disks, and a trial start of the snapshot's VM. For the trial,
//! QEMU is started with the options of `restore`, loads no state, and is killed again.

use std::path::{Path, PathBuf};
use std::time::Duration;

use memfold_api::VerifyReport;
use memfold_host::chain;
use memfold_snapshot::{Manifest, Shelf, SnapshotError, restore, shelf};
use memfold_vm::{Cancel, Incoming, Vm, VmSpec, overlay};
use tracing::warn;

use crate::error::DaemonError;
use crate::snapshots::Snapshots;

/// Returns the directory for VMs of trial starts. No list shows VMs in this directory, and no
/// daemon adopts them.
fn place(state: &Path) -> PathBuf {
    state.join("trial")
}

/// Ends trial VMs that a killed daemon has left.
pub(crate) fn clear_trials(state: &Path) {
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
    /// Reads a snapshot completely, compares its checksums, and tries to start a VM from the
    /// snapshot.
    pub fn verify(&self, name: &str) -> Result<VerifyReport, DaemonError> {
        let progress = self.below.snapshot_locks.begin(name)?;
        let manifest = self.below.snapshots.manifest(name)?;
        let changed = self.below.snapshots.changed_parts(&manifest)?;
        let mut problems: Vec<String> = changed
            .iter()
            .map(|part| format!("{part} was changed since it was saved"))
            .collect();
        // The checksums of an encrypted snapshot can be changed with it, but not the tag of its
        // device state.
        if manifest.encryption.is_some() && changed.is_empty() {
            let opened = self.below.snapshots.devices(&manifest);
            problems.extend(opened.err().map(|error| chain(&error)));
        }
        // If the tables in the snapshot are changed, the data they point to cannot be found.
        if changed.iter().all(|part| *part == shelf::DEVICES) {
            let stored = self.below.snapshots.stored(&manifest)?;
            progress.begin("checksums compared", stored.bytes);
            let path = self.below.snapshots.root().join(name).join(shelf::RAM);
            let wrong = stored
                .verify(&progress)
                .map_err(|source| SnapshotError::Files { path, source })?;
            let image = Shelf::image_of(&manifest);
            problems.extend(wrong.iter().map(|chunk| {
                format!("{image} was changed since it was saved, in its chunk {chunk}")
            }));
        }
        progress.begin("disks compared", 0);
        match restore::spec(&self.below.snapshots, &manifest, &manifest.vm) {
            Ok(spec) => {
                let snapshots = &self.below.snapshots;
                problems.extend(restore::changed_disks(snapshots, &manifest)?);
                problems.extend(restore::changed_disks_below(snapshots, &manifest));
                progress.begin("a start tried", 0);
                let tried = self.try_restore(spec, &manifest);
                problems.extend(tried.err().map(|error| {
                    format!("no VM can be started from this snapshot: {}", chain(&error))
                }));
            }
            // If a disk is the problem, the error names the disk.
            Err(error) => problems.push(error.to_string()),
        }
        Ok(VerifyReport {
            name: name.to_owned(),
            problems,
        })
    }

    /// Starts QEMU with the options of a restore, and kills it again.
    ///
    /// # Errors
    ///
    /// A [`DaemonError`] that says why a VM cannot be started from the snapshot.
    fn try_restore(&self, spec: VmSpec, manifest: &Manifest) -> Result<(), DaemonError> {
        let mut spec = spec.for_trial(format!("try-{:x}", overlay::unique()));
        self.below.segments.find(&mut spec)?;
        let incoming = Incoming {
            qemu: manifest.qemu,
            machine: manifest.machine.clone(),
            accel: manifest.accel.clone(),
            arriving: false,
        };
        let (never, state) = (Cancel::default(), place(self.below.registry.state()));
        let vm = memfold_vm::start_unless(&never, &state, spec, Some(&incoming))?;
        let fits = vm
            .daemon_qmp()
            .map_err(DaemonError::from)
            .and_then(|mut qmp| Ok(restore::fits(&mut qmp, manifest)?));
        end(&vm);
        fits
    }
}

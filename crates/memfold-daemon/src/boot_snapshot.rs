//! The snapshot of a VM right after its boot: its name, and whether it is one.

use memfold_api::BootSnapshot;
use memfold_snapshot::{Manifest, restore};
use memfold_vm::process::{Identity, boot_id};

use crate::error::DaemonError;
use crate::machine::Machine;
use crate::snapshot_directory::SnapshotDirectory;

/// Name of the snapshot of a VM right after its boot.
pub(crate) fn name_of(vm: &str) -> String {
    format!("{vm}-boot")
}

/// What a VM that this daemon has taken over, or restored, has of it.
pub(crate) fn find(directory: &SnapshotDirectory, machine: &Machine) {
    if machine.vm().spec().is_some_and(|spec| spec.boot_snapshot) {
        machine.set_boot_snapshot(match of(directory, machine) {
            Ok(_) => BootSnapshot::Ready,
            Err(error) => BootSnapshot::Failed(error.to_string()),
        });
    }
}

/// The snapshot of a VM right after its boot, if that is what it is.
pub(crate) fn of(
    directory: &SnapshotDirectory,
    machine: &Machine,
) -> Result<Manifest, DaemonError> {
    let name = name_of(machine.name());
    let none = |why: &str| {
        DaemonError::BadRequest(format!(
            "no boot snapshot of VM '{}': {why}",
            machine.name()
        ))
    };
    if !directory.path(&name)?.exists() {
        return Err(none(
            "start the VM with --boot-snapshot, and wait until 'vm list --json' shows the snapshot as ready",
        ));
    }
    let manifest = directory.manifest(&name)?;
    let restored = restore::users(directory, &name)?.contains(&machine.pid());
    let is_ours = manifest.of_boot.is_some() && manifest.of_boot == mark(machine);
    let is_its = manifest.of_boot.is_some() && manifest.vm == machine.name();
    if !is_its || !(restored || is_ours) {
        return Err(none(&format!(
            "'{name}' belongs to another VM, or to an earlier VM of this name"
        )));
    }
    Ok(manifest)
}

/// Which process a VM is, of all boots of this host.
pub(crate) fn mark(machine: &Machine) -> Option<String> {
    let process = machine.vm().record()?.process;
    let Identity { pid, start_ticks } = process;
    Some(format!("{} {pid} {start_ticks}", boot_id()))
}

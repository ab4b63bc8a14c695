//! The boot snapshot of a VM, saved right after the guest has booted. It has the VM's name with the
//! suffix `-boot`. This module makes that name, and checks whether the snapshot of that name
//! belongs to the VM.

use memfold_api::BootSnapshot;
use memfold_snapshot::{Manifest, Shelf, restore};
use memfold_vm::VmDirectory;
use memfold_vm::process::{Identity, boot_id};
use tracing::warn;

use crate::boot_work;
use crate::error::DaemonError;
use crate::machine::Machine;

/// Returns the name of the boot snapshot of `vm`.
pub(crate) fn name_of(vm: &str) -> String {
    format!("{vm}-boot")
}

/// Records in `machine`, an adopted or restored VM, whether its boot snapshot can be used.
pub(crate) fn find(directory: &Shelf, machine: &Machine) {
    if machine.vm().spec().is_some_and(|spec| spec.boot_snapshot) {
        machine.set_boot_snapshot(match of(directory, machine) {
            Ok(_) => BootSnapshot::Ready,
            Err(_) if boot_work::is_marked(machine, VmDirectory::boot_snapshot_pending) => {
                if !boot_work::is_marked(machine, VmDirectory::boot_snapshot_told) {
                    boot_work::mark(machine, VmDirectory::boot_snapshot_told);
                    warn!(
                    vm = machine.name(),
                    "boot snapshot of the VM not saved, because the daemon ended while the guest booted; start the VM again to save one"
                );
                }
                let why = "the daemon ended while the guest booted; start the VM again to save one";
                BootSnapshot::Failed(why.into())
            }
            Err(error) => BootSnapshot::Failed(error.to_string()),
        });
    }
}

/// Returns the manifest of the VM's boot snapshot.
///
/// # Errors
///
/// [`DaemonError::BadRequest`] if there is no boot snapshot, or if it belongs to another VM or to
/// an earlier VM of this name.
pub(crate) fn of(directory: &Shelf, machine: &Machine) -> Result<Manifest, DaemonError> {
    let name = name_of(machine.name());
    let none = |why: &str| {
        DaemonError::BadRequest(format!(
            "no boot snapshot of VM '{}': {why}",
            machine.name()
        ))
    };
    if !directory.path(&name)?.exists() {
        return Err(none(
            "start the VM with --boot-snapshot, and wait until 'vm list --json' shows the snapshot as ready; it is not saved if the daemon ends before",
        ));
    }
    let manifest = directory.manifest(&name)?;
    let restored = restore::users(directory, &name)?.contains(&machine.pid());
    let is_its = manifest.of_boot.is_some() && manifest.vm == machine.name();
    if !is_its || !(restored || manifest.of_boot == mark(machine)) {
        return Err(none(&format!(
            "'{name}' belongs to another VM, or to an earlier VM of this name"
        )));
    }
    Ok(manifest)
}

/// Returns a text that identifies the VM's process across reboots of this host: boot id, PID and
/// start time.
pub(crate) fn mark(machine: &Machine) -> Option<String> {
    let process = machine.vm().record()?.process;
    let Identity { pid, start_ticks } = process;
    Some(format!("{} {pid} {start_ticks}", boot_id()))
}

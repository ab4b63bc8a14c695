//! Work that is done once in a guest after its boot: enabling its swap disk, and mounting segments
//! over its files. A marker in the VM's directory exists until the guest was told to do it, and has
//! answered. A daemon that is started meanwhile tells the guest again. A boot snapshot has a
//! marker, too, but a later daemon does not save it: the guest may have booted long ago.

use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use memfold_host::chain;
use memfold_vm::VmDirectory;
use memfold_wire::order::GuestOrder;
use tracing::{debug, info, warn};

use crate::machine::{Machine, is_disconnected, text};
use crate::segments::in_guest::lay_all;

/// Time limit for a guest to enable its swap disk.
const SWAP_ON_TIMEOUT: Duration = Duration::from_secs(60);

/// Path of a marker in a VM's directory.
pub(crate) type Marker = fn(&VmDirectory) -> PathBuf;

/// Has a guest that boots enable its swap disk, if it has one, as soon as its agent answers.
pub(crate) fn enable_swap(machine: &Arc<Machine>) {
    if machine.vm().spec().is_some_and(|spec| spec.swap.is_some()) {
        mark(machine, VmDirectory::swap_pending);
        machine.on_agent_ready("swap-on", swap_on);
    }
}

/// Has a guest that boots mount the VM's segments over its files, unless the guest did so itself.
/// `later`: the caller does it by [`lay`] when the guest has booted.
pub(crate) fn lay_segments(machine: &Arc<Machine>, later: bool) {
    if machine.vm().segments().iter().any(|segment| !segment.root) {
        mark(machine, VmDirectory::segments_pending);
        if !later {
            machine.on_agent_ready("segments", lay);
        }
    }
}

/// Does what an earlier daemon had not done in the guest of an adopted VM.
pub(crate) fn resume(machine: &Arc<Machine>) {
    if is_marked(machine, VmDirectory::swap_pending) {
        machine.on_agent_ready("swap-on", swap_on);
    }
    if is_marked(machine, VmDirectory::segments_pending) {
        machine.on_agent_ready("segments", lay);
    }
}

fn swap_on(machine: &Machine) {
    let vm = machine.name();
    let said = match machine.run(GuestOrder::SwapOn, SWAP_ON_TIMEOUT) {
        Ok(done) if done.code == 0 => None,
        Ok(done) => Some(text(&done.stderr)),
        // The guest has probably rebooted, and the next daemon tries again.
        Err(error) if is_disconnected(&error) => return,
        Err(error) => Some(chain(&error)),
    };
    match said {
        None => info!(vm, "swap disk enabled in the guest"),
        Some(said) => warn!(
            vm,
            said, "swap disk not enabled in the guest; run 'swapon LABEL=memfold-swap' there"
        ),
    }
    unmark(machine, VmDirectory::swap_pending);
}

/// Has a guest mount the VM's segments now. A failure is logged and shown in the list of VMs.
pub(crate) fn lay(machine: &Machine) {
    lay_all(machine);
    unmark(machine, VmDirectory::segments_pending);
}

pub(crate) fn mark(machine: &Machine, marker: Marker) {
    let Some(directory) = machine.vm().directory() else {
        return;
    };
    if let Err(error) = File::create(marker(directory)) {
        let vm = machine.name();
        debug!(vm, %error, "cannot record what is to be done after the boot; a daemon that is started meanwhile does not do it");
    }
}

pub(crate) fn is_marked(machine: &Machine, marker: Marker) -> bool {
    let directory = machine.vm().directory();
    directory.is_some_and(|directory| marker(directory).exists())
}

pub(crate) fn unmark(machine: &Machine, marker: Marker) {
    if let Some(directory) = machine.vm().directory() {
        // The VM may have ended meanwhile, and its directory with it.
        let _ = fs::remove_file(marker(directory));
    }
}

//! Asks QEMU whether a swap disk is on this host's disk or on lent RAM. This is unknown if QEMU did
//! not answer, or answered too late, when the disk was to be switched from one to the other.
//!
//! Until QEMU answers, everything that the disk may still use is kept: relay processes,
//! connections, leases, and the note about the loan.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use memfold_host::chain;
use memfold_lend::graph::{self, GraphError, Phase};
use memfold_vm::VmDirectory;
use tracing::{info, warn};

use crate::error::{DaemonError, state_error};
use crate::locks::SwapRight;
use crate::machine::Machine;
use crate::swap_disks::SwapDisks;
use crate::swap_disks::guard::Guard;
use crate::swap_disks::note::{is_swap_file, note, remove_note};
use crate::swap_disks::relays::let_go;

impl SwapDisks {
    /// Asks QEMU whether the swap disk is lent, if that is unknown. Nothing is changed until QEMU
    /// answers.
    pub(super) fn reconcile(
        &self,
        machine: &Machine,
        guard: &Guard,
        right: &SwapRight<'_>,
    ) -> Result<(), DaemonError> {
        let mut borrowing = guard.borrowing();
        if guard.is_stopped() || borrowing.phase == Phase::Lent {
            return Ok(());
        }
        graph::cancel(&|| machine.monitor()).map_err(GraphError::from)?;
        let top = graph::top(&mut machine.monitor(), machine.name())?;
        let is_lent = top.node == borrowing.top();
        info!(
            vm = machine.name(),
            is_lent, "swap disk's location (host or lender) known again: QEMU has answered"
        );
        Self::clean_up(machine);
        if !is_lent {
            self.drop_note(machine, right);
            return Ok(());
        }
        guard.state.lock().borrowing.phase = Phase::Lent;
        borrowing.phase = Phase::Lent;
        note(machine, &borrowing);
        Ok(())
    }

    /// Takes the right to change the swap disk, and then calls [`Self::reconcile`].
    pub(super) fn reconcile_alone(
        &self,
        machine: &Machine,
        guard: &Guard,
    ) -> Result<(), DaemonError> {
        if guard.borrowing().phase == Phase::Lent {
            return Ok(());
        }
        self.reconcile(machine, guard, &machine.swap_right())
    }

    /// Returns the guard of a VM's loan, after its state was reconciled; `None` if there is no
    /// loan.
    pub(super) fn reconciled_guard(
        &self,
        machine: &Machine,
        right: &SwapRight<'_>,
    ) -> Result<Option<Arc<Guard>>, DaemonError> {
        let guard = || self.guard(machine.name());
        if let Some(guard) = guard() {
            self.reconcile(machine, &guard, right)?;
        }
        Ok(guard())
    }

    /// Ends the watch of a loan that is no longer used: releases its leases and removes its note.
    pub(super) fn drop_note(&self, machine: &Machine, _: &SwapRight<'_>) {
        remove_note(machine);
        self.end(self.take(machine));
    }

    /// Takes a VM's loan out of the list. The caller ends it with [`Self::end`].
    pub(crate) fn take(&self, machine: &Machine) -> Option<Arc<Guard>> {
        self.guards.lock().remove(machine.name())
    }

    /// Ends the watch of a loan, and releases its leases.
    pub(crate) fn end(&self, loan: Option<Arc<Guard>>) {
        if let Some(guard) = loan {
            guard.stop();
            let_go(&self.leases, &guard);
        }
    }

    /// Removes block nodes and files of the swap disk that the device does not use: the old ones
    /// after a move, the new ones after a failed move.
    pub(super) fn clean_up(machine: &Machine) {
        let tidied = (|| -> Result<(), DaemonError> {
            graph::cancel(&|| machine.monitor())?;
            let mut qmp = machine.monitor();
            let top = graph::top(&mut qmp, machine.name())?;
            for generation in 0..graph::free_generation(&mut qmp)? {
                if generation != top.generation {
                    graph::remove_generation(&mut qmp, generation)?;
                }
            }
            drop(qmp);
            let mut left = Vec::new();
            let is_left = |path: &&PathBuf| is_swap_file(path) && Some(*path) != top.file.as_ref();
            let change = |files: &mut Vec<PathBuf>| {
                left = files.iter().filter(is_left).cloned().collect();
            };
            let directory = machine.vm().directory();
            let noted = state_error(directory.map_or(Path::new(""), VmDirectory::path));
            machine.vm().change_temporary(change).map_err(noted)?;
            for file in &left {
                match std::fs::remove_file(file) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(noted(error));
                    }
                    _ => {}
                }
            }
            // A file is removed from the list only after it was deleted.
            let change = |files: &mut Vec<PathBuf>| files.retain(|file| !left.contains(file));
            machine.vm().change_temporary(change).map_err(noted)
        })();
        if let Err(error) = tidied {
            warn!(
                vm = machine.name(),
                error = chain(&error),
                "cannot remove unused block nodes or files of the swap disk; the disk's next move tries again"
            );
        }
    }
}

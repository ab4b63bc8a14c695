//! Whether a swap disk is lent, after QEMU has kept that from us: its answer to the end of a switch was lost, or came too late.
//!
//! Until QEMU answers everything stays that the disk may use: relays, wires, leases, the note.

use std::sync::Arc;

use memfold_lend::graph::{self, GraphError, Phase};
use memfold_vm::VmDirectory;
use tracing::{info, warn};

use super::borrowing::{swap_directory, write_note};
use super::machine::Machine;
use super::watched::Guard;
use super::{Daemon, DaemonError};

impl Daemon {
    /// Finds out whether a swap disk is lent, if QEMU has kept that from us: until it answers, everything stays. The swap right is held by
    /// the caller.
    pub(super) fn settle(
        &self,
        machine: &Machine,
        directory: &VmDirectory,
        guard: &Guard,
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
            is_lent, "QEMU says what its swap disk uses"
        );
        self.tidy(machine);
        if !is_lent {
            self.drop_note(machine, directory);
            return Ok(());
        }
        guard.state().borrowing.phase = Phase::Lent;
        borrowing.phase = Phase::Lent;
        if let Err(error) = write_note(directory, &borrowing) {
            warn!(vm = machine.name(), %error, "its note can't be written");
        }
        Ok(())
    }

    /// The same, by whoever has no right yet.
    pub(super) fn settle_alone(&self, machine: &Machine, guard: &Guard) -> Result<(), DaemonError> {
        if guard.borrowing().phase == Phase::Lent {
            return Ok(());
        }
        let directory = swap_directory(machine)?;
        let _alone = machine.swap_right();
        self.settle(machine, directory, guard)
    }

    /// Who watches what a VM has borrowed, if it has.
    pub(super) fn settled_guard(
        &self,
        machine: &Machine,
        directory: &VmDirectory,
    ) -> Result<Option<Arc<Guard>>, DaemonError> {
        let guard = || self.lending.guards().get(machine.name()).cloned();
        if let Some(guard) = guard() {
            self.settle(machine, directory, &guard)?;
        }
        Ok(guard())
    }
}

//! Moves the swap disks of this host's VMs to RAM that other hosts lend, watches the lenders, and
//! moves the disks back. The drawing shows the modules in the order in which one loan of RAM needs
//! them.
//!
//! ```text
//!   again, automatic --> borrow --> watcher --> heal --> renew, give_back --> reconcile --> guards, notes, relays
//! ```
//! The daemon may be killed at any instant, so the next daemon must be able to complete or undo
//! each operation. The block nodes that QEMU uses show where a disk really is. The file
//! `borrowed.json` names the leases, and is written before the first lease is used.
//! [`SwapDisks::clean_up`] removes unused block nodes and files.

use std::collections::BTreeMap;
use std::sync::Arc;

use memfold_api::{Borrowed, VmSwap};
use memfold_host::progress::Step;
use parking_lot::Mutex;

use self::guard::Guard;
use crate::leases::Leases;
use crate::move_progress::Moves;
use crate::vm_registry::VmRegistry;

mod again;
mod automatic;
mod borrow;
mod failures;
#[cfg(test)]
mod fixtures;
mod give_back;
mod guard;
mod heal;
mod note;
mod reconcile;
mod relays;
mod renew;
mod watcher;

/// Service that moves the swap disks of this host's VMs to lent RAM and back.
#[derive(Debug)]
pub struct SwapDisks {
    registry: Arc<VmRegistry>,
    leases: Arc<Leases>,
    /// Watched loans, by the VM's name.
    guards: Mutex<BTreeMap<String, Arc<Guard>>>,
    /// Progress of the moves that are under way.
    moves: Moves,
}

impl SwapDisks {
    pub(crate) fn new(registry: Arc<VmRegistry>, leases: Arc<Leases>) -> Self {
        Self {
            registry,
            leases,
            guards: Mutex::default(),
            moves: Moves::default(),
        }
    }

    fn guard(&self, vm: &str) -> Option<Arc<Guard>> {
        self.guards.lock().get(vm).cloned()
    }

    fn all(&self) -> Vec<Arc<Guard>> {
        self.guards.lock().values().cloned().collect()
    }

    /// Returns all loans of VMs.
    pub(crate) fn borrowed(&self) -> Vec<Borrowed> {
        self.all().iter().map(|guard| guard.borrowed()).collect()
    }

    /// Returns the lent swap disks and their places, by the VM's name.
    pub(crate) fn swaps(&self) -> BTreeMap<String, VmSwap> {
        let guards = self.guards.lock();
        let swap = |(vm, guard): (&String, &Arc<Guard>)| (vm.clone(), guard.swap());
        guards.iter().map(swap).collect()
    }

    /// Returns how far the move of a VM's swap disk to lent RAM or back has come; `None` if the
    /// disk is not being moved.
    #[must_use]
    pub fn progress(&self, vm: &str) -> Option<Step> {
        self.moves.lock().get(vm).cloned()
    }

    /// Returns the names of VMs whose swap disk should have a copy on this host and has none.
    pub(crate) fn without_copy(&self) -> Vec<String> {
        let guards = self.all();
        let without = guards.iter().filter(|guard| guard.borrowing().copy_failed);
        without.map(|guard| guard.vm.clone()).collect()
    }

    /// Returns the PIDs of the relays between VMs and lenders.
    pub(crate) fn relays(&self) -> Vec<i32> {
        let relays = self.all().into_iter().flat_map(|guard| guard.relays());
        relays.map(|relay| relay.process.pid).collect()
    }

    /// Stops watching the loans of VMs. The loans last until their leases end, or until the next
    /// daemon continues them.
    pub(crate) fn stop(&self) {
        for guard in self.guards.lock().values() {
            guard.stop();
        }
    }
}

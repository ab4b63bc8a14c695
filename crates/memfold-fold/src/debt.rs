//! Computes the debt: the memory that the host would need if guests wrote to all pages that several
//! VMs share or that are not in memory. A write gives the guest a private copy of such a page.

use std::sync::mpsc::SyncSender;
use std::time::Instant;

use memfold_sys::cpu::thread_cpu_ns;

use super::state::Engine;

/// Pages for which one VM would need memory if its guest wrote to them. Each page is counted once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmOwed {
    /// Name of the VM.
    pub name: String,
    /// Pages that map the page store and that the guest has not written since they were folded.
    pub folded_pages: u64,
    /// Pages that map data of the snapshot's image and that the guest has not written.
    pub snapshot_pages: u64,
    /// Pages that were discarded because they held only zeroes, and that the guest has not written
    /// since.
    pub zero_pages: u64,
    /// Pages of the guest's page cache, as the VM's agent reports them.
    pub cached_pages: u64,
}

/// Memory that all VMs would need if their guests wrote to all shared pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owed {
    /// Figures of each VM.
    pub vms: Vec<VmOwed>,
    /// Memory that page stores use, in bytes. It becomes free when guests have written to all
    /// folded pages.
    pub store_bytes: u64,
    /// Number of store pages that were freed for this answer.
    pub given_back_pages: u64,
}

impl Engine {
    /// Stops all new sharing for a reason, or allows it again (`None`).
    pub(super) fn set_braked(&mut self, why: Option<String>) {
        if self.braked.is_some() && why.is_none() {
            self.resumed = Instant::now();
        }
        self.braked = why;
        self.sweep_wanted = true;
    }

    pub(super) fn tell_owed(&mut self, look: bool, give_back: bool, answer: &SyncSender<Owed>) {
        let began_ns = thread_cpu_ns();
        let owed = self.owed(look, give_back);
        // This work counts as reporting, not as folding.
        self.reports_ns += thread_cpu_ns() - began_ns;
        // The receiver may be gone.
        let _ = answer.send(owed);
        self.charged_ns = thread_cpu_ns() + self.library_cpu_ns;
    }

    /// Returns the debt. Without `look`, the result is a sum of counters from the last sync with
    /// the kernel's tables. Pages that guests wrote since then are still counted, so the figure is
    /// too high rather than too low.
    pub(super) fn owed(&mut self, look: bool, give_back: bool) -> Owed {
        let punched = |engine: &Self| engine.domains.values().map(|d| d.punched).sum::<u64>();
        let before = punched(self);
        if give_back {
            // `reclaim` first syncs the VMs of a domain.
            for name in self.domains.keys().cloned().collect::<Vec<_>>() {
                self.reclaim(&name);
            }
        } else if look {
            self.sync_all();
        }
        let vms = self.vms.values().map(|vm| VmOwed {
            name: vm.stats.name.clone(),
            folded_pages: vm.stats.mapped_pages.saturating_sub(vm.stats.copied_pages),
            snapshot_pages: vm.stats.template_shared_pages,
            zero_pages: vm.stats.zero_saved_pages,
            cached_pages: vm.table.cached_pages(),
        });
        Owed {
            vms: vms.collect(),
            store_bytes: self
                .domains
                .values()
                .map(|d| d.store.held().map_or(0, |held| held.0))
                .sum(),
            given_back_pages: punched(self) - before,
        }
    }

    /// Returns when the next sync with the kernel's tables is due while sharing is stopped.
    pub(super) fn look_again_due(&mut self, now: Instant) -> Option<Instant> {
        let interval = self.settings.sync_interval;
        let foldable = self.vms.values().filter(|vm| vm.is_foldable());
        let due = foldable.filter_map(|vm| vm.look_due(interval)).min()?;
        let budget = self.cpu.wait(now).unwrap_or_default();
        Some(due.max(now + budget))
    }
}

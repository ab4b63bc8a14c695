//! Computes the debt: the memory that the host would need if guests wrote to all pages that several
//! VMs share, and to all pages that were discarded because they held only zeroes. Each write gives
//! the guest a page of its own.

use std::sync::mpsc::SyncSender;
use std::time::Instant;

use memfold_sys::cpu::thread_cpu_ns;

use super::state::Engine;

/// One VM's part of the debt: numbers of pages for which the host would need memory if the guest
/// wrote to them. Each page is counted once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmOwed {
    /// Name of the VM.
    pub name: String,
    /// Number of the VM's pages that map the page store and that the guest has not written since
    /// they were folded.
    pub folded_pages: u64,
    /// Number of the VM's pages that map data of its snapshot's image and that the guest has not
    /// written.
    pub snapshot_pages: u64,
    /// Number of the VM's pages that memfold discarded because they held only zeroes, and that the
    /// guest has not written since.
    pub zero_pages: u64,
    /// Number of pages in the guest's page cache, as the VM's agent reports them, whether they are
    /// shared or not.
    pub cached_pages: u64,
}

/// The debt: memory that the host would need if guests wrote to all pages that they share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owed {
    /// Each VM's part of the debt.
    pub vms: Vec<VmOwed>,
    /// Memory that all page stores use, in bytes. The host gets this memory back once guests have
    /// written to all folded pages.
    pub store_bytes: u64,
    /// Number of unneeded store pages that the engine freed before it computed the debt; 0 if it
    /// was not asked to free any.
    pub given_back_pages: u64,
}

impl Engine {
    /// Makes the engine share no more pages, for the given reason, or allows sharing again
    /// (`None`).
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
                self.reclaim(&name, true);
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
}

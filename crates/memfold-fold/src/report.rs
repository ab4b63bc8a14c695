//! Computes statistics about folding: of the fold engine, of each VM, and of each trust domain.

use memfold_sys::cpu::thread_cpu_ns;

use super::guest::VmId;
use super::state::{Engine, VmState};
use super::stats::{DomainStats, EngineStats, VmStats};

impl Engine {
    /// Returns the present statistics of folding. Callers call [`Engine::sync_all`] before.
    pub(super) fn report(&mut self) -> EngineStats {
        self.settle_matches();
        let ids: Vec<VmId> = self.vms.keys().copied().collect();
        let vms = ids.iter().filter_map(|id| self.vm_report(*id)).collect();
        let domains = self.domains.iter().map(|(name, domain)| DomainStats {
            domain: name.clone(),
            store_dev: domain.store.identity().dev,
            store_ino: domain.store.identity().ino,
            store_bytes: domain.store.held().map_or(0, |b| b.0),
            store_cap_bytes: domain.store.cap().0,
            store_full: domain.full,
            appended_pages: domain.appended,
            punched_pages: domain.punched,
            not_freed: domain.not_freed.clone(),
        });
        let tables: u64 = self.vms.values().map(|vm| vm.table.own_bytes()).sum();
        let contents: u64 = self.domains.values().map(|d| d.contents.own_bytes()).sum();
        let waiting = |vm: &VmState| (vm.stack.len() + vm.wait_for_pause.len()) as u64;
        EngineStats {
            paused: self.paused,
            braked: self.braked.clone(),
            engine_cpu_s: thread_cpu_ns() as f64 / 1e9,
            library_cpu_s: self.library_cpu_ns as f64 / 1e9,
            cpu_share: self.settings.cpu_share,
            pages_per_second: self.settings.pages_per_second,
            hint_to_fold_p50_s: self.latencies.percentile_s(50),
            hint_to_fold_p95_s: self.latencies.percentile_s(95),
            hints_waiting: self.vms.values().map(waiting).sum(),
            own_bytes: tables + contents,
            vms,
            domains: domains.collect(),
            ..self.stats.clone()
        }
    }

    fn vm_report(&self, id: VmId) -> Option<VmStats> {
        let vm = self.vms.get(&id)?;
        let (matched_pages, matched_folded_pages) = vm.table.count_matched();
        Some(VmStats {
            cached_pages: vm.table.cached_pages(),
            cached_runs: vm.table.cached_runs(),
            matched_pages,
            matched_folded_pages,
            hints_dropped: vm.stack.dropped(),
            ..vm.stats.clone()
        })
    }
}

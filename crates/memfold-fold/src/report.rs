//! Computes statistics about folding: of the fold engine, of each VM, and of each trust domain.

use memfold_sys::cpu::thread_cpu_ns;

use super::content::Member;
use super::guest::VmId;
use super::state::{Engine, VmState};
use super::stats::{DomainStats, EngineStats, VmStats};

impl Engine {
    /// Returns the present statistics of folding. Callers call [`Engine::sync_all`] before.
    pub(super) fn report(&mut self) -> EngineStats {
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
        let domain = self.domains.get(&vm.domain)?;
        let mut stats = VmStats {
            cached_pages: vm.table.cached_pages(),
            hints_dropped: vm.stack.dropped(),
            ..vm.stats.clone()
        };
        for at in 0..vm.table.pages() {
            let Some((file, page)) = vm.table.cached(at) else {
                continue;
            };
            let before = at.checked_sub(1).and_then(|before| vm.table.cached(before));
            stats.cached_runs += u64::from(before != page.checked_sub(1).map(|page| (file, page)));
            let member = Member { vm: id, file };
            let content = domain.contents.of(member);
            let Some(content) = content.and_then(|c| domain.contents.get(c)) else {
                continue;
            };
            let stored = content.store_page(page);
            let caches = |m: &Member| {
                let other = self.vms.get(&m.vm);
                other.is_some_and(|other| other.table.place(m.file, page).is_some())
            };
            let elsewhere = || content.members.iter().any(|m| *m != member && caches(m));
            if stored.is_some() || elsewhere() {
                stats.matched_pages += 1;
                let mapped = vm.table.mapped(at);
                let folded = mapped.is_some_and(|m| m.shared && Some(m.store_page) == stored)
                    || vm.table.is_template(at);
                stats.matched_folded_pages += u64::from(folded);
            }
        }
        Some(stats)
    }
}

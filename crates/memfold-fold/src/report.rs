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
        let mut end = None;
        for (at, pages, file, page) in vm.table.cached_runs() {
            stats.cached_runs += u64::from(end != Some((at, file, page)));
            end = Some((at + pages, file, page.wrapping_add(pages)));
        }
        let mapped = vm.table.all_mapped();
        for (file, piece, places) in vm.table.all_pieces() {
            let member = Member { vm: id, file };
            let content = domain.contents.of(member);
            let Some(content) = content.and_then(|c| domain.contents.get(c)) else {
                continue;
            };
            let stored = content.store_pages(piece);
            let is_set =
                |bits: u64, (entry, bit): (&u32, u32)| bits | u64::from(*entry != 0) << bit;
            let cached = places.iter().zip(0..).fold(0, is_set);
            let mut matched = stored.iter().zip(0..).fold(0, is_set) & cached;
            for other in content.members.iter().filter(|other| **other != member) {
                if matched == cached {
                    break;
                }
                if let Some(vm) = self.vms.get(&other.vm) {
                    matched |= vm.table.cached_in_piece(other.file, piece) & cached;
                }
            }
            stats.matched_pages += u64::from(matched.count_ones());
            let of_piece = places.iter().zip(&stored).enumerate();
            for (_, (place, &stored)) in of_piece.filter(|(page, _)| matched >> page & 1 == 1) {
                let at = place - 1;
                let maps = stored != 0 && mapped[at as usize] == stored;
                let folded = maps && vm.table.is_shared(at) || vm.table.is_template(at);
                stats.matched_folded_pages += u64::from(folded);
            }
        }
        Some(stats)
    }
}

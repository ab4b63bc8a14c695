//! Keeps for each VM which of its cached pages have a match in another VM or in the page store.
//! Each change of a table or of the index of contents changes only the pages that it concerns, so
//! that reports need not search the tables.

use super::domain::Domain;
use super::guest::VmId;
use super::member::Member;
use super::state::{Engine, VmState};
use super::vm_map::VmMap;

impl Engine {
    /// Records in the index of contents which pages of files VM `id` caches now, after a message of
    /// its agent.
    pub(super) fn note_changes(&mut self, id: VmId) {
        let Some(vm) = self.vms.get_mut(&id) else {
            return;
        };
        let Some(domain) = self.domains.get_mut(&vm.domain) else {
            return;
        };
        for change in vm.table.take_changes() {
            let member = Member {
                vm: id,
                file: change.file,
            };
            domain
                .contents
                .count_cached(member, change.pages, change.cached);
        }
        settle(&mut self.vms, domain);
    }

    /// Updates which cached pages have a match, after changes of the index of contents.
    pub(super) fn settle_matches(&mut self) {
        for domain in self.domains.values_mut() {
            settle(&mut self.vms, domain);
        }
    }
}

fn settle(vms: &mut VmMap<VmState>, domain: &mut Domain) {
    for (member, pages) in domain.contents.take_unsettled() {
        let Some(vm) = vms.get_mut(&member.vm) else {
            continue;
        };
        let content = domain.contents.of(member);
        let content = content.and_then(|id| domain.contents.get(id));
        vm.table.set_matched(member.file, pages, |piece| {
            content.map_or(0, |content| content.matched(piece))
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::packed::tests::numbers;
    use crate::random_changes::step;
    use crate::settings::EngineSettings;

    /// Counts runs, matched pages and shared matched pages of a VM by a search of all tables.
    fn count(engine: &Engine, id: VmId) -> (u64, u64, u64) {
        let vm = &engine.vms[&id];
        let domain = &engine.domains[&vm.domain];
        let mut counts = (0, 0, 0);
        let mut next = None;
        let mut holders: HashMap<_, u32> = HashMap::new();
        for (&id, vm) in &engine.vms {
            for (file, page) in (0..vm.table.pages()).filter_map(|at| vm.table.cached(at)) {
                let content = domain.contents.of(Member { vm: id, file });
                if let Some(content) = content {
                    *holders.entry((content, page)).or_default() += 1;
                }
            }
        }
        for at in 0..vm.table.pages() {
            let cached = vm.table.cached(at);
            counts.0 += u64::from(cached.is_some() && cached != next);
            next = cached.map(|(file, page)| (file, page + 1));
            let content = cached.and_then(|(file, page)| {
                let content = domain.contents.of(Member { vm: id, file })?;
                Some((content, page))
            });
            let Some((content, page)) = content else {
                continue;
            };
            let stored = domain.contents.get(content).unwrap().store_page(page);
            if stored.is_some() || holders[&(content, page)] > 1 {
                let shown = vm.table.mapped(at).is_some_and(|mapped| mapped.shared);
                counts.1 += 1;
                counts.2 += u64::from(shown || vm.table.is_template(at));
            }
        }
        counts
    }

    #[test]
    fn counts_of_runs_and_matched_pages_agree_with_a_search_of_all_tables_after_random_changes() {
        let mut engine = Engine::new(EngineSettings::default());
        let mut random = numbers();
        let mut most = (0, 0, 0);
        for n in 0..6_000 {
            step(&mut engine, &mut random);
            if n % 7 > 0 {
                continue;
            }
            let report = engine.report();
            for (&id, stats) in engine.vms.keys().zip(&report.vms) {
                let told = (
                    stats.cached_runs,
                    stats.matched_pages,
                    stats.matched_folded_pages,
                );
                assert_eq!(told, count(&engine, id), "VM {id} after step {n}");
                most = (most.0.max(told.0), most.1.max(told.1), most.2.max(told.2));
            }
            for domain in engine.domains.values() {
                for (_, content) in domain.contents.shared() {
                    let pieces = content.shared_pieces();
                    assert!(pieces.is_sorted());
                    assert!(pieces.iter().all(|piece| content.matched(*piece) != 0));
                }
            }
        }
        assert!(most.0 > 20 && most.1 > 100 && most.2 > 50, "{most:?}");
    }
}

//! Computes when a VM is due for the kinds of work of the fold engine ([`super::schedule`]).

use std::time::Instant;

use super::guest::VmId;
use super::schedule::{KINDS, Work};
use super::settings::EngineSettings;
use super::state::{Engine, VmState};
use super::task::BATCH_PAGES;

impl VmState {
    /// Returns when the VM is due for each kind of work. A VM with a problem is due only for syncs,
    /// which show which pages of the store it still needs.
    fn due_times(&self, settings: &EngineSettings) -> [Option<Instant>; KINDS] {
        let sync = self.look_due(settings.sync_interval);
        let sync = sync.filter(|_| self.may_read_tables());
        if !self.is_foldable() {
            // In the order of `Work`.
            return [None, None, sync, None, None, None];
        }
        let hints = self.stack.due();
        let is_full = self.stack.pages() >= u64::from(BATCH_PAGES);
        [
            hints.filter(|_| is_full),
            hints.filter(|_| !is_full),
            sync,
            self.pause_due(),
            self.zero.due,
            self.back_due(),
        ]
    }
}

impl Engine {
    /// Brings the schedule up to date with the VMs that may have changed.
    pub(super) fn reschedule(&mut self) {
        for id in self.vms.take_changed() {
            let vm = self.vms.get(&id);
            let times = vm.map_or([None; KINDS], |vm| vm.due_times(&self.settings));
            self.schedule.set(id, times);
        }
    }

    /// Returns the VM that has been due for longest; `None` if none is due at `now`.
    pub(super) fn first_due(&mut self, work: Work, now: Instant) -> Option<VmId> {
        self.reschedule();
        self.schedule.due(work, now).next()
    }

    /// Brings the schedule up to date with the pairs of files of a trust domain that wait to be
    /// compared.
    pub(super) fn note_pairs(&mut self, domain: &str) {
        let due = self.domains.get(domain).and_then(|d| d.candidates.due());
        self.schedule.pairs.set(&domain.to_owned(), due);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use memfold_wire::agent::{FileFacts, FromAgent, HintRun};

    use super::*;
    use crate::packed::tests::numbers;
    use crate::random_changes::{PAGES, add, step};

    const ALL: [Work; KINDS] = [
        Work::FullBatch,
        Work::SmallBatch,
        Work::Sync,
        Work::Pause,
        Work::Zero,
        Work::FoldBack,
    ];

    #[test]
    fn syncs_of_a_vm_whose_agent_reports_nothing_more_pack_its_tables() {
        let mut engine = Engine::new(EngineSettings::default());
        add(&mut engine, 1);
        let facts = FileFacts {
            file: 1,
            path: b"/f".into(),
            size_bytes: 1 << 30,
        };
        engine.agent(1, FromAgent::Files(vec![facts]));
        let run = |at| HintRun {
            file: 1,
            page: u64::from(2 * at),
            pfn: u64::from(at),
            pages: 1,
        };
        engine.agent(1, FromAgent::Hints((0..PAGES).map(run).collect()));
        assert!(engine.vms[&1].table.has_unpacked());
        let begin = Instant::now();
        for minute in 1..=10 {
            engine.sync_due(begin + Duration::from_secs(60 * minute));
        }
        assert!(!engine.vms[&1].table.has_unpacked());
        assert_eq!(engine.vms[&1].table.cached(300), Some((1, 600)));
    }

    #[test]
    fn the_vms_that_are_due_are_those_that_a_search_of_all_vms_finds_after_random_changes() {
        let mut engine = Engine::new(EngineSettings::default());
        let mut random = numbers();
        let mut found = [0; KINDS];
        for _ in 0..4_000 {
            step(&mut engine, &mut random);
            let now = Instant::now() + Duration::from_millis(random(40_000).into());
            match random(60) {
                0 => drop(engine.take_tasks(now)),
                1 => drop(engine.sync_due(now)),
                2 => {
                    let problem = (random(2) == 0).then(|| "none".to_owned());
                    engine.set_problem(1 + random(4), problem);
                }
                _ => {}
            }
            engine.reschedule();
            for work in ALL {
                let times = engine.vms.iter().filter_map(|(&id, vm)| {
                    Some((vm.due_times(&engine.settings)[work as usize]?, id))
                });
                let mut times: Vec<(Instant, VmId)> = times.collect();
                times.sort_unstable();
                let first = times.first().map(|(due, _)| *due);
                assert_eq!(engine.schedule.first(work), first, "{work:?}");
                let due = times.iter().filter(|(due, _)| *due <= now);
                let due = due.map(|(_, id)| *id);
                assert!(engine.schedule.due(work, now).eq(due), "{work:?}");
                found[work as usize] += usize::from(first.is_some_and(|due| due <= now));
            }
        }
        // Small and full batches, syncs and searches for zero pages occurred.
        assert!(
            found[1] > 100 && found[2] > 100 && found[4] > 100,
            "{found:?}"
        );
    }
}

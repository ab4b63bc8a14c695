//! Records for each run of pages whether it could be folded. If the bytes of a file keep differing
//! from the expected ones, the fold engine skips the file for a while.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use memfold_wire::library::Outcome;
use tracing::{debug, warn};

use super::guest::VmId;
use super::hint_stack::Hint;
use super::member::Member;
use super::runs::{Group, Run, length};
use super::state::{Engine, Skip, cached_ranges, with_domain};
use super::vm_table::{Mapped, PIECE};

/// Number of differing pages of a file after which the engine judges whether to skip the file.
const JUDGE_AFTER: u32 = 4;

/// Time for which a file is skipped the first time; doubles each further time, up to an hour.
const GIVE_UP: Duration = Duration::from_secs(30);

/// Number of times that folding a busy page is tried again.
const MAX_TRIES: u8 = 4;

impl Engine {
    /// Records the outcome of a group of runs that were folded as one. Runs before the page at
    /// which the library stopped are done; the run with that page gets the outcome; later runs
    /// return to the queue.
    pub(super) fn book_group(
        &mut self,
        id: VmId,
        group: Group,
        outcome: Outcome,
        queue: &mut VecDeque<Group>,
    ) {
        let mut done = outcome.pages_done(length(&group));
        let mut runs = group.into_iter();
        for run in runs.by_ref() {
            if done >= run.pages {
                done -= run.pages;
                self.book(id, run, Outcome::Done, queue);
                continue;
            }
            self.book(id, run, outcome.at(done), queue);
            break;
        }
        let rest: Group = runs.collect();
        if !rest.is_empty() && !matches!(outcome, Outcome::Refused | Outcome::Failed { .. }) {
            queue.push_front(rest);
        }
    }

    fn book(&mut self, id: VmId, run: Run, outcome: Outcome, queue: &mut VecDeque<Group>) {
        let done = outcome.pages_done(run.pages);
        self.book_done(id, &run, done);
        let rest = match outcome {
            Outcome::Differs { .. } if self.differs(id, &run, done) => run.rest(done + 1),
            Outcome::Done | Outcome::Differs { .. } => None,
            Outcome::Busy { .. } => {
                if let Some(vm) = self.vms.get_mut(&id) {
                    vm.stats.busy_pages += 1;
                    let again = Hint {
                        file: run.file,
                        page: run.page + done,
                        pages: 1,
                        at: Instant::now(),
                        tries: run.tries + 1,
                    };
                    if run.tries < MAX_TRIES {
                        vm.stack.push(again);
                    }
                }
                run.rest(done + 1)
            }
            // The run did not fail; it continues at the next pause, or after a sweep.
            Outcome::Late => Some(run),
            Outcome::Hole { .. } => {
                if let Some(vm) = self.vms.get_mut(&id) {
                    vm.table.refuse(run.index + done);
                }
                run.rest(done + 1)
            }
            Outcome::Refused => {
                debug!(
                    ?run,
                    "memfold's library in QEMU refused an order: the daemon's record of the VM's mappings is out of date"
                );
                if let Some(vm) = self.vms.get_mut(&id) {
                    vm.active = true;
                    vm.maps_stale = true;
                }
                self.sweep_wanted = true;
                None
            }
            Outcome::Failed { errno, .. } => {
                if let Some(vm) = self.vms.get_mut(&id) {
                    warn!(
                        vm = vm.stats.name,
                        errno,
                        pages = run.pages,
                        "cannot map shared pages into the VM, this page range stays unshared; if errno is 12 (ENOMEM), raise vm.max_map_count"
                    );
                    if errno == rustix::io::Errno::NOMEM.raw_os_error() {
                        vm.mappings = self.settings.max_mappings;
                    }
                }
                None
            }
        };
        if let Some(rest) = rest {
            queue.push_front(vec![rest]);
        }
    }

    /// Records the first `done` pages of a run as folded.
    fn book_done(&mut self, id: VmId, run: &Run, done: u32) {
        let Some((vm, domain)) = with_domain(&mut self.vms, &mut self.domains, id) else {
            return;
        };
        domain.contents.add_references(run.store_page, done);
        for step in 0..done {
            let at = run.index + step;
            if let Some(before) = vm.table.mapped(at) {
                domain.contents.count_reference(before.store_page, false);
            }
            let store_page = run.store_page + step;
            let shared = true;
            vm.table.set_mapped(at, Some(Mapped { store_page, shared }));
        }
        if done > 0 {
            vm.active = true;
            *(if run.again {
                &mut vm.stats.refolded_pages
            } else {
                &mut vm.stats.folded_pages
            }) += u64::from(done);
            let member = Member {
                vm: id,
                file: run.file,
            };
            let mut alias = false;
            if domain.contents.file(member).is_some() {
                domain.contents.update_file(member, |file| {
                    file.equal = file.equal.saturating_add(done);
                    alias = file.alias;
                });
            }
            vm.skips.remove(&run.file);
            let stats = &mut self.stats;
            *(if alias {
                &mut stats.case_different_path_same_content
            } else {
                &mut stats.case_same_path_same_content
            }) += u64::from(done);
            // Hints from a pause of folding are not counted, because they would only measure the
            // length of the pause.
            if let Some(at) = run.at.filter(|at| *at >= self.resumed) {
                self.latencies
                    .count(at.elapsed().as_millis(), u64::from(done));
            }
        }
    }

    /// Records that page `offset` of `run` differs from the store. Returns whether the rest of the
    /// run is worth trying.
    fn differs(&mut self, id: VmId, run: &Run, offset: u32) -> bool {
        let Some(vm) = self.vms.get_mut(&id) else {
            return false;
        };
        let Some(domain) = self.domains.get_mut(&vm.domain) else {
            return false;
        };
        vm.stats.differing_pages += 1;
        vm.table.refuse(run.index + offset);
        let store_page = run.store_page + offset;
        if domain.contents.facts(store_page).references == 0 {
            // No VM maps this store page: it may have been copied before the guest's page was read
            // from disk.
            domain.contents.unindex_store_page(store_page);
            // The VM counts as active, so that a sync soon frees the store page.
            vm.active = true;
        }
        let member = Member {
            vm: id,
            file: run.file,
        };
        let Some(mut file) = domain.contents.file(member) else {
            return false;
        };
        file.differing = file.differing.saturating_add(1);
        domain.contents.update_file(member, |known| *known = file);
        let stats = &mut self.stats;
        *(if file.alias {
            &mut stats.case_different_path_different_content
        } else {
            &mut stats.case_same_path_different_content
        }) += 1;
        if file.differing < JUDGE_AFTER || file.differing <= file.equal.saturating_mul(2) {
            return true;
        }
        domain.contents.update_file(member, |file| {
            file.equal = 0;
            file.differing = 0;
        });
        let cached = |m| cached_ranges(&self.vms, m);
        let is_moved = domain.contents.try_variant(member, &cached);
        let Some(vm) = self.vms.get_mut(&id) else {
            return false;
        };
        if is_moved {
            for piece in vm.table.pieces(run.file) {
                let first = piece * PIECE;
                vm.table.set_dirty(run.file, first..first + PIECE, false);
            }
            vm.offer_file(run.file, Instant::now());
        } else {
            let times = vm.skips.get(&run.file).map_or(0, |skip| skip.times);
            let pause = GIVE_UP
                .saturating_mul(1 << times.min(7))
                .min(Duration::from_secs(3600));
            let skip = Skip {
                times: times.saturating_add(1),
                until: Instant::now() + pause,
            };
            vm.skips.insert(run.file, skip);
            self.stats.files_given_up += 1;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use memfold_wire::agent::{FileFacts, FromAgent, HintRun};
    use memfold_wire::library::{Advice, Order, Reply};

    use super::*;
    use crate::guest::Refold;
    use crate::random_changes::{FakeGuest, PAGES, layout, ram};
    use crate::settings::EngineSettings;

    /// Adds two VMs that cache a file in all of their RAM, at the addresses in `layout`. Their
    /// libraries have no time for any run. Returns the number of their orders to fold pages.
    fn two_slow_vms(engine: &mut Engine, layout: &memfold_vm::RamLayout) -> Arc<AtomicU32> {
        let orders = Arc::new(AtomicU32::new(0));
        for id in [1, 2] {
            let orders = orders.clone();
            let mut guest = FakeGuest::new(move |order| {
                let Order::Fold { runs, .. } = order else {
                    return Reply::Ok;
                };
                let orders = orders.fetch_add(1, Ordering::SeqCst);
                assert!(orders < 100, "orders are repeated without end");
                Reply::Outcomes {
                    outcomes: vec![Outcome::Late; runs.len()],
                    cpu_ns: 0,
                    stopped_ns: 0,
                }
            });
            guest.refold = Refold::Live;
            let domain = Some(format!("slow-{}", std::process::id()));
            let (name, advice) = (format!("vm{id}"), [Advice::default()]);
            let guest = Box::new(guest);
            engine.add(id, name, domain, layout.clone(), &advice, guest, None);
            let facts = FileFacts {
                file: 1,
                path: b"/f".into(),
                size_bytes: 1 << 30,
            };
            let run = HintRun {
                file: 1,
                page: 0,
                pfn: 0,
                pages: PAGES,
            };
            engine.agent(id, FromAgent::Files(vec![facts]));
            engine.agent(id, FromAgent::Hints(vec![run]));
        }
        engine.sweep_wanted = false;
        orders
    }

    /// Folds what the guests' hints, or the sweep, name now.
    fn fold(engine: &mut Engine) -> usize {
        let tasks = engine.take_tasks(Instant::now() + Duration::from_secs(10));
        engine.fold(&tasks);
        tasks.len()
    }

    #[test]
    fn an_order_without_enough_time_is_not_repeated_at_once_and_a_sweep_tries_its_pages_again() {
        let (_ram, layout) = ram(PAGES);
        let mut engine = Engine::new(EngineSettings::default());
        let orders = two_slow_vms(&mut engine, &layout);
        assert_eq!(fold(&mut engine), 2);
        assert_eq!(orders.load(Ordering::SeqCst), 2);
        assert!(engine.sweep_wanted);
        for id in [1, 2] {
            let vm = &engine.vms[&id];
            assert!(vm.maps_stale && vm.is_foldable());
        }
        engine.sweep();
        fold(&mut engine);
        assert_eq!(orders.load(Ordering::SeqCst), 4);
    }

    #[test]
    fn pages_that_could_not_be_copied_into_the_store_are_not_compared_with_it() {
        let mut engine = Engine::new(EngineSettings::default());
        // Nothing is mapped at these addresses.
        let orders = two_slow_vms(&mut engine, &layout(PAGES));
        assert_eq!(fold(&mut engine), 2);
        assert_eq!(orders.load(Ordering::SeqCst), 0);
        for id in [1, 2] {
            let table = &mut engine.vms.get_mut(&id).unwrap().table;
            assert!((0..PAGES).all(|at| table.plan(at) && !table.is_refused(at)));
        }
    }
}

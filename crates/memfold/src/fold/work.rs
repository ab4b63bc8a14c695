//! One turn of the engine: from the newest hints to orders and their outcomes.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use memfold_sys::pagemap::{Filter, Pagemap, category};
use memfold_units::{HUGE_PAGE_PAGES, Hva};
use memfold_wire::library::{FoldRun, Freeze, MAX_RUNS, Order, Reply};

use super::content::{ContentId, Member};
use super::engine::{Domain, Engine, VmState, note_store_error};
use super::runs::{Group, Run, group, length, spare_huge_pages};
use super::stack::Hint;
use super::table::{Index, PIECE};
use super::{GuestError, VmId, budget};
use crate::store::StoreError;

/// Pages taken from the stacks for one batch.
const BATCH_PAGES: u32 = 2048;

/// Pages in one order, so that the library answers within about a millisecond.
const ORDER_PAGES: u32 = 2048;

/// Time between two sweeps over everything that is matched and not folded.
pub(super) const SWEEP_INTERVAL: Duration = Duration::from_secs(10);

/// A range of one content to bring into order in all VMs.
struct Task {
    domain: String,
    content: ContentId,
    vm: VmId,
    hint: Hint,
    swept: bool,
}

impl Engine {
    /// Does the most useful thing that is due, once.
    pub(super) fn turn(&mut self, now: Instant) {
        let tasks = self.take_tasks(now);
        if !tasks.is_empty() {
            return self.fold(&tasks);
        }
        if self.sync_due(now) || self.pause_due(now) || self.sample_due(now) || self.zero_due(now) {
            return;
        }
        if self.sweep_wanted && now >= self.last_sweep + SWEEP_INTERVAL {
            self.sweep();
        }
    }

    /// The newest settled hints, VM by VM in turn, until they make a batch.
    fn take_tasks(&mut self, now: Instant) -> Vec<Task> {
        let allowed = self
            .rate
            .as_mut()
            .map_or(u64::MAX, |rate| rate.available(now).max(1));
        let limit = u32::try_from(allowed).unwrap_or(u32::MAX).min(BATCH_PAGES);
        let mut order: Vec<VmId> = self.vms.keys().copied().collect();
        let next = order.partition_point(|&id| id <= self.last_turn);
        order.rotate_left(next);
        let mut tasks = Vec::new();
        let mut pages = 0;
        for id in order {
            let Some(vm) = self
                .vms
                .get_mut(&id)
                .filter(|vm| vm.stats.problem.is_none())
            else {
                continue;
            };
            let Some(domain) = self.domains.get(&vm.domain) else {
                continue;
            };
            while pages < limit {
                let Some(hint) = vm.stack.pop(now) else { break };
                let Some(content) = domain.contents.of(Member {
                    vm: id,
                    file: hint.file,
                }) else {
                    continue;
                };
                self.last_turn = id;
                if vm
                    .files
                    .get(&hint.file)
                    .and_then(|f| f.skip_until)
                    .is_some_and(|until| now < until)
                {
                    continue;
                }
                pages += hint.pages;
                tasks.push(Task {
                    domain: vm.domain.clone(),
                    content,
                    vm: id,
                    hint,
                    swept: false,
                });
            }
        }
        tasks
    }

    /// Brings ranges of contents into order: fills the store where two VMs have pages that it lacks, and folds every
    /// cached page of them that isn't folded.
    fn fold(&mut self, tasks: &[Task]) {
        let mut runs: BTreeMap<VmId, Vec<Run>> = BTreeMap::new();
        let mut planned = HashSet::new();
        for vm in self
            .vms
            .values_mut()
            .filter(|vm| vm.stats.problem.is_none())
        {
            vm.live = vm.guest.refold_live();
        }
        // In the order of guest memory, so that files which lie side by side there do so in the store: then their runs join.
        let mut tasks: Vec<&Task> = tasks.iter().collect();
        tasks.sort_by_cached_key(|task| (task.vm, self.first_place(task)));
        for task in tasks {
            self.fill(task);
            self.collect(task, &mut runs, &mut planned);
        }
        for (id, runs) in runs {
            self.fold_vm(id, runs);
        }
    }

    fn first_place(&self, task: &Task) -> Option<Index> {
        self.vms
            .get(&task.vm)?
            .table
            .place(task.hint.file, task.hint.page)
    }

    /// Members of a content whose VMs can be folded and whose file isn't given up.
    fn members(&self, task: &Task) -> Vec<Member> {
        let now = Instant::now();
        let Some(content) = self
            .domains
            .get(&task.domain)
            .and_then(|d| d.contents.get(task.content))
        else {
            return Vec::new();
        };
        content
            .members
            .iter()
            .filter(|m| {
                self.vms.get(&m.vm).is_some_and(|vm| {
                    let given_up = vm
                        .files
                        .get(&m.file)
                        .and_then(|f| f.skip_until)
                        .is_some_and(|until| now < until);
                    vm.stats.problem.is_none() && !given_up
                })
            })
            .copied()
            .collect()
    }

    /// Appends to the store what at least two guest pages cache and it lacks.
    fn fill(&mut self, task: &Task) {
        let mut members = self.members(task);
        // The VM of the hint goes first: its page was read last.
        members.sort_by_key(|m| m.vm != task.vm);
        let Some(domain) = self.domains.get_mut(&task.domain) else {
            return;
        };
        let end = task.hint.page + task.hint.pages;
        let mut page = task.hint.page;
        while page < end {
            let lacks = |domain: &Domain, page| {
                domain
                    .contents
                    .get(task.content)
                    .is_some_and(|c| c.store_page(page).is_none())
            };
            if !lacks(domain, page) {
                page += 1;
                continue;
            }
            let holders = holders(&self.vms, &members, page);
            if let Some(stored) = adoptable(&self.vms, domain, &holders) {
                domain.contents.index(task.content, page, stored);
                page += 1;
                continue;
            }
            let [(source, first), _, ..] = holders[..] else {
                page += 1;
                continue;
            };
            let Some(vm) = self.vms.get(&source.vm) else {
                return;
            };
            let mut length = 1;
            while page + length < end
                && lacks(domain, page + length)
                && usable(vm, source.file, page + length) == Some(first + length)
                && vm.table.adjacent(first + length - 1, first + length)
                && self::holders(&self.vms, &members, page + length).len() > 1
            {
                length += 1;
            }
            let Some(hva) = vm.table.hva(first) else {
                return;
            };
            match domain.store.append(vm.guest.pid(), hva, u64::from(length)) {
                Ok((stored, copied)) => {
                    domain.full = false;
                    domain.appended += copied.0;
                    for step in 0..u32::try_from(copied.0).unwrap_or(0) {
                        let Ok(stored) = u32::try_from(stored.0 + u64::from(step)) else {
                            break;
                        };
                        domain.contents.index(task.content, page + step, stored);
                    }
                }
                Err(
                    error @ (StoreError::Full { .. }
                    | StoreError::Exhausted
                    | StoreError::Io { .. }),
                ) => {
                    note_store_error(&task.domain, domain, &error);
                    self.sweep_wanted = true;
                    return;
                }
            }
            page += length;
        }
    }

    /// Finds the runs of every VM in the task's range that are to be folded. `planned`: pages that an earlier task of the
    /// batch has found already (two VMs read the same file at the same time).
    fn collect(
        &mut self,
        task: &Task,
        runs: &mut BTreeMap<VmId, Vec<Run>>,
        planned: &mut HashSet<(VmId, Index)>,
    ) {
        let members = self.members(task);
        let Some(domain) = self.domains.get(&task.domain) else {
            return;
        };
        let Some(content) = domain.contents.get(task.content) else {
            return;
        };
        for member in members {
            let Some(vm) = self.vms.get_mut(&member.vm) else {
                continue;
            };
            let list = runs.entry(member.vm).or_default();
            let mut current: Option<Run> = None;
            let mut wait = false;
            for page in task.hint.page..task.hint.page + task.hint.pages {
                let place = usable(vm, member.file, page).zip(content.store_page(page));
                let wanted = place.and_then(|(index, store_page)| match vm.table.mapped(index) {
                    Some(mapped) if mapped.shared && mapped.store_page == store_page => None,
                    Some(_) if !vm.live => {
                        wait = true;
                        None
                    }
                    mapped => Some((index, store_page, mapped.is_some())),
                });
                let wanted = wanted.filter(|&(index, ..)| planned.insert((member.vm, index)));
                let Some((index, store_page, again)) = wanted else {
                    list.extend(current.take());
                    continue;
                };
                if let Some(run) = current
                    .as_mut()
                    .filter(|run| run.continues(&vm.table, index, store_page, again))
                {
                    run.pages += 1;
                    continue;
                }
                list.extend(current.take());
                current = Some(Run {
                    index,
                    pages: 1,
                    store_page,
                    file: member.file,
                    page,
                    content: task.content,
                    at: (!task.swept).then_some(task.hint.at),
                    tries: task.hint.tries,
                    again,
                });
            }
            list.extend(current);
            if wait && vm.wait_for_pause.len() < self.settings.stack_limit {
                vm.wait_for_pause.push(Hint {
                    file: member.file,
                    ..task.hint
                });
            }
        }
    }

    /// Folds runs of one VM, the longest first, and deals with what comes of them.
    fn fold_vm(&mut self, id: VmId, mut runs: Vec<Run>) {
        let Some(vm) = self.vms.get_mut(&id) else {
            return;
        };
        if let Ok(map) = Pagemap::open(vm.guest.pid()) {
            let (table, split) = (&vm.table, &mut vm.split);
            let kept = spare_huge_pages(&mut runs, table, split, |hva| is_huge(&map, hva));
            for run in kept {
                self.stats.huge_kept_pages += u64::from(run.pages);
                // Not to be tried, nor its content kept for it, until the guest tells of these pages anew.
                (run.index..run.index + run.pages).for_each(|page| vm.table.refuse(page));
            }
        }
        let mut queue = group(runs, &vm.table);
        let freeze = if vm.live {
            Freeze::WriteProtect
        } else {
            Freeze::Move
        };
        while !queue.is_empty() {
            let Some(order) = self.next_order(id, &mut queue) else {
                return;
            };
            if let Err(error) = self.execute(id, freeze, order, &mut queue) {
                return self.lost(id, &error);
            }
        }
    }

    /// Takes groups for one order off the queue, leaving out those that are not worth a mapping any more. `None` when
    /// nothing is left.
    pub(super) fn next_order(
        &mut self,
        id: VmId,
        queue: &mut VecDeque<Group>,
    ) -> Option<Vec<Group>> {
        let vm = self.vms.get_mut(&id)?;
        let mut order = Vec::new();
        let mut pages = 0;
        while let Some(group) = queue.pop_front() {
            let length = length(&group);
            if order.len() == MAX_RUNS || (pages > 0 && pages + length > ORDER_PAGES) {
                queue.push_front(group);
                break;
            }
            let worth = budget::shortest_run(vm.mappings, self.settings.max_mappings)
                .is_some_and(|least| length >= least);
            if !worth {
                self.stats.mapping_budget_runs += 1;
                // Our count only ever grows; the kernel's knows which mappings have joined. The sweep tries again.
                vm.maps_stale = true;
                vm.active = true;
                self.sweep_wanted = true;
                continue;
            }
            // A fold cuts a mapping in up to three; folding again one that is cut already adds at most one.
            vm.mappings += if group.first().is_some_and(|run| run.again) {
                1
            } else {
                2
            };
            pages += length;
            order.push(group);
        }
        (!order.is_empty()).then_some(order)
    }

    /// Sends one order and books its outcomes. What is left of groups that stopped in the middle goes back to the queue.
    pub(super) fn execute(
        &mut self,
        id: VmId,
        freeze: Freeze,
        groups: Vec<Group>,
        queue: &mut VecDeque<Group>,
    ) -> Result<(), GuestError> {
        let Some(vm) = self.vms.get_mut(&id) else {
            return Ok(());
        };
        let Some(domain) = self.domains.get_mut(&vm.domain) else {
            return Ok(());
        };
        let store = domain.store_number();
        let wire = |group: &Group| {
            let first = group.first()?;
            let hva = vm.table.hva(first.index)?.0;
            Some(FoldRun {
                hva,
                pages: length(group),
                store,
                store_page: u64::from(first.store_page),
            })
        };
        let Some(runs) = groups.iter().map(wire).collect::<Option<Vec<_>>>() else {
            return Ok(());
        };
        let asked: u32 = runs.iter().map(|run| run.pages).sum();
        let reply = vm.guest.order(&Order::Fold { freeze, runs }, None)?;
        let Reply::Outcomes { outcomes, cpu_ns } = reply else {
            let what = format!("unexpected reply to a fold order: {reply:?}");
            return Err(GuestError::Library(std::io::Error::other(what)));
        };
        self.library_cpu_ns += cpu_ns;
        if let Some(rate) = &mut self.rate {
            rate.spend(f64::from(asked), Instant::now());
        }
        for (group, outcome) in groups.into_iter().zip(outcomes) {
            self.book_group(id, group, outcome, queue);
        }
        Ok(())
    }

    /// Goes through all contents for what is matched and not folded: hints that were dropped, pages that were refused by a
    /// budget, VMs that came late.
    fn sweep(&mut self) {
        self.sweep_wanted = false;
        self.last_sweep = Instant::now();
        let mut tasks = Vec::new();
        for (name, domain) in &self.domains {
            for (content, facts) in domain.contents.shared() {
                let mut pieces: Vec<u32> = Vec::new();
                for member in &facts.members {
                    if let Some(vm) = self.vms.get(&member.vm) {
                        pieces.extend(vm.table.pieces(member.file));
                    }
                }
                pieces.sort_unstable();
                // A piece that one VM alone has is matched by nothing.
                let doubles = pieces
                    .chunk_by(|a, b| a == b)
                    .filter(|c| c.len() > 1)
                    .map(|c| c[0]);
                let Some(first) = facts.members.first() else {
                    continue;
                };
                tasks.extend(doubles.map(|piece| Task {
                    domain: name.clone(),
                    content,
                    vm: first.vm,
                    hint: Hint {
                        file: first.file,
                        page: piece * PIECE,
                        pages: PIECE,
                        at: self.last_sweep,
                        tries: 0,
                    },
                    swept: true,
                }));
            }
        }
        for batch in tasks.chunks((BATCH_PAGES / PIECE) as usize) {
            self.fold(batch);
        }
    }
}

/// The guest page that caches a file page, unless it is being written or was found to differ.
pub(super) fn usable(vm: &VmState, file: u32, page: u32) -> Option<Index> {
    vm.table
        .place(file, page)
        .filter(|&at| !vm.table.is_dirty(at) && !vm.table.is_refused(at))
}

fn holders(vms: &BTreeMap<VmId, VmState>, members: &[Member], page: u32) -> Vec<(Member, Index)> {
    members
        .iter()
        .filter_map(|&m| Some((m, usable(vms.get(&m.vm)?, m.file, page)?)))
        .collect()
}

/// A store page that a holder maps unchanged and that no index entry leads to: left by a former daemon, or by a content
/// that ended. It holds what the guest page holds, so it can be offered again.
fn adoptable(
    vms: &BTreeMap<VmId, VmState>,
    domain: &Domain,
    holders: &[(Member, Index)],
) -> Option<u32> {
    holders.iter().find_map(|(member, at)| {
        let mapped = vms.get(&member.vm)?.table.mapped(*at)?;
        let facts = domain.contents.facts(mapped.store_page);
        (mapped.shared && facts.holds.is_none() && !facts.punched).then_some(mapped.store_page)
    })
}

fn is_huge(map: &Pagemap, hva: Hva) -> bool {
    let filter = Filter {
        all_of: category::HUGE,
        ..Filter::default()
    };
    map.scan(hva, hva.add_pages(HUGE_PAGE_PAGES), filter)
        .is_ok_and(|regions| !regions.is_empty())
}

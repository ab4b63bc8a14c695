//! Processes a batch of hints, which tell what file pages guests cache: copies pages that several
//! VMs cache into the page store, orders memfold's library in each QEMU to fold them, and records
//! the results.
//!
//! Words in this module: a *piece* is 64 consecutive pages of a file ([`PIECE`]), a *content* is
//! the bytes of a file, of which several VMs may have a copy, and a *member* of the content is one
//! such file in one VM.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use memfold_store::Source;
use memfold_wire::library::{FoldRun, Freeze, MAX_RUNS, Order, Outcome, Reply};
use tracing::debug;

use super::domain::{Domain, note_store_error};
use super::guest::{GuestError, Refold, VmId};
use super::hint_stack::Hint;
use super::member::Member;
use super::runs::{Group, Run, append, group, length};
use super::schedule::Work;
use super::state::{Engine, VmState, foldable, with_domain};
use super::task::{BATCH_PAGES, Task};
use super::vm_map::VmMap;
use super::vm_table::{Index, PIECE, Piece};
use super::{budget, huge};

/// Maximum number of pages in one order, so that the library answers within about a millisecond.
const ORDER_PAGES: u32 = 2048;

/// Time between two sweeps, which search for matched pages that are not folded.
pub(super) const SWEEP_INTERVAL: Duration = Duration::from_secs(10);

/// Guest pages of one VM that cache the pages of a piece of a file.
struct Holder {
    member: Member,
    pages: Piece,
}

impl Engine {
    /// Takes settled hints from one VM after another, the newest of each VM first, until they fill
    /// a batch.
    pub(super) fn take_tasks(&mut self, now: Instant) -> Vec<Task> {
        let rate = self.rate.as_mut();
        let allowed = rate.map_or(u64::MAX, |rate| rate.available(now).max(1));
        let limit = u32::try_from(allowed).unwrap_or(u32::MAX).min(BATCH_PAGES);
        self.reschedule();
        let due = [Work::FullBatch, Work::SmallBatch].map(|work| self.schedule.due(work, now));
        let mut order: Vec<VmId> = due.into_iter().flatten().collect();
        order.sort_unstable();
        let next = order.partition_point(|&id| id <= self.last_turn);
        order.rotate_left(next);
        // Tasks of a sweep that hints have kept back for long get half of the batch.
        let is_late = !self.swept.is_empty() && now >= self.last_sweep + SWEEP_INTERVAL;
        let of_hints = if is_late { limit.div_ceil(2) } else { limit };
        let mut tasks = Vec::new();
        let mut pages = 0;
        for id in order {
            let Some(vm) = foldable(&mut self.vms, id) else {
                continue;
            };
            let Some(domain) = self.domains.get(&vm.domain) else {
                continue;
            };
            while pages < of_hints {
                let Some(hint) = vm.stack.pop(now) else { break };
                let Some(content) = domain.contents.of(Member {
                    vm: id,
                    file: hint.file,
                }) else {
                    continue;
                };
                self.last_turn = id;
                if vm.is_skipped(hint.file, now) {
                    continue;
                }
                // Pages that were refused before they had been read from disk are tried again.
                vm.table
                    .settle(hint.file, hint.page..hint.page + hint.pages);
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
        while pages < limit {
            let Some(task) = self.swept.pop_front() else {
                break;
            };
            pages += task.hint.pages;
            tasks.push(task);
        }
        tasks
    }

    /// Folds the file pages of `tasks`. First copies pages that at least two VMs cache, and that
    /// the page store lacks, into the store. Then folds every guest page that caches one of the
    /// file pages and is not folded yet.
    pub(super) fn fold(&mut self, tasks: &[Task]) {
        let mut runs: BTreeMap<VmId, Vec<Run>> = BTreeMap::new();
        self.make_room();
        let asked: u32 = tasks.iter().map(|task| task.hint.pages).sum();
        if asked >= BATCH_PAGES / 2 {
            self.domains.values_mut().for_each(|d| d.store.align());
        }
        // Pieces are in the order of guest memory, so that pages that are neighbours there become
        // neighbours in the store, and their runs can be joined.
        let pieces = |task| Self::pieces_of(task).map(move |piece| (task, piece));
        let mut pieces: Vec<(&Task, u32)> = tasks.iter().flat_map(pieces).collect();
        pieces.sort_by_cached_key(|&(task, piece)| (task.vm, self.first_place(task, piece)));
        for (task, piece) in pieces {
            let end = task.hint.page + task.hint.pages;
            let first = piece * PIECE;
            let from = task.hint.page.max(first) - first;
            let range = from as usize..(end.min(first + PIECE) - first) as usize;
            let holders = self.holders(task, piece, &range);
            self.fill(task, piece, &range, &holders);
            self.collect(task, piece, &range, &holders, &mut runs);
        }
        let is_filled = self.fill_reserved();
        for (id, mut runs) in runs {
            if !is_filled {
                runs = self.without_missing(id, &runs);
            }
            self.fold_vm(id, runs);
            if let Some(vm) = self.vms.get_mut(&id) {
                self.stats.huge_kept_pages += vm.huge.end_batch();
                vm.refold = None;
            }
        }
    }

    /// Returns the pieces that the hint of a task is about.
    fn pieces_of(task: &Task) -> Range<u32> {
        let end = task.hint.page + task.hint.pages;
        task.hint.page / PIECE..end.div_ceil(PIECE)
    }

    /// Returns the guest page that caches the first page of a piece of a task.
    fn first_place(&self, task: &Task, piece: u32) -> Option<Index> {
        let table = &self.vms.get(&task.vm)?.table;
        table.place(task.hint.file, task.hint.page.max(piece * PIECE))
    }

    /// Returns the members of a task's content that cache pages of a piece. Leaves out VMs that
    /// cannot be folded, files that are skipped, and pages of huge pages that stay whole. The VM of
    /// the hint comes first, because its page was read last.
    fn holders(&mut self, task: &Task, piece: u32, range: &Range<usize>) -> Vec<Holder> {
        let domain = self.domains.get(&task.domain);
        let Some(content) = domain.and_then(|d| d.contents.get(task.content)) else {
            return Vec::new();
        };
        let own = Member {
            vm: task.vm,
            file: task.hint.file,
        };
        if task.swept {
            let members = content.members.clone();
            return self.usable_holders(&members, own, piece, range);
        }
        // Other VMs have hints of their own, so only those are searched whose pages may have to be
        // copied now: a page that the page store lacks and that another VM caches, too. A search of
        // all VMs would cost each hint time in proportion to their number.
        let stored = content.store_pages(piece);
        let cached = self.vms.get(&own.vm);
        let cached = cached.and_then(|vm| vm.table.usable(own.file, piece, range));
        let lacking = cached.map_or(0, |pages| {
            let lacking = range
                .clone()
                .filter(|&at| pages[at] != 0 && stored[at] == 0);
            lacking.fold(0, |bits, at| bits | 1 << at)
        });
        let (known, more) = content.known_holders(piece, lacking, own);
        let mut holders = self.usable_holders(&known, own, piece, range);
        let is_alone = |at: usize| holders.iter().filter(|h| h.pages[at] != 0).take(2).count() < 2;
        let is_unknown = range.clone().any(|at| more >> at & 1 == 1 && is_alone(at));
        if is_unknown {
            // A page of the known VMs cannot be used.
            let domain = self.domains.get(&task.domain);
            let content = domain.and_then(|d| d.contents.get(task.content));
            let mut rest = content.map_or_else(Vec::new, |content| content.members.clone());
            rest.retain(|member| !known.contains(member));
            holders.extend(self.usable_holders(&rest, own, piece, range));
        }
        holders
    }

    /// Returns those of `members` that cache pages of a piece which can be folded; `own` comes
    /// first.
    fn usable_holders(
        &mut self,
        members: &[Member],
        own: Member,
        piece: u32,
        range: &Range<usize>,
    ) -> Vec<Holder> {
        let now = Instant::now();
        let mut holders = Vec::new();
        for &member in members {
            let usable = self.vms.get(&member.vm).filter(|vm| vm.is_foldable());
            let usable = usable.filter(|vm| !vm.is_skipped(member.file, now));
            let usable = usable.and_then(|vm| vm.table.usable(member.file, piece, range));
            let Some((mut pages, vm)) = usable.zip(self.vms.get_mut(&member.vm)) else {
                continue;
            };
            for place in &mut pages[range.clone()] {
                let kept = place.checked_sub(1).is_some_and(|at| {
                    // The page is in memory only once already, for all VMs that run from this
                    // snapshot.
                    if vm.table.is_template(at) {
                        return true;
                    }
                    let is_huge = |hva| {
                        let map = vm.pagemap.as_ref();
                        map.is_some_and(|map| huge::is_huge(map, hva))
                    };
                    vm.table.mapped(at).is_none() && vm.huge.spares(&vm.table, at, is_huge)
                });
                if kept {
                    *place = 0;
                }
            }
            let holder = Holder { member, pages };
            if member.vm == own.vm {
                holders.insert(0, holder);
            } else {
                holders.push(holder);
            }
        }
        holders
    }

    /// Copies pages into the store pages that [`Engine::fill`] has reserved. Returns whether every
    /// page was copied. A missing page has no index entry any more.
    fn fill_reserved(&mut self) -> bool {
        let mut is_filled = true;
        for (name, domain) in &mut self.domains {
            let Some((first, sources)) = domain.reserved.take() else {
                continue;
            };
            let filled = domain.store.fill(first, &sources);
            domain.appended += sources.iter().map(|source| source.pages).sum::<u64>();
            domain.full = false;
            is_filled &= filled.missing.is_empty();
            for missing in filled.missing {
                domain.appended -= missing.end.0 - missing.start.0;
                for page in missing.start.0..missing.end.0 {
                    if let Ok(page) = u32::try_from(page) {
                        domain.contents.unindex_store_page(page);
                    }
                }
            }
            if let Some(error) = filled.error {
                note_store_error(name, domain, &error);
                self.sweep_wanted = true;
            }
        }
        is_filled
    }

    /// Leaves out the pages of runs whose store pages could not be filled. A comparison with a
    /// store page without content would record the guest's page as differing.
    fn without_missing(&mut self, id: VmId, runs: &[Run]) -> Vec<Run> {
        let Some((vm, domain)) = with_domain(&mut self.vms, &mut self.domains, id) else {
            return Vec::new();
        };
        let mut left = Vec::new();
        for run in runs.iter().flat_map(Run::single_pages) {
            let facts = domain.contents.facts(run.store_page);
            if facts.holds == Some((run.content, run.page)) {
                append(&mut left, run, &vm.table);
            } else {
                vm.table.unplan(run.index);
            }
        }
        left
    }

    /// Reserves store pages for file pages that the store lacks and that at least two VMs cache.
    ///
    /// The pages lie in the store in the order of guest memory, and not of the file: neighbouring
    /// pages of a file are often neighbours in guest memory in descending order. Folded pages that
    /// are neighbours in both are one mapping.
    fn fill(&mut self, task: &Task, piece: u32, range: &Range<usize>, holders: &[Holder]) {
        let Some(domain) = self.domains.get_mut(&task.domain) else {
            return;
        };
        let Some(content) = domain.contents.get(task.content) else {
            return;
        };
        let stored = content.store_pages(piece);
        let page_of = |at: usize| piece * PIECE + u32::try_from(at).unwrap_or(0);
        // Number of the holder whose page is copied, the guest page, and the page of the piece.
        let mut lacking: Vec<(usize, Index, usize)> = Vec::new();
        for at in range.clone().filter(|&at| stored[at] == 0) {
            let mut cached = (0..holders.len()).filter(|&n| holders[n].pages[at] != 0);
            let (Some(source), Some(_)) = (cached.next(), cached.next()) else {
                continue;
            };
            if let Some(stored) = adoptable(&self.vms, domain, holders, at) {
                domain.contents.index(task.content, page_of(at), stored);
            } else {
                lacking.push((source, holders[source].pages[at] - 1, at));
            }
        }
        lacking.sort_unstable();
        let table = |source: usize| {
            let vm = self.vms.get(&holders[source].member.vm);
            vm.map(|vm| (&vm.table, vm.guest.pid()))
        };
        let follows = |a: &(usize, Index, usize), b: &(usize, Index, usize)| {
            a.0 == b.0
                && a.1 + 1 == b.1
                && table(a.0).is_some_and(|(table, _)| table.adjacent(a.1, b.1))
        };
        for run in lacking.chunk_by(follows) {
            let (source, first, _) = run[0];
            let Some((pid, from)) =
                table(source).and_then(|(table, pid)| Some((pid, table.hva(first)?)))
            else {
                return;
            };
            let pages = run.len() as u64;
            match domain.store.reserve(pages) {
                Ok(stored) => {
                    let (_, sources) = domain.reserved.get_or_insert((stored, Vec::new()));
                    sources.push(Source { pid, from, pages });
                    for (&(_, _, at), stored) in run.iter().zip(stored.0..) {
                        let Ok(stored) = u32::try_from(stored) else {
                            continue;
                        };
                        domain.contents.index(task.content, page_of(at), stored);
                    }
                }
                Err(error) => {
                    note_store_error(&task.domain, domain, &error);
                    self.sweep_wanted = true;
                    return;
                }
            }
        }
    }

    /// Collects the runs of all holders that must be folded.
    fn collect(
        &mut self,
        task: &Task,
        piece: u32,
        range: &Range<usize>,
        holders: &[Holder],
        runs: &mut BTreeMap<VmId, Vec<Run>>,
    ) {
        let Some(domain) = self.domains.get(&task.domain) else {
            return;
        };
        let Some(content) = domain.contents.get(task.content) else {
            return;
        };
        let stored = content.store_pages(piece);
        for Holder { member, pages } in holders {
            let Some(vm) = self.vms.get_mut(&member.vm) else {
                continue;
            };
            let list = runs.entry(member.vm).or_default();
            let mut wait = false;
            for at in range.clone() {
                let place = pages[at].checked_sub(1).zip(stored[at].checked_sub(1));
                let Some((index, store_page)) = place else {
                    continue;
                };
                let mapped = vm.table.mapped(index);
                if mapped.is_some_and(|m| m.shared && m.store_page == store_page) {
                    continue;
                }
                let again = mapped.is_some() || vm.table.is_in_view(index);
                if again && vm.refold_now() == Refold::Unknown {
                    // This is no reason to stop the VM: the next sweep finds the page again.
                    self.sweep_wanted = true;
                    continue;
                }
                if again && !vm.may_refold_live(index) {
                    wait = vm.guest.can_stop();
                    continue;
                }
                // An earlier task of the batch may have found this page, if two VMs read the same
                // file at the same time.
                if !vm.table.plan(index) {
                    continue;
                }
                let run = Run {
                    index,
                    pages: 1,
                    store_page,
                    file: member.file,
                    page: piece * PIECE + u32::try_from(at).unwrap_or(0),
                    content: task.content,
                    at: (!task.swept).then_some(task.hint.at),
                    tries: task.hint.tries,
                    again,
                };
                append(list, run, &vm.table);
            }
            if wait && vm.wait_for_pause.len() < self.settings.stack_limit {
                vm.wait_for_pause.push(Hint {
                    file: member.file,
                    page: piece * PIECE + u32::try_from(range.start).unwrap_or(0),
                    pages: u32::try_from(range.len()).unwrap_or(0),
                    ..task.hint
                });
            }
        }
    }

    /// Folds the runs of one VM, the longest first, and handles the outcomes.
    fn fold_vm(&mut self, id: VmId, runs: Vec<Run>) {
        let Some(vm) = self.vms.get_mut(&id) else {
            return;
        };
        for run in &runs {
            (run.index..run.index + run.pages).for_each(|at| vm.table.unplan(at));
        }
        let mut queue = group(runs, &vm.table);
        let freeze = if vm.refold == Some(Refold::Live) {
            Freeze::WriteProtect
        } else {
            Freeze::Move
        };
        while !queue.is_empty() {
            let Some(order) = self.next_order(id, &mut queue, ORDER_PAGES) else {
                return;
            };
            if let Err(error) = self.execute(id, freeze, order, &mut queue) {
                return self.lost(id, &error);
            }
        }
    }

    /// Takes groups of runs for one order, of at most `most_pages` pages in total, from the queue.
    /// Drops groups that are too short to be worth a mapping. Returns `None` if no group is left.
    pub(super) fn next_order(
        &mut self,
        id: VmId,
        queue: &mut VecDeque<Group>,
        most_pages: u32,
    ) -> Option<Vec<Group>> {
        let vm = self.vms.get_mut(&id)?;
        let mut order = Vec::new();
        let mut pages = 0;
        while let Some(group) = queue.pop_front() {
            let length = length(&group);
            if order.len() == MAX_RUNS || (pages > 0 && pages + length > most_pages) {
                queue.push_front(group);
                break;
            }
            let worth = budget::shortest_run(vm.mappings, self.settings.max_mappings)
                .is_some_and(|least| length >= least);
            if !worth {
                self.stats.mapping_budget_runs += 1;
                // The engine's own count of mappings only grows; the kernel's count knows which
                // mappings were merged. A sync and a sweep therefore try again.
                vm.maps_stale = true;
                vm.active = true;
                self.sweep_wanted = true;
                continue;
            }
            // A fold splits a mapping into up to three. A refold, where the mapping is split
            // already, adds at most one.
            let is_refold = group.first().is_some_and(|run| run.again);
            vm.mappings += if is_refold { 1 } else { 2 };
            pages += length;
            order.push(group);
        }
        (!order.is_empty()).then_some(order)
    }

    /// Sends one fold order to VM `id` and records its outcomes. The rest of a group whose folding
    /// stopped in the middle returns to the queue.
    pub(super) fn execute(
        &mut self,
        id: VmId,
        freeze: Freeze,
        groups: Vec<Group>,
        queue: &mut VecDeque<Group>,
    ) -> Result<(), GuestError> {
        let Some((vm, domain)) = with_domain(&mut self.vms, &mut self.domains, id) else {
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
        let order = Order::Fold { freeze, runs };
        let reply = match freeze {
            Freeze::Stopped { .. } => vm.order_with_stop(&order, self.settings.pause_interval)?,
            Freeze::Move | Freeze::WriteProtect => vm.guest.order(&order, None)?,
        };
        if let Reply::Error { reason } = reply {
            // The order failed only for now, for example because QEMU did not stop the VM in time.
            debug!(
                vm = vm.stats.name,
                reason, "memfold's library in QEMU refused an order to fold pages"
            );
            if let Freeze::Stopped { .. } = freeze {
                queue.extend(groups);
            } else {
                self.leave_to_sweep(id, queue);
            }
            return Ok(());
        }
        let Reply::Outcomes {
            outcomes,
            cpu_ns,
            stopped_ns,
        } = reply
        else {
            let what = format!("unexpected reply to a fold order: {reply:?}");
            return Err(GuestError::Library(std::io::Error::other(what)));
        };
        self.library_cpu_ns += cpu_ns;
        vm.note_pause(stopped_ns);
        if let Some(rate) = &mut self.rate {
            rate.spend(f64::from(asked), Instant::now());
        }
        let is_late = outcomes.contains(&Outcome::Late);
        for (group, outcome) in groups.into_iter().zip(outcomes) {
            self.book_group(id, group, outcome, queue);
        }
        if is_late && !matches!(freeze, Freeze::Stopped { .. }) {
            self.leave_to_sweep(id, queue);
        }
        Ok(())
    }

    /// Drops the runs that are left of a VM's batch, after an order that its library refused or had
    /// too little time for. Repeating the runs at once could keep the engine's thread from all
    /// other VMs.
    fn leave_to_sweep(&mut self, id: VmId, queue: &mut VecDeque<Group>) {
        queue.clear();
        self.sweep_wanted = true;
        if let Some(vm) = self.vms.get_mut(&id) {
            vm.maps_stale = true;
            vm.active = true;
        }
    }

    /// Searches all tables for file pages that several VMs cache and that are not folded: pages of
    /// dropped hints, pages that a budget refused, and pages of VMs that were added late.
    pub(super) fn sweep(&mut self) {
        self.sweep_wanted = false;
        self.last_sweep = Instant::now();
        let mut tasks = Vec::new();
        for (name, domain) in &self.domains {
            for (content, facts) in domain.contents.shared() {
                let Some(first) = facts.members.first() else {
                    continue;
                };
                tasks.extend(facts.shared_pieces().into_iter().map(|piece| Task {
                    domain: name.clone(),
                    content,
                    vm: first.vm,
                    hint: Hint::of_piece(first.file, piece, self.last_sweep),
                    swept: true,
                }));
            }
        }
        self.swept = tasks.into();
    }
}

/// Returns a store page that has no index entry and that a holder maps unchanged at page `at` of
/// the piece. An earlier daemon or a content that ended has left such a page. Its bytes are those
/// of the guest page, so the page can be used again.
fn adoptable(vms: &VmMap<VmState>, domain: &Domain, holders: &[Holder], at: usize) -> Option<u32> {
    holders.iter().find_map(|holder| {
        let place = holder.pages[at].checked_sub(1)?;
        let mapped = vms.get(&holder.member.vm)?.table.mapped(place)?;
        let facts = domain.contents.facts(mapped.store_page);
        (mapped.shared && facts.holds.is_none() && !facts.punched).then_some(mapped.store_page)
    })
}

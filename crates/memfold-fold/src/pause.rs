//! Folds pages again in a VM whose disks use direct I/O. Direct I/O writes to memory without the
//! page tables, so write protection cannot keep these pages unchanged meanwhile. Instead, memfold's
//! library in QEMU stops the VM for a moment, so that neither vCPUs nor I/O run.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use memfold_wire::library::{MAX_RUNS, Order, Reply};

use super::guest::{GuestError, VmId};
use super::hint_stack::Hint;
use super::member::Member;
use super::runs::{Run, append, group};
use super::schedule::Work;
use super::state::{Engine, VmState, usable};
use super::vm_table::Index;

/// Shortest time between two stops of a VM, as a multiple of the time that the first one took. So a
/// VM stands still for less than a twentieth of the time, also if QEMU needs seconds to stop it: a
/// stop first waits for the VM's disks.
const REST: u32 = 20;

/// Number of runs from which the longest are chosen for one stop. An order has at most
/// [`MAX_RUNS`].
const CANDIDATES: usize = 4 * MAX_RUNS;

impl VmState {
    /// Returns the time at which the VM may be stopped to fold pages again; `None` if no page waits
    /// for a stop.
    pub(super) fn pause_due(&self) -> Option<Instant> {
        (!self.wait_for_pause.is_empty()).then_some(self.next_pause)
    }

    /// Sends an order for which the library stops the VM, and sets the earliest time of the next
    /// stop. `interval`: shortest time between two stops.
    pub(super) fn order_with_stop(
        &mut self,
        order: &Order,
        interval: Duration,
    ) -> Result<Reply, GuestError> {
        let began = Instant::now();
        let reply = self.guest.order(order, None);
        let ended = Instant::now();
        let stopped = match &reply {
            Ok(Reply::Outcomes { stopped_ns, .. }) => Duration::from_nanos(*stopped_ns),
            // QEMU may have stopped the VM and answered too late, or not at all.
            _ => Duration::MAX,
        };
        self.next_pause = ended + interval.max(stopped.min(ended - began) * REST);
        reply
    }
}

impl Engine {
    /// Folds pages again in the VM that is due, while the library stops the VM. Returns whether a
    /// VM was due.
    pub(super) fn pause_due(&mut self, now: Instant) -> bool {
        let Some(id) = self.first_due(Work::Pause, now) else {
            return false;
        };
        if let Err(error) = self.fold_paused(id, now) {
            self.lost(id, &error);
        }
        true
    }

    fn fold_paused(&mut self, id: VmId, now: Instant) -> Result<(), GuestError> {
        let Some(vm) = self.vms.get_mut(&id) else {
            return Ok(());
        };
        vm.next_pause = now + self.settings.pause_interval;
        let mut hints = std::mem::take(&mut vm.wait_for_pause);
        // The newest hint comes first, and each page is folded once, because a page that was hinted
        // twice must not use the pause twice.
        let mut planned = HashSet::new();
        let mut runs: Vec<Run> = Vec::new();
        while runs.len() < CANDIDATES {
            let Some(hint) = hints.pop() else { break };
            runs.extend(self.runs_for_pause(id, &hint, &mut planned));
        }
        let Some(vm) = self.vms.get_mut(&id) else {
            return Ok(());
        };
        vm.wait_for_pause = hints;
        let mut queue = group(runs, &vm.table);
        if queue.is_empty() {
            return Ok(());
        }
        let Some(order) = self.next_order(id, &mut queue, u32::MAX) else {
            return Ok(());
        };
        self.execute(id, self.settings.pause(), order, &mut queue)?;
        let Some(vm) = self.vms.get_mut(&id) else {
            return Ok(());
        };
        // Runs for which the time did not suffice wait for the next pause, the longest first. The
        // oldest hints give way to new ones.
        let left = queue.iter().rev().flatten();
        vm.wait_for_pause.extend(left.map(|run| Hint {
            file: run.file,
            page: run.page,
            pages: run.pages,
            at: run.at.unwrap_or(now),
            tries: run.tries,
        }));
        let waiting = vm.wait_for_pause.len();
        let too_many = waiting.saturating_sub(self.settings.stack_limit / 2);
        vm.wait_for_pause.drain(..too_many);
        Ok(())
    }

    fn runs_for_pause(&self, id: VmId, hint: &Hint, planned: &mut HashSet<Index>) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let Some(vm) = self.vms.get(&id) else {
            return runs;
        };
        let Some(domain) = self.domains.get(&vm.domain) else {
            return runs;
        };
        let Some(content) = domain.contents.of(Member {
            vm: id,
            file: hint.file,
        }) else {
            return runs;
        };
        let Some(facts) = domain.contents.get(content) else {
            return runs;
        };
        for page in hint.page..hint.page + hint.pages {
            let Some((index, store_page)) = usable(vm, hint.file, page).zip(facts.store_page(page))
            else {
                continue;
            };
            let mapped = vm.table.mapped(index);
            let folded = mapped.is_some_and(|m| m.shared && m.store_page == store_page)
                || vm.table.is_template(index);
            if folded || !planned.insert(index) {
                continue;
            }
            let again = mapped.is_some() || vm.table.is_in_view(index);
            let run = Run {
                index,
                pages: 1,
                store_page,
                file: hint.file,
                page,
                content,
                at: Some(hint.at),
                tries: hint.tries,
                again,
            };
            append(&mut runs, run, &vm.table);
        }
        runs
    }
}

//! Adds VMs to the fold engine, changes their RAM layout, stops folding while a snapshot is saved,
//! and removes them. Also handles a QEMU in which memfold's library no longer answers.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::SyncSender;
use std::time::Instant;

use foldhash::{HashMap, HashMapExt};
use memfold_store::Store;
use memfold_sys::pagemap::Pagemap;
use memfold_units::StorePage;
use memfold_vm::{RamBlock, RamLayout};
use memfold_wire::library::{Advice, Order, Reply};
use rustix::process::Pid;
use tracing::{debug, info, warn};

use super::candidates::Candidates;
use super::content::Contents;
use super::domain::Domain;
use super::fold_back_pass::BackPass;
use super::guest::{Guest, GuestError, VmId};
use super::hint_stack::HintStack;
use super::huge::HugePages;
use super::member::Member;
use super::state::{Engine, Held, VmState};
use super::stats::VmStats;
use super::vm_table::VmTable;
use super::zero_pass::ZeroPass;

/// Reason why the engine does not fold a VM while a snapshot of the VM is made.
const HELD: &str = "a snapshot of this VM is being made";

/// Number of waiting hints of all VMs together, unless that would be less than [`MIN_HINTS`] for
/// each VM. A hint has 16 bytes, and a stack has up to twice as many hints, so that the stacks of
/// 1,000 VMs need at most 128 MiB with the spare places of their lists.
const ALL_HINTS: usize = 1 << 21;

const MIN_HINTS: usize = 1024;

const ENDED: &str = "the VM has ended";

impl Engine {
    #[allow(clippy::too_many_arguments)] // these are the fields of one command
    pub(super) fn add(
        &mut self,
        id: VmId,
        name: String,
        domain: Option<String>,
        layout: RamLayout,
        advice: &[Advice],
        mut guest: Box<dyn Guest>,
        problem: Option<String>,
    ) {
        // The name of a domain cannot contain a slash, so a VM without a domain is alone in this
        // one.
        let domain = domain.unwrap_or_else(|| format!("vm/{name}"));
        let problem = match problem {
            // The VM may map a store of an earlier daemon, and its folded pages count as debt.
            Some(problem) => {
                if let Err(error) = self.adopt_store(&domain, guest.pid()) {
                    debug!(
                        domain,
                        error, "cannot read the page store of an earlier daemon"
                    );
                }
                Some(problem)
            }
            None => self
                .introduce(&domain, &layout, advice, guest.as_mut())
                .err(),
        };
        if let Some(problem) = &problem {
            warn!(
                vm = name,
                problem, "VM's memory is not shared (folded); see 'problem'"
            );
        }
        let now = Instant::now();
        let allowance =
            super::intake::allowance(u32::try_from(layout.pages()).unwrap_or(u32::MAX), now);
        let vm = VmState {
            table: VmTable::new(layout),
            stack: HintStack::new(self.stack_limit, self.settings.settle),
            skips: HashMap::new(),
            path_bytes: 0,
            late_files: BTreeMap::new(),
            moves: super::intake::move_allowance(now),
            allowance,
            introduced: problem.is_none(),
            advice: advice.to_vec(),
            gone_blocks: Vec::new(),
            active: true,
            last_sync: now,
            next_pause: now + self.settings.pause_interval,
            wait_for_pause: Vec::new(),
            zero: ZeroPass::new(self.settings.drop_zero.then_some(now)),
            back: BackPass::new(now, self.settings.fold_back_interval),
            mappings: 0,
            held: None,
            stats: VmStats {
                name,
                domain: domain.clone(),
                problem,
                ..VmStats::default()
            },
            refold: None,
            huge: HugePages::default(),
            pagemap: Pagemap::open(guest.pid()).ok(),
            discarded: 0,
            maps_stale: true,
            is_lost: false,
            last_full_sync: now,
            guest,
            domain,
        };
        self.vms.insert(id, vm);
        self.share_stacks();
        self.sync(id);
    }

    /// Divides the memory for waiting hints among the VMs.
    fn share_stacks(&mut self) {
        let share = (ALL_HINTS / self.vms.len().max(1)).max(MIN_HINTS);
        // A power of two, so that few of many new VMs change the limit of all.
        let limit = (1 << share.ilog2()).min(self.settings.stack_limit);
        if limit != self.stack_limit {
            self.stack_limit = limit;
            for vm in self.vms.values_mut() {
                vm.stack.set_limit(limit);
            }
        }
    }

    /// Adopts the store of the VM's domain that an earlier daemon created, if QEMU has it open and
    /// this daemon has no store of the domain yet. The error text is for the operator.
    fn adopt_store(&mut self, domain: &str, pid: Pid) -> Result<(), String> {
        if self.domains.contains_key(domain) {
            return Ok(());
        }
        match Store::adopt(pid, domain, self.settings.store_cap) {
            Ok(Some(store)) => self.add_domain(domain, store),
            Ok(None) => Ok(()),
            Err(error) => {
                warn!(domain, error = %error, "cannot reopen the page store of an earlier daemon; run the daemon as root");
                Ok(())
            }
        }
    }

    /// Adds a trust domain with its page store. The error text is for the operator.
    fn add_domain(&mut self, name: &str, store: Store) -> Result<(), String> {
        let filled = store.filled().map_err(|e| e.to_string())?;
        // The search reads the mappings of all processes. A store without pages, such as that of a
        // VM without a trust domain, needs none: it has nothing to free.
        let guardians = if filled.is_empty() {
            Vec::new()
        } else {
            memfold_store::mapped::processes(store.identity()).map_err(|e| e.to_string())?
        };
        let mut contents = Contents::default();
        // Pages of a former daemon that nobody maps can be freed.
        for filled in filled {
            let page = |page: StorePage| u32::try_from(page.0).unwrap_or(u32::MAX);
            contents.add_orphans(page(filled.start)..page(filled.end));
        }
        let new = Domain {
            guardians,
            store,
            contents,
            candidates: Candidates::default(),
            full: false,
            appended: 0,
            punched: 0,
            last_reclaim: Instant::now(),
            not_freed: None,
            reserved: None,
            next_search: None,
        };
        self.domains.insert(name.to_owned(), new);
        Ok(())
    }

    /// Tells the library of a new VM the addresses of RAM and the page store. Before, adopts or
    /// creates the store of the VM's domain if needed. The error text is for the operator.
    fn introduce(
        &mut self,
        domain: &str,
        layout: &RamLayout,
        advice: &[Advice],
        guest: &mut dyn Guest,
    ) -> Result<(), String> {
        self.adopt_store(domain, guest.pid())?;
        if !self.domains.contains_key(domain) {
            let store = Store::create(domain, self.settings.store_cap);
            self.add_domain(domain, store.map_err(|e| e.to_string())?)?;
        }
        let Some(domain) = self.domains.get(domain) else {
            return Err("no page store".into());
        };
        let mut ask = |order: &Order, descriptor| match guest.order(order, descriptor) {
            Ok(Reply::Error { reason }) => Err(reason),
            Ok(reply) => Ok(reply),
            Err(error) => Err(error.to_string()),
        };
        for (block, &advice) in layout.blocks.iter().zip(advice) {
            ask(&add_ram(block, advice), None)?;
        }
        let order = Order::AddStore {
            store: domain.store_number(),
            max_pages: memfold_store::MAX_PAGES,
        };
        ask(&order, Some(domain.store.read_only())).map(drop)
    }

    pub(super) fn remove(&mut self, id: VmId) {
        let Some(vm) = self.vms.remove(&id) else {
            return;
        };
        self.share_stacks();
        let Some(domain) = self.domains.get_mut(&vm.domain) else {
            return;
        };
        vm.drop_references(domain);
        domain
            .contents
            .leave_all(id, &|m| vm.table.cached_ranges(m.file));
        if self.vms.values().any(|other| other.domain == vm.domain) {
            self.reclaim(&vm.domain, false);
        } else {
            // After the last VM of a domain, the store ends with the engine's descriptor of its
            // file.
            self.domains.remove(&vm.domain);
            self.schedule.pairs.set(&vm.domain, None);
            self.schedule.reclaims.set(&vm.domain, None);
        }
    }

    /// Handles a library that no longer answers: the VM is not folded until `Command::Reached`.
    /// Usually the VM is ending; the daemon's watcher of the VM's process reports that.
    pub(super) fn lost(&mut self, id: VmId, error: &GuestError) {
        if let Some(vm) = self.vms.get_mut(&id) {
            info!(
                vm = vm.stats.name,
                error = error as &dyn std::error::Error,
                "folding of the VM stopped; the daemon folds again when memfold's library in QEMU answers"
            );
            vm.stats.problem = Some(error.to_string());
            vm.is_lost |= vm.guest.has_library();
            vm.stack.clear();
            vm.wait_for_pause.clear();
            vm.back.forget();
        }
    }

    /// Uses a new connection to a VM's library after [`Engine::lost`], or the first one if the
    /// library did not answer when the VM was added.
    pub(super) fn set_reached(&mut self, id: VmId, guest: Box<dyn Guest>, problem: Option<String>) {
        let Some(vm) = self.vms.get_mut(&id) else {
            return;
        };
        vm.guest = guest;
        // The effects of the last orders are unknown, so the library must be told everything again.
        vm.introduced = false;
        // The library serves one connection after the other. So the orders of the last connection
        // have ended, and the mappings that are read from now on are complete.
        vm.is_lost = false;
        vm.maps_stale = true;
        self.set_problem(id, problem);
    }

    /// Gives the library of a VM a socket over which the missing pages of the VM's memory are
    /// brought. The VM may not be folded meanwhile, for whatever reason.
    pub(super) fn await_pages(&mut self, id: VmId, socket: &OwnedFd) -> Result<(), String> {
        let vm = self.vms.get_mut(&id).ok_or(ENDED)?;
        let order = Order::Await { ranges: Vec::new() };
        match vm.guest.order(&order, Some(socket.as_fd())) {
            Ok(Reply::Ok) => Ok(()),
            Ok(Reply::Error { reason }) => Err(reason),
            Ok(other) => Err(format!("unexpected reply: {other:?}")),
            Err(error) => {
                self.lost(id, &error);
                Err(error.to_string())
            }
        }
    }

    /// Sends an order for a snapshot (track writes, stop, continue, save old bytes) to the library.
    /// Without an order, another component may track the VM's writes. The engine then leaves the VM
    /// alone until [`Engine::release`]. If the receiver of the answer is gone, releases the VM at
    /// once, because nobody else would.
    pub(super) fn hold(
        &mut self,
        id: VmId,
        order: Option<&Order>,
        descriptor: Option<BorrowedFd<'_>>,
        answer: &SyncSender<Result<(), String>>,
    ) {
        if answer
            .send(self.try_to_hold(id, order, descriptor))
            .is_err()
        {
            self.release(id);
        }
    }

    fn try_to_hold(
        &mut self,
        id: VmId,
        order: Option<&Order>,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), String> {
        let vm = self.vms.get_mut(&id).ok_or(ENDED)?;
        let reply = order.map_or(Ok(Reply::Ok), |order| vm.guest.order(order, descriptor));
        match reply {
            Ok(Reply::Ok) => {
                let after = vm.stats.problem.replace(HELD.to_owned());
                vm.held.get_or_insert(Held { after });
                Ok(())
            }
            Ok(Reply::Error { reason }) => Err(reason),
            Ok(other) => Err(format!("unexpected reply: {other:?}")),
            Err(error) => {
                self.lost(id, &error);
                Err(error.to_string())
            }
        }
    }

    pub(super) fn release(&mut self, id: VmId) {
        let Some(vm) = self.vms.get_mut(&id) else {
            return;
        };
        let after = vm.held.take();
        let undo = [Order::Continue, Order::UntrackWrites, Order::ForgetPast];
        if !undo.iter().all(|order| self.tell(id, order)) {
            return;
        }
        if let Some(held) = after {
            self.set_problem(id, held.after);
        }
    }

    /// Sends an order that undoes an earlier order; a refusal means that there was nothing to undo.
    /// Returns whether the library answered.
    fn tell(&mut self, id: VmId, order: &Order) -> bool {
        let Some(vm) = self.vms.get_mut(&id) else {
            return false;
        };
        match vm.guest.order(order, None) {
            Ok(Reply::Error { reason }) => debug!(
                vm = vm.stats.name,
                reason, "memfold's library in QEMU had nothing to undo"
            ),
            Ok(_) => {}
            Err(error) => {
                self.lost(id, &error);
                return false;
            }
        }
        true
    }

    pub(super) fn set_problem(&mut self, id: VmId, mut problem: Option<String>) {
        if let Some(held) = self.vms.get_mut(&id).and_then(|vm| vm.held.as_mut()) {
            // While a page is being folded, it is at no place where a snapshot would look for it.
            held.after = problem;
            return;
        }
        let Some(mut vm) = self.vms.remove(&id) else {
            return;
        };
        if problem.is_none() && !vm.introduced {
            let layout = vm.table.layout().clone();
            problem = vm
                .forget_blocks()
                .map_err(|error| error.to_string())
                .and_then(|()| self.introduce(&vm.domain, &layout, &vm.advice, vm.guest.as_mut()))
                .err();
            vm.introduced = problem.is_none();
            vm.maps_stale = true;
        }
        if vm.stats.problem != problem {
            info!(
                vm = vm.stats.name,
                problem = problem.as_deref().unwrap_or("none"),
                "conditions for folding changed"
            );
            vm.stats.problem = problem;
            self.sweep_wanted = true;
        }
        self.vms.insert(id, vm);
    }

    pub(super) fn set_layout(&mut self, id: VmId, layout: &RamLayout, advice: Vec<Advice>) {
        let vm = self.vms.get_mut(&id);
        let Some(vm) = vm.filter(|vm| vm.table.layout() != layout) else {
            return;
        };
        info!(
            vm = vm.stats.name,
            pages = layout.pages(),
            "RAM layout of the VM changed"
        );
        let known = vm.table.layout().blocks.clone();
        let gone = known.iter().filter(|b| !layout.blocks.contains(b));
        vm.gone_blocks.extend(gone.map(|block| block.hva));
        if let Some(domain) = self.domains.get_mut(&vm.domain) {
            vm.drop_references(domain);
            for (_, pages, file, page) in vm.table.all_cached() {
                let member = Member { vm: id, file };
                domain
                    .contents
                    .count_cached(member, page..page + pages, false);
            }
        }
        // The tables change whatever the library answers, because the daemon sends a layout only
        // once.
        vm.table = VmTable::new(layout.clone());
        vm.advice = advice;
        vm.stack.clear();
        vm.wait_for_pause.clear();
        vm.huge.clear();
        vm.back.forget();
        vm.maps_stale = true;
        if vm.stats.problem.is_some() && !vm.introduced {
            return;
        }
        if let Err(error) = vm.tell_layout(layout, &known) {
            return self.lost(id, &error);
        }
        self.sync(id);
    }
}

const fn add_ram(block: &RamBlock, advice: Advice) -> Order {
    Order::AddRam {
        hva: block.hva.0,
        pages: block.pages,
        advice,
    }
}

impl VmState {
    /// Decrements the reference counts of the store pages that the VM maps, before the VM's table
    /// is dropped.
    fn drop_references(&self, domain: &mut Domain) {
        let mapped = self.table.all_mapped().into_iter();
        for store_page in mapped.filter_map(|stored| stored.checked_sub(1)) {
            domain.contents.count_reference(store_page, false);
        }
    }

    /// Makes the library remove RAM blocks that are gone, before other memory is mapped at their
    /// addresses.
    fn forget_blocks(&mut self) -> Result<(), GuestError> {
        while let Some(hva) = self.gone_blocks.last() {
            let order = Order::RemoveRam { hva: hva.0 };
            if let Reply::Error { reason } = self.guest.order(&order, None)? {
                debug!(vm = self.stats.name, %hva, reason, "memfold's library in QEMU did not know a RAM block that was removed");
            }
            self.gone_blocks.pop();
        }
        Ok(())
    }

    /// Tells the library which RAM blocks are gone and which are new.
    fn tell_layout(&mut self, layout: &RamLayout, known: &[RamBlock]) -> Result<(), GuestError> {
        self.forget_blocks()?;
        let new = layout.blocks.iter().zip(&self.advice);
        for (block, &advice) in new.filter(|(block, _)| !known.contains(block)) {
            if let Reply::Error { reason } = self.guest.order(&add_ram(block, advice), None)? {
                warn!(
                    vm = self.stats.name,
                    block = block.name,
                    reason,
                    "RAM block is not shared (folded); no action is needed"
                );
            }
        }
        Ok(())
    }
}

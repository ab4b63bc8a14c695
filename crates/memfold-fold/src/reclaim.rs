//! Frees pages of the page store that no VM needs any more. The kernel's page tables show which
//! guest pages map the store, and which of them already have private copies.
//!
//! A page of the store may be freed (punched out of the store's file) if no VM maps it, or if every
//! guest page that maps it has a private copy *in memory*. No access of a guest can then reach the
//! page any more. A private copy that seems to be swapped out does not count: `PAGEMAP_SCAN` also
//! shows write-protected pages as swapped, and these may still use the store.

use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt};
use memfold_store::mapped;
use memfold_store::mapped::FileMapping;
use memfold_sys::cpu::thread_cpu_ns;
use memfold_sys::pagemap::Filter;
use memfold_units::StorePage;
use memfold_wire::library::{Order, Reply};
use rustix::process::Pid;
use tracing::{debug, warn};

use super::content::StorePageFacts;
use super::domain::Domain;
use super::guest::{GuestError, VmId};
use super::hint_stack::Hint;
use super::member::Member;
use super::needed::needed_store_pages;
use super::schedule::Work;
use super::state::{Engine, VmState, foldable, with_domain};
use super::vm_table::{Mapped, PIECE, VmTable};

/// Time between two reclaims of a domain.
const RECLAIM_INTERVAL: Duration = Duration::from_secs(6);

/// Time between two syncs of a VM without reports. (Guests write to folded pages without a report.)
const QUIET_INTERVAL: Duration = Duration::from_secs(30);

/// Longest time between two reads of a VM's mappings, which verify the engine's own tables.
const FULL_SYNC_INTERVAL: Duration = Duration::from_secs(30);

impl Engine {
    /// Returns the time of the next sync or reclaim. All VMs share the budget of syncs, so that
    /// with many VMs, each is synced less often.
    pub(super) fn sync_time(&mut self, now: Instant) -> Option<Instant> {
        let sync = self.schedule.first(Work::Sync);
        let due = sync.into_iter().chain(self.schedule.reclaims.first());
        let wait = self.sync_cpu.wait(now).unwrap_or_default();
        Some(due.min()?.max(now + wait))
    }

    /// Syncs the tables of the VM that has waited longest with the kernel's page tables, or frees
    /// pages of a page store, if that has waited longer. Returns whether one of both was due.
    pub(super) fn sync_due(&mut self, now: Instant) -> bool {
        self.reschedule();
        if self.sync_time(now).is_none_or(|due| due > now) {
            return false;
        }
        let began_ns = thread_cpu_ns();
        let sync = self.schedule.first(Work::Sync);
        let reclaim = self.schedule.reclaims.first();
        let reclaims_first = reclaim.is_some_and(|due| sync.is_none_or(|sync| due < sync));
        if reclaims_first {
            let domain = self.schedule.reclaims.due(now).next().cloned();
            if let Some(domain) = domain {
                self.reclaim(&domain, false);
            }
        } else if let Some(id) = self.first_due(Work::Sync, now) {
            self.sync_next(id, now);
        }
        self.sync_cpu
            .spend((thread_cpu_ns() - began_ns) as f64, Instant::now());
        true
    }

    fn sync_next(&mut self, id: VmId, now: Instant) {
        let was_active = self.vms.get(&id).is_some_and(|vm| vm.active);
        self.introduce_late_files(id);
        self.sync(id);
        let Some(vm) = self.vms.get_mut(&id) else {
            return;
        };
        // The sync has counted more private copies than the one before.
        let has_new_copies = vm.active && !was_active;
        // The next sync introduces the files that still wait, if no message of the agent comes.
        vm.active = !vm.late_files.is_empty();
        vm.last_sync = now;
        vm.table.pack_unchanged();
        let hint = |file, page| Hint::new(file, page, 1, now);
        for hint in vm.huge.worth_it_now(&vm.table, hint) {
            vm.stack.push(hint);
        }
        vm.zero.consider(now, vm.guest.pid());
        if was_active || has_new_copies {
            let domain = vm.domain.clone();
            self.want_reclaim(&domain, RECLAIM_INTERVAL);
        }
    }

    /// Plans the next reclaim of a domain's page store, if none is planned.
    fn want_reclaim(&mut self, name: &str, interval: Duration) {
        let Some(domain) = self.domains.get(name) else {
            return;
        };
        if !self.schedule.reclaims.contains(name) {
            let due = domain.last_reclaim + interval;
            self.schedule.reclaims.set(&name.to_owned(), Some(due));
        }
    }

    /// Syncs the tables of every VM with the kernel's page tables.
    pub(super) fn sync_all(&mut self) {
        for id in self.vms.keys().copied().collect::<Vec<_>>() {
            self.sync(id);
        }
    }

    /// Syncs the tables of one VM with the kernel's page tables. Returns whether the kernel's
    /// tables were read. This does not depend on whether the VM may be folded: its pages may map
    /// the store in either case.
    ///
    /// The mappings of the store change by the engine's orders, and by discards, which the library
    /// counts. `/proc/PID/maps` is expensive with thousands of mappings, so it is read only after
    /// discards, and otherwise once in [`FULL_SYNC_INTERVAL`]. The engine's table contains at least
    /// the existing mappings, because a discard only removes mappings.
    pub(super) fn sync(&mut self, id: VmId) -> bool {
        if let Err(error) = self.read_library_stats(id) {
            self.lost(id, &error);
            return false;
        }
        self.note_company(id);
        let Some((vm, domain)) = with_domain(&mut self.vms, &mut self.domains, id)
            .filter(|(vm, _)| vm.may_read_tables())
        else {
            return false;
        };
        let full = vm.maps_stale || vm.last_full_sync.elapsed() > FULL_SYNC_INTERVAL;
        match look(vm, domain, full) {
            // Pages may have been hinted while they belonged to the snapshot, and be the guest's
            // own by now.
            Ok(more) => self.sweep_wanted |= more,
            Err(error) => {
                // The VM is ending; a command to remove it will follow.
                debug!(vm = vm.stats.name, error = %error, "cannot read the VM's page tables");
                return false;
            }
        }
        if vm.is_foldable() && !vm.back.old_images.is_empty() {
            if let Err(error) = self.close_old_images(id) {
                self.lost(id, &error);
                return false;
            }
        }
        true
    }

    fn read_library_stats(&mut self, id: VmId) -> Result<(), GuestError> {
        let Some(vm) = foldable(&mut self.vms, id) else {
            return Ok(());
        };
        if let Reply::Stats(library) = vm.guest.order(&Order::Stats, None)? {
            vm.stats.freeze_max_ns = library.freeze_max_ns;
            vm.stats.freeze_histogram = library.freeze_histogram.to_vec();
            vm.maps_stale |= vm.discarded != library.discarded_pages;
            vm.discarded = library.discarded_pages;
        }
        Ok(())
    }

    /// Frees (punches out) the pages in the page store of trust domain `name` that no VM can need.
    /// `sync_all`: whether every VM of the domain is synced before, so that the pages are freed
    /// that guests have overwritten until now. Otherwise, the pages are freed that the VMs' last
    /// syncs have found, at the times of the VMs ([`needed_store_pages`]).
    pub(super) fn reclaim(&mut self, name: &str, sync_all: bool) {
        self.schedule.reclaims.set(&name.to_owned(), None);
        if let Some(domain) = self.domains.get_mut(name) {
            domain.last_reclaim = Instant::now();
        }
        let members = self.vms.iter().filter(|(_, vm)| vm.domain == name);
        let ids: Vec<VmId> = members.map(|(&id, _)| id).collect();
        // The engine must know every mapping of the store. If it does not, nothing is punched out.
        // All VMs are synced, also after one that could not be, because the debt is computed from
        // these syncs.
        let mut unknown = None;
        for &id in &ids {
            let why = self.why_unknown(id, sync_all);
            unknown = unknown.or(why);
        }
        let unknown = unknown.or_else(|| self.guardian(name, &ids));
        let Some(domain) = self.domains.get_mut(name) else {
            return;
        };
        domain.not_freed = unknown;
        if let Some(reason) = &domain.not_freed {
            debug!(domain = name, reason, "no page of the page store is freed");
            return self.want_reclaim(name, QUIET_INTERVAL);
        }
        let orphans = domain.contents.take_orphans();
        let Some(domain) = self.domains.get(name) else {
            return;
        };
        let needed = needed_pages(ids.iter().filter_map(|id| self.vms.get(id)));
        let is_needed = |page: u32| {
            needed
                .get(&(page / PIECE))
                .is_some_and(|word| word >> (page % PIECE) & 1 == 1)
        };
        let known = domain
            .contents
            .known_store_pages()
            .filter(|&(page, facts)| {
                let known = facts.references > 0 || facts.holds.is_some();
                known && !facts.punched && !is_needed(page) && !self.is_wanted(domain, facts)
            });
        let mut garbage: Vec<u32> = known.map(|(page, _)| page).chain(orphans).collect();
        garbage.sort_unstable();
        garbage.dedup();
        if let Some(domain) = self.domains.get_mut(name) {
            punch(name, domain, &garbage);
        }
    }

    /// Returns why the engine does not know every mapping of the store in a VM; `None` if it does.
    /// `sync_first`: whether the VM is synced even if its mappings are known.
    fn why_unknown(&mut self, id: VmId, sync_first: bool) -> Option<String> {
        let is_stale = self.vms.get(&id)?.maps_stale;
        let is_read = !(is_stale || sync_first) || self.sync(id);
        let vm = self.vms.get(&id)?;
        let name = &vm.stats.name;
        if vm.is_lost {
            return Some(format!(
                "memfold's library in the QEMU of VM '{name}' does not answer"
            ));
        }
        // A VM that must not be read during a snapshot gets no orders meanwhile, so its known
        // mappings stay complete.
        if is_read || !vm.may_read_tables() && !vm.maps_stale {
            return None;
        }
        let why = if vm.held.is_some() {
            "not read"
        } else {
            "not readable"
        };
        Some(format!("the mappings of VM '{name}' are {why}"))
    }

    /// Returns which process prevents that pages are freed: one that lives and that mapped the
    /// store when this daemon adopted it, and that is not a VM of this engine. A VM whose library
    /// the engine never reached counts as unknown, because its library may still execute an order
    /// of an earlier daemon.
    fn guardian(&mut self, name: &str, ids: &[VmId]) -> Option<String> {
        let vms: Vec<&VmState> = ids.iter().filter_map(|id| self.vms.get(id)).collect();
        let domain = self.domains.get_mut(name)?;
        let is_reached = |pid: Pid| {
            let mut reached = vms.iter().filter(|vm| vm.guest.has_library());
            reached.any(|vm| vm.guest.pid() == pid)
        };
        let lives = |pid: Pid| {
            std::path::Path::new(&format!("/proc/{}/maps", pid.as_raw_nonzero())).exists()
        };
        domain
            .guardians
            .retain(|&pid| !is_reached(pid) && lives(pid));
        let pid = *domain.guardians.first()?;
        let vm = vms.iter().find(|vm| vm.guest.pid() == pid);
        Some(match vm {
            Some(vm) => format!(
                "memfold's library in the QEMU of VM '{}' cannot be reached",
                vm.stats.name
            ),
            None => format!(
                "process {}, which is no VM of this daemon, maps the page store",
                pid.as_raw_nonzero()
            ),
        })
    }

    /// Returns whether a store page will soon be folded: it is filled and not mapped yet, and two
    /// VMs still cache its content.
    fn is_wanted(&self, domain: &Domain, facts: StorePageFacts) -> bool {
        let Some((content, page)) = facts.holds.filter(|_| facts.references == 0) else {
            return false;
        };
        let Some(content) = domain.contents.get(content) else {
            return false;
        };
        let cached = |m: &&Member| {
            let table = self.vms.get(&m.vm).map(|vm| &vm.table);
            let place = table.and_then(|table| Some((table, table.place(m.file, page)?)));
            place.is_some_and(|(table, at)| !table.is_refused(at) && !table.is_template(at))
        };
        content.members.iter().filter(cached).take(2).count() > 1
    }
}

impl VmState {
    /// Returns whether the kernel's tables about the VM may be read now. While a snapshot of the VM
    /// is made, the engine leaves the VM alone. A QEMU that does not answer may hang in the kernel,
    /// and a read of its tables could hang, too.
    pub(super) fn may_read_tables(&self) -> bool {
        self.held.is_none() && !self.is_lost
    }

    /// Returns the time at which the next sync of this VM is due; `None` for a VM that is inactive,
    /// maps no store page, and whose tables are packed.
    pub(super) fn look_due(&self, interval: Duration) -> Option<Instant> {
        let interval = if self.active {
            interval
        } else if self.stats.mapped_pages > 0 || self.table.has_unpacked() {
            QUIET_INTERVAL
        } else {
            return None;
        };
        Some(self.last_sync + interval)
    }
}

/// Returns the store pages that a VM may still show: for each piece of [`PIECE`] pages, a word with
/// one bit for each page.
fn needed_pages<'a>(vms: impl Iterator<Item = &'a VmState>) -> HashMap<u32, u64> {
    let mut needed: HashMap<u32, u64> = HashMap::new();
    for vm in vms {
        let table = &vm.table;
        needed_store_pages(table, |piece, pages| {
            *needed.entry(piece).or_default() |= pages;
        });
    }
    needed
}

/// Punches store pages out of the store. The pages are in ascending order.
fn punch(name: &str, domain: &mut Domain, garbage: &[u32]) {
    for run in garbage.chunk_by(|a, b| a + 1 == *b) {
        for &page in run {
            domain.contents.unindex_store_page(page);
            domain.contents.set_punched(page);
        }
        let first = StorePage(u64::from(run[0]));
        match domain.store.punch(first, run.len() as u64) {
            Ok(()) => domain.punched += run.len() as u64,
            Err(error) => warn!(
                domain = name,
                error = &error as &dyn std::error::Error,
                "cannot free unused pages of the page store; the pages stay until the trust domain's last VM ends"
            ),
        }
    }
    if !garbage.is_empty() {
        domain.full = false;
        debug!(
            domain = name,
            pages = garbage.len(),
            "pages of the page store that no VM needs were freed"
        );
    }
}

/// Reads the kernel's tables: where the store is mapped (if `full`), and which pages have private
/// copies. Returns whether a cached page may be folded now that could not be folded before.
fn look(vm: &mut VmState, domain: &mut Domain, full: bool) -> std::io::Result<bool> {
    let pid = vm.guest.pid();
    let pages = vm.table.pages();
    let mut truth: Vec<u32> = Vec::new();
    if full {
        let mappings = mapped::read(pid, domain.store.identity())?;
        vm.mappings = mappings.total;
        vm.stats.mappings = mappings.total as u64;
        vm.last_full_sync = Instant::now();
        truth.resize(pages as usize, 0);
        for mapping in &mappings.store {
            mark_mapping(&vm.table, mapping, &mut truth);
        }
        super::fold_back::note_views(vm, &mappings.others);
    }
    let pagemap = vm.pagemap.as_ref().ok_or(std::io::ErrorKind::NotFound)?;
    // One bit for each page: set if the page is in memory and is not the store's page. A page that
    // was copied and then swapped out counts as the store's page, so that rather too many store
    // pages are kept.
    let mut own = vec![0_u64; pages.div_ceil(64) as usize];
    for slot in &vm.table.layout().slots {
        for region in pagemap.scan(slot.hva, slot.hva.add_pages(slot.pages), Filter::COPIES)? {
            let Some(first) = vm.table.index_at(region.start) else {
                continue;
            };
            let length = u32::try_from(region.pages()).unwrap_or(0);
            for at in first..first.saturating_add(length).min(pages) {
                own[at as usize / 64] |= 1 << (at % 64);
            }
        }
    }
    vm.stats.zero_saved_pages = vm.table.keep_zero(&own);
    let mut foldable = own.clone();
    super::fold_back::touched(vm, &mut foldable)?;
    (vm.stats.template_pages, vm.stats.template_copied_pages) = vm.table.count_views(&own);
    vm.stats.template_shared_pages = vm.table.count_shared_views(&own);
    let more = vm.table.set_foldable(&foldable);
    if full {
        correct_mapped(&mut vm.table, domain, &truth);
        vm.maps_stale = false;
    }
    let (mapped_pages, copied) = vm.table.set_copied(&own);
    // After a private copy was made, a store page may be free, which the next sync finds.
    vm.active |= copied > vm.stats.copied_pages;
    vm.stats.mapped_pages = mapped_pages;
    vm.stats.copied_pages = copied;
    Ok(more)
}

/// Corrects the VM's table: `truth` has, for each guest page, the store page that it maps, plus
/// one.
fn correct_mapped(table: &mut VmTable, domain: &mut Domain, truth: &[u32]) {
    let known = table.all_mapped().into_iter().zip(truth);
    let wrong = (0..)
        .zip(known)
        .filter(|(_, (known, truth))| known != *truth);
    for (at, (known, &truth)) in wrong {
        if let Some(store_page) = known.checked_sub(1) {
            domain.contents.count_reference(store_page, false);
        }
        let now = truth.checked_sub(1);
        if let Some(store_page) = now {
            domain.contents.count_reference(store_page, true);
        }
        let now = now.map(|store_page| Mapped {
            store_page,
            shared: false,
        });
        table.set_mapped(at, now);
    }
}

/// Enters the store page of each page of a mapping into `truth`, plus one.
fn mark_mapping(table: &VmTable, mapping: &FileMapping, truth: &mut [u32]) {
    for step in 0..mapping.pages {
        let Ok(store_page) = u32::try_from(mapping.file_page + step) else {
            return;
        };
        let at = table.index_at(mapping.hva.add_pages(step));
        if let Some(entry) = at.and_then(|at| truth.get_mut(at as usize)) {
            *entry = store_page + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use memfold_wire::library::Advice;

    use super::*;
    use crate::qemu_guest::Unfolded;
    use crate::random_changes::{FakeGuest, PAGES, add, layout};
    use crate::settings::EngineSettings;

    /// Another process, which ends with the test.
    struct Process(std::process::Child);

    impl Drop for Process {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_vm_that_mapped_an_adopted_store_prevents_freeing_until_its_library_is_reached() {
        let sleep = std::process::Command::new("sleep").arg("600").spawn();
        let process = Process(sleep.unwrap());
        let pid = Pid::from_child(&process.0);
        let mut engine = Engine::new(EngineSettings::default());
        add(&mut engine, 1);
        let domain = engine.vms[&1].domain.clone();
        let problem = Some("cannot reach the library".to_owned());
        engine.add(
            2,
            "vm2".to_owned(),
            Some(domain.clone()),
            layout(PAGES),
            &[Advice::default()],
            Box::new(Unfolded(pid)),
            problem.clone(),
        );
        let not_freed = |engine: &mut Engine| {
            engine.reclaim(&domain, true);
            engine.domains[&domain].not_freed.clone()
        };
        assert_eq!(not_freed(&mut engine), None);
        engine.domains.get_mut(&domain).unwrap().guardians = vec![pid];
        let reason = "memfold's library in the QEMU of VM 'vm2' cannot be reached";
        assert_eq!(not_freed(&mut engine).as_deref(), Some(reason));
        let mut guest = FakeGuest::new(|_| Reply::Ok);
        guest.pid = pid;
        engine.set_reached(2, Box::new(guest), problem);
        assert_eq!(not_freed(&mut engine), None);
    }
}

//! Frees pages of the page store that no VM needs any more. The kernel's page tables show which
//! guest pages map the store, and which of them already have private copies.
//!
//! A page of the store may be freed (punched out of the store's file) if no VM maps it, or if every
//! guest page that maps it has a private copy *in memory*. No access of a guest can then reach the
//! page any more. A private copy that seems to be swapped out does not count: `PAGEMAP_SCAN` also
//! shows write-protected pages as swapped, and these may still use the store.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use memfold_store::mapped;
use memfold_store::mapped::FileMapping;
use memfold_sys::cpu::thread_cpu_ns;
use memfold_sys::pagemap::Filter;
use memfold_units::StorePage;
use memfold_wire::library::{Order, Reply};
use rustix::process::Pid;
use tracing::{debug, warn};

use super::content::{Member, StorePageFacts};
use super::domain::Domain;
use super::guest::{GuestError, VmId};
use super::hint_stack::Hint;
use super::state::{Engine, VmState, foldable, with_domain};
use super::vm_table::{Mapped, PIECE, VmTable};

/// Time between two reclaims of a domain.
const RECLAIM_INTERVAL: Duration = Duration::from_secs(6);

/// Time between two syncs of a VM without reports. (Guests write to folded pages without a report.)
const QUIET_INTERVAL: Duration = Duration::from_secs(30);

/// Longest time between two reads of a VM's mappings, which verify the engine's own tables.
const FULL_SYNC_INTERVAL: Duration = Duration::from_secs(30);

impl Engine {
    /// Returns the VM that has been due for longest, by the times that `due` returns; `None` if
    /// none is due at `now`.
    pub(super) fn first_due(
        &self,
        now: Instant,
        due: impl Fn(&VmState) -> Option<Instant>,
    ) -> Option<VmId> {
        let vms = self.vms.iter().filter(|(_, vm)| vm.is_foldable());
        let due = vms.filter_map(|(&id, vm)| Some((due(vm)?, id)));
        due.filter(|(due, _)| *due <= now).min().map(|(_, id)| id)
    }

    /// Syncs the tables of the VM that has waited longest with the kernel's page tables. Returns
    /// whether a VM was due.
    pub(super) fn sync_due(&mut self, now: Instant) -> bool {
        let interval = self.settings.sync_interval;
        let Some(id) = self.first_due(now, |vm| vm.look_due(interval)) else {
            return false;
        };
        self.sync(id);
        let Some(vm) = self.vms.get_mut(&id) else {
            return true;
        };
        vm.active = false;
        vm.last_sync = now;
        let hint = |file, page| Hint::new(file, page, 1, now);
        for hint in vm.huge.worth_it_now(&vm.table, hint) {
            vm.stack.push(hint);
        }
        vm.zero.consider(now, vm.guest.pid());
        let domain = vm.domain.clone();
        let reclaim = |d: &Domain| now >= d.last_reclaim + RECLAIM_INTERVAL;
        if self.domains.get(&domain).is_some_and(reclaim) {
            self.reclaim(&domain);
        } else if let Some(vm) = self.vms.get_mut(&id) {
            // The store pages that this sync has found are not freed yet, and the VM may have no
            // further activity for long.
            vm.active = true;
        }
        true
    }

    /// Syncs the tables of every VM with the kernel's page tables.
    pub(super) fn sync_all(&mut self) {
        for id in self.vms.keys().copied().collect::<Vec<_>>() {
            self.sync(id);
        }
    }

    /// Syncs the tables of one VM with the kernel's page tables. Returns whether the kernel's
    /// tables could be read.
    ///
    /// The mappings of the store change by the engine's orders, and by discards, which the library
    /// counts. `/proc/PID/maps` is expensive with thousands of mappings, so it is read only after
    /// discards, and otherwise once in [`FULL_SYNC_INTERVAL`]. The engine's table contains at least
    /// the existing mappings, because a discard only removes mappings.
    pub(super) fn sync(&mut self, id: VmId) -> bool {
        let began = thread_cpu_ns();
        if let Err(error) = self.read_library_stats(id) {
            self.lost(id, &error);
            return false;
        }
        self.note_company(id);
        let Some((vm, domain)) =
            with_domain(&mut self.vms, &mut self.domains, id).filter(|(vm, _)| vm.is_foldable())
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
        // Syncs may use a tenth of the CPU budget.
        let cost = Duration::from_nanos(thread_cpu_ns() - began);
        let share = (self.settings.cpu_share / 10.0).max(1e-4);
        vm.sync_cost = Duration::from_secs_f64((cost.as_secs_f64() / share).min(60.0));
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
    pub(super) fn reclaim(&mut self, name: &str) {
        // Every VM of the domain must have been synced just now. If one cannot be, nothing is
        // punched out.
        let members = self.vms.iter().filter(|(_, vm)| vm.domain == name);
        let ids: Vec<VmId> = members.map(|(&id, _)| id).collect();
        // All VMs are synced, also after one that could not be, because the debt is computed from
        // these syncs.
        let mut is_read = true;
        for &id in &ids {
            is_read &= self.sync(id);
        }
        if !is_read || self.is_guarded(name, &ids) {
            return;
        }
        let Some(domain) = self.domains.get_mut(name) else {
            return;
        };
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
            domain.last_reclaim = Instant::now();
            punch(name, domain, &garbage);
        }
    }

    /// Returns whether a process lives that mapped the store when this daemon adopted it, and that
    /// is not a VM of this engine.
    fn is_guarded(&mut self, name: &str, ids: &[VmId]) -> bool {
        let known = ids.iter().filter_map(|id| self.vms.get(id));
        let known: Vec<_> = known.map(|vm| vm.guest.pid()).collect();
        let Some(domain) = self.domains.get_mut(name) else {
            return true;
        };
        let lives = |pid: &Pid| {
            std::path::Path::new(&format!("/proc/{}/maps", pid.as_raw_nonzero())).exists()
        };
        domain
            .guardians
            .retain(|pid| !known.contains(pid) && lives(pid));
        if let Some(pid) = domain.guardians.first() {
            let pid = pid.as_raw_nonzero();
            debug!(
                domain = name,
                pid,
                "no page of the page store is freed: a process unknown to this daemon maps the store"
            );
        }
        !domain.guardians.is_empty()
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
        content.members.iter().filter(cached).count() > 1
    }
}

impl VmState {
    /// Returns the time at which the next sync of this VM is due; `None` for a VM that is inactive
    /// and maps no store page.
    pub(super) fn look_due(&self, interval: Duration) -> Option<Instant> {
        let interval = if self.active {
            interval
        } else if self.stats.mapped_pages > 0 {
            QUIET_INTERVAL
        } else {
            return None;
        };
        Some(self.last_sync + interval.max(self.sync_cost))
    }
}

/// Returns the store pages that a VM page maps without a private copy: for each piece of [`PIECE`]
/// pages, a word with one bit for each page.
fn needed_pages<'a>(vms: impl Iterator<Item = &'a VmState>) -> HashMap<u32, u64> {
    let mut needed: HashMap<u32, u64> = HashMap::new();
    for vm in vms {
        for (at, stored) in (0..).zip(vm.table.all_mapped()) {
            if let Some(page) = stored.checked_sub(1).filter(|_| vm.table.is_shared(at)) {
                *needed.entry(page / PIECE).or_default() |= 1 << (page % PIECE);
            }
        }
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
        vm.maps_stale = false;
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
    let (mut mapped_pages, mut copied) = (0, 0);
    for (at, stored) in (0..pages).zip(vm.table.all_mapped()) {
        let before = stored.checked_sub(1).map(|store_page| Mapped {
            store_page,
            shared: vm.table.is_shared(at),
        });
        let store_page = if full {
            truth[at as usize].checked_sub(1)
        } else {
            before.map(|m| m.store_page)
        };
        let shared = own[at as usize / 64] >> (at % 64) & 1 == 0;
        let now = store_page.map(|store_page| Mapped { store_page, shared });
        if let Some(now) = now {
            mapped_pages += 1;
            copied += u64::from(!now.shared);
        }
        if before == now {
            continue;
        }
        if before.map(|m| m.store_page) != store_page {
            if let Some(before) = before {
                domain.contents.count_reference(before.store_page, false);
            }
            if let Some(now) = now {
                domain.contents.count_reference(now.store_page, true);
            }
        }
        vm.table.set_mapped(at, now);
    }
    // After a private copy was made, a store page may be free, which the next sync finds.
    vm.active |= copied > vm.stats.copied_pages;
    vm.stats.mapped_pages = mapped_pages;
    vm.stats.copied_pages = copied;
    Ok(more)
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

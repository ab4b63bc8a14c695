//! Drops private pages of a VM that equal its snapshot again (fold-back). A VM that runs from a
//! snapshot maps the snapshot's RAM image privately, so each page that the guest writes becomes a
//! private copy. If the copy later equals the image again, it is not needed any more.
//!
//! A *pass* searches all such mappings of a VM. The daemon compares pages first, so that a page
//! that differs costs the guest nothing. If a page is equal, memfold's library in QEMU freezes the
//! page, compares once more, and drops the private copy. The mapping stays unchanged.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use memfold_store::mapped::FileMapping;
use memfold_sys::cpu::thread_cpu_ns;
use memfold_sys::memory;
use memfold_sys::pagemap::{Filter, category};
use memfold_units::{Hva, PAGE_BYTES, PAGE_SIZE};
use memfold_wire::library::{FoldRun, Freeze, MAX_RUN_PAGES, MAX_RUNS, Order, Outcome, Reply};
use tracing::debug;

use super::guest::{GuestError, Refold, VmId};
use super::image::{Image, Part};
use super::schedule::Work;
use super::state::{Engine, VmState, with_domain};
use super::vm_table::{Index, VmTable};

/// Maximum number of pages compared in one step (some milliseconds). Each page may be a run of its
/// own.
const STEP_PAGES: u64 = MAX_RUNS as u64;

/// Number of pages read in one call.
const READ_PAGES: u64 = 64;

/// Delay before a failed step is tried again.
const LATER: Duration = Duration::from_secs(1);

impl VmState {
    /// Returns the time at which the next step of a pass is due. Returns `None` for a VM that does
    /// not run from a snapshot, or whose pages can be frozen neither by write protection nor by a
    /// stop.
    pub(super) fn back_due(&self) -> Option<Instant> {
        let image = self.back.image.as_ref()?;
        // The next step may need a stop.
        let due = || self.back.due.max(self.next_pause);
        (image.protectable || self.guest.can_stop()).then(due)
    }

    /// Returns whether page `at`, which maps a file, may be frozen by write protection in this
    /// batch.
    pub(super) fn may_refold_live(&self, at: Index) -> bool {
        let protectable = || self.back.image.as_ref().is_some_and(|i| i.protectable);
        self.refold == Some(Refold::Live) && (!self.table.is_in_view(at) || protectable())
    }
}

/// Records a VM's mappings of files other than the page store. The mappings in RAM are views of one
/// image, and of disk files that hold the rest of RAM. RAM that QEMU itself has mapped from a file
/// is never folded.
pub(super) fn note_views(vm: &mut VmState, mappings: &[FileMapping]) {
    let in_ram: Vec<(&FileMapping, Vec<(Index, Part)>)> = mappings
        .iter()
        .map(|mapping| (mapping, parts_in_ram(&vm.table, mapping)))
        .filter(|(_, parts)| !parts.is_empty())
        .collect();
    let named = in_ram.iter().find(|(mapping, _)| mapping.is_image);
    let first = named.or(in_ram.first()).map(|(mapping, _)| *mapping);
    let file = first.map(|mapping| mapping.file);
    if vm.back.image.as_ref().map(|image| image.identity) != file {
        vm.back.forget();
        let opened = first.map(|mapping| Image::open(vm.guest.pid(), mapping));
        vm.back.image = opened.transpose().unwrap_or_else(|error| {
            debug!(vm = vm.stats.name, %error, "cannot read the snapshot image that the VM's RAM is mapped from");
            None
        });
        // If one of the files cannot be write-protected, no page of this VM is.
        if let Some(image) = &mut vm.back.image {
            image.protectable &= in_ram.iter().all(|(m, _)| m.file == image.identity);
        }
        note_image_data(vm, &in_ram);
    }
    let of_image = in_ram.iter().filter(|(m, _)| Some(m.file) == file);
    vm.back.views = of_image
        .flat_map(|(_, parts)| parts.iter().map(|(_, part)| *part))
        .collect();
    let all = in_ram.iter().flat_map(|(_, parts)| parts);
    vm.table.set_views(all.map(|(first, part)| {
        let length = u32::try_from(part.pages).unwrap_or(u32::MAX);
        *first..first.saturating_add(length)
    }));
}

/// Records for which pages of RAM the image holds data. An image in a file system is mapped as a
/// whole, including its holes; every mapped page of a disk file counts as data.
fn note_image_data(vm: &mut VmState, in_ram: &[(&FileMapping, Vec<(Index, Part)>)]) {
    let Some(image) = &vm.back.image else {
        return vm.table.set_image_data(std::iter::empty());
    };
    let end = image.pages;
    let data = image.data().unwrap_or_else(|error| {
        // Without the holes, too many pages count as shared, and not too few.
        debug!(vm = vm.stats.name, %error, "cannot find the holes of the snapshot image that the VM's RAM is mapped from");
        std::iter::once(0..end).collect()
    });
    let mut filled = Vec::new();
    let of_image = in_ram.iter().filter(|(m, _)| m.file == image.identity);
    for (first, part) in of_image.flat_map(|(_, parts)| parts) {
        let pages = part.file_page..part.file_page + part.pages;
        for data in &data {
            let (from, to) = (data.start.max(pages.start), data.end.min(pages.end));
            let at = |page: u64| {
                let step = u32::try_from(page - pages.start).unwrap_or(u32::MAX);
                first.saturating_add(step)
            };
            if from < to {
                filled.push(at(from)..at(to));
            }
        }
    }
    let of_disks = in_ram.iter().filter(|(m, _)| m.file != image.identity);
    for (first, part) in of_disks.flat_map(|(_, parts)| parts) {
        let pages = u32::try_from(part.pages).unwrap_or(u32::MAX);
        filled.push(*first..first.saturating_add(pages));
    }
    vm.table.set_image_data(filled.into_iter());
}

/// Returns the parts of a mapping that are guest RAM, each with the index of its first page. A RAM
/// block may have pages between the guest's memory slots that are not RAM.
fn parts_in_ram(table: &VmTable, mapping: &FileMapping) -> Vec<(Index, Part)> {
    let end = mapping.hva.add_pages(mapping.pages);
    let slots = table.layout().slots.iter();
    let part = slots.filter_map(|slot| {
        let hva = slot.hva.max(mapping.hva);
        let end = slot.hva.add_pages(slot.pages).min(end);
        let pages = (hva < end).then(|| end.pages_since(hva))?;
        let file_page = mapping.file_page + hva.pages_since(mapping.hva);
        let part = Part {
            hva,
            pages,
            file_page,
        };
        Some((table.index_at(hva)?, part))
    });
    part.collect()
}

/// Marks pages in views that may be folded although the guest has not written them (one bit for
/// each page): pages that the guest has touched, of an image that only this VM has in memory.
pub(super) fn touched(vm: &VmState, bits: &mut [u64]) -> std::io::Result<()> {
    let filter = Filter {
        all_of: category::PRESENT | category::FILE,
        ..Filter::default()
    };
    let Some(map) = vm.pagemap.as_ref().filter(|_| vm.back.alone) else {
        return Ok(());
    };
    for view in &vm.back.views {
        for region in map.scan(view.hva, view.hva.add_pages(view.pages), filter)? {
            for step in 0..region.pages() {
                if let Some(at) = vm.table.index_at(region.start.add_pages(step)) {
                    bits[at as usize / 64] |= 1 << (at % 64);
                }
            }
        }
    }
    Ok(())
}

impl Engine {
    /// Records whether VM `id` is the only one that runs from its image.
    pub(super) fn note_company(&mut self, id: VmId) {
        let image = |vm: &VmState| vm.back.image.as_ref().map(|i| (i.identity, i.in_memory));
        let Some(mine) = self.vms.get(&id).and_then(image) else {
            return;
        };
        let users = self.vms.values().filter(|vm| image(vm) == Some(mine));
        let alone = !mine.1 && users.take(2).count() == 1;
        if let Some(vm) = self.vms.get_mut(&id) {
            vm.back.alone = alone;
        }
    }

    /// Makes the library close the images from which the VM's RAM was mapped earlier. An open image
    /// that was deleted uses memory or disk space.
    pub(super) fn close_old_images(&mut self, id: VmId) -> Result<(), GuestError> {
        let Some((vm, domain)) = with_domain(&mut self.vms, &mut self.domains, id) else {
            return Ok(());
        };
        let image = vm.back.image.as_ref().map(|image| image.number);
        while let Some(&store) = vm.back.old_images.last() {
            if store != domain.store_number() && Some(store) != image {
                let reply = vm.guest.order(&Order::RemoveStore { store }, None)?;
                if let Reply::Error { reason } = reply {
                    debug!(
                        vm = vm.stats.name,
                        reason, "memfold's library in QEMU did not have an old image open"
                    );
                }
            }
            vm.back.old_images.pop();
        }
        Ok(())
    }

    /// Does the next step of the pass that has waited longest, if a step is due.
    pub(super) fn fold_back_due(&mut self, now: Instant) {
        let Some(id) = self.first_due(Work::FoldBack, now) else {
            return;
        };
        let began = thread_cpu_ns();
        let library_ns = self.library_cpu_ns;
        if let Err(error) = self.fold_back(id, now) {
            return self.lost(id, &error);
        }
        let library_ns = self.library_cpu_ns - library_ns;
        let cost_ns = thread_cpu_ns() - began + library_ns;
        let cpu_share = self.settings.cpu_share;
        if let Some(vm) = self.vms.get_mut(&id) {
            vm.back.cost_ns += cost_ns;
            if vm.back.rest.is_empty() {
                vm.back.end(Instant::now(), cpu_share);
            }
        }
    }

    fn fold_back(&mut self, id: VmId, now: Instant) -> Result<(), GuestError> {
        if let Some(vm) = self.vms.get_mut(&id).filter(|vm| vm.back.rest.is_empty()) {
            // A sync is needed, because the recorded views may no longer exist.
            vm.maps_stale = true;
            if !self.sync(id) {
                return Ok(());
            }
        }
        let Some(vm) = self.vms.get_mut(&id) else {
            return Ok(());
        };
        let Some(image) = &vm.back.image else {
            return Ok(());
        };
        if vm.back.rest.is_empty() {
            let order = Order::AddStore {
                store: image.number,
                max_pages: image.pages,
            };
            let known = vm.guest.order(&order, Some(image.file.as_fd()))?;
            if let Reply::Error { reason } = known {
                debug!(
                    vm = vm.stats.name,
                    reason,
                    "memfold's library in QEMU refused the snapshot image, so no page of the VM is folded back"
                );
                return Ok(());
            }
            vm.back.rest = written(vm);
        }
        let freeze = match vm.guest.refold() {
            Refold::Live if image.protectable => Freeze::WriteProtect,
            Refold::Unknown if image.protectable => {
                vm.back.due = now + LATER;
                return Ok(());
            }
            _ if vm.guest.can_stop() => {
                vm.back.due = now + self.settings.pause_interval;
                self.settings.pause()
            }
            _ => {
                vm.back.rest.clear();
                return Ok(());
            }
        };
        let (runs, looked) = next_runs(vm);
        vm.back.looked += looked;
        if let Some(rate) = &mut self.rate {
            rate.spend(looked as f64, now);
        }
        if runs.is_empty() {
            return Ok(());
        }
        let order = Order::Fold { freeze, runs };
        let reply = match freeze {
            Freeze::Stopped { .. } => vm.order_with_stop(&order, self.settings.pause_interval)?,
            Freeze::Move | Freeze::WriteProtect => vm.guest.order(&order, None)?,
        };
        self.library_cpu_ns += vm.book_back(&order, &reply);
        Ok(())
    }
}

/// Takes the next parts of a pass, and returns the runs in them that equal the image, and the
/// number of compared pages.
fn next_runs(vm: &mut VmState) -> (Vec<FoldRun>, u64) {
    let (mut runs, mut looked) = (Vec::new(), 0);
    let (Some(image), Some(map)) = (&vm.back.image, &vm.pagemap) else {
        vm.back.rest.clear();
        return (runs, 0);
    };
    while looked + READ_PAGES <= STEP_PAGES {
        let Some(part) = vm.back.rest.pop() else {
            break;
        };
        let pages = part.pages.min(READ_PAGES);
        vm.back.rest.extend(part.after(pages));
        looked += pages;
        // Pages that were discarded or swapped out meanwhile are skipped, because reading them
        // would bring them back into memory.
        let Ok(there) = map.scan(part.hva, part.hva.add_pages(pages), Filter::COPIES) else {
            continue;
        };
        for region in there {
            equal_runs(vm, image, part.at(&region), &mut runs);
        }
    }
    (runs, looked)
}

impl VmState {
    /// Counts the pages that an order has folded back. Queues runs again for which the time did not
    /// suffice. Returns the CPU time of the library for the order, in nanoseconds.
    fn book_back(&mut self, order: &Order, reply: &Reply) -> u64 {
        let (
            Order::Fold { runs, .. },
            Reply::Outcomes {
                outcomes,
                cpu_ns,
                stopped_ns,
            },
        ) = (order, reply)
        else {
            // The library refused the whole order, so the pass ends.
            self.back.rest.clear();
            return 0;
        };
        for (run, outcome) in runs.iter().zip(outcomes) {
            let done = u64::from(outcome.pages_done(run.pages));
            self.back.found += done;
            self.stats.folded_back_pages += done;
            // If the VM does not run, no run was started, and none is queued again.
            if *outcome == Outcome::Late && *stopped_ns > 0 {
                self.back.looked -= u64::from(run.pages).min(self.back.looked);
                self.back.rest.push(Part {
                    hva: Hva(run.hva),
                    pages: run.pages.into(),
                    file_page: run.store_page,
                });
            }
        }
        self.note_pause(*stopped_ns);
        *cpu_ns
    }

    /// Counts a pause of the VM of `stopped_ns` nanoseconds; 0 means that the VM was not stopped.
    pub(super) fn note_pause(&mut self, stopped_ns: u64) {
        if stopped_ns > 0 {
            self.stats.pauses += 1;
            self.stats.pause_max_ms = self.stats.pause_max_ms.max(stopped_ns.div_ceil(1_000_000));
        }
    }
}

/// Returns the parts of a VM's views that have private copies.
fn written(vm: &VmState) -> Vec<Part> {
    let Some(map) = &vm.pagemap else {
        return Vec::new();
    };
    let mut parts = Vec::new();
    for view in &vm.back.views {
        let Ok(regions) = map.scan(view.hva, view.hva.add_pages(view.pages), Filter::COPIES) else {
            return Vec::new();
        };
        parts.extend(regions.iter().map(|region| view.at(region)));
    }
    parts
}

/// Finds the runs of `part` (at most [`READ_PAGES`] pages) that equal the image, and adds them to
/// `runs`.
fn equal_runs(vm: &VmState, image: &Image, part: Part, runs: &mut Vec<FoldRun>) {
    let length = usize::try_from(part.pages * PAGE_SIZE).unwrap_or(0);
    let (mut ours, mut theirs) = (vec![0; length], vec![0; length]);
    // The read fails if the VM is ending or the memory was discarded meanwhile.
    let is_read = memory::read(vm.guest.pid(), part.hva, &mut ours).is_ok_and(|n| n == length);
    if !is_read || image.read(part.file_page, &mut theirs).is_none() {
        return;
    }
    let pages = ours.chunks(PAGE_BYTES).zip(theirs.chunks(PAGE_BYTES));
    for (step, _) in (0..).zip(pages).filter(|(_, (a, b))| a == b) {
        let (hva, page) = (part.hva.add_pages(step), part.file_page + step);
        // The page was folded onto the page store after the pass had begun.
        let at = vm.table.index_at(hva);
        if !at.is_some_and(|at| vm.table.is_in_view(at)) {
            continue;
        }
        let hva = hva.0;
        let last = runs.last_mut().filter(|run| {
            let pages = u64::from(run.pages);
            run.hva + pages * PAGE_SIZE == hva
                && run.store_page + pages == page
                && run.pages < MAX_RUN_PAGES
        });
        match last {
            Some(run) => run.pages += 1,
            None => runs.push(FoldRun {
                hva,
                pages: 1,
                store: image.number,
                store_page: page,
            }),
        }
    }
}

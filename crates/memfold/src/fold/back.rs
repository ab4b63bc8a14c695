//! Folding back: VMs that run from a snapshot map its image privately; pages that they have written, and that hold again what the
//! image holds, are given back to it.
//!
//! A pass compares from outside, so that a page that differs costs the guest nothing; the library compares again, with the page
//! frozen, and drops the private copy. The mapping stays as it is.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use memfold_sys::memory;
use memfold_sys::pagemap::{Filter, category};
use memfold_units::{Hva, PAGE_BYTES, PAGE_SIZE};
use memfold_wire::library::{
    FoldRun, Freeze, MAX_RUN_PAGES, MAX_RUNS, MAX_STOP_US, Order, Outcome, Reply,
};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::process::Pid;
use tracing::debug;

use super::engine::{Engine, VmState};
use super::table::Index;
use super::{GuestError, VmId};
use crate::store::mapped::FileMapping;

/// Pages compared in one step, each of which may be a run of its own: some milliseconds.
const STEP_PAGES: u64 = MAX_RUNS as u64;

/// Pages read at once.
const READ_PAGES: u64 = 64;

/// A pass that finds less than one page in so many to give back makes the time until the next one longer.
const WORTH: u64 = 50;

/// Longest time between two passes, in the shortest.
const LONGEST: u32 = 16;

/// `TMPFS_MAGIC` of `linux/magic.h`, also of memfds.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Pages of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    hva: Hva,
    pages: u64,
    file_page: u64,
}

/// The image that a VM runs from.
#[derive(Debug)]
struct Image {
    /// As `/proc/PID/maps` names it.
    identity: (u32, u32, u64),
    file: File,
    /// Number that fold orders name it by.
    number: u32,
    pages: u64,
    /// Whether the kernel can protect private views of it against writes: it lies in memory, not in a file system.
    protectable: bool,
}

/// Where a VM's pass stands.
#[derive(Debug)]
pub(super) struct BackPass {
    image: Option<Image>,
    views: Vec<Part>,
    /// Whether no other VM runs from the image, which lies in a file system: what it holds in memory for this VM, it holds for
    /// one VM alone, and the host can drop it.
    alone: bool,
    due: Instant,
    shortest: Duration,
    interval: Duration,
    rest: Vec<Part>,
    looked: u64,
    found: u64,
}

impl BackPass {
    /// The first pass comes due `interval` after `now`.
    pub fn new(now: Instant, interval: Duration) -> Self {
        Self {
            image: None,
            views: Vec::new(),
            alone: false,
            due: now + interval,
            shortest: interval,
            interval,
            rest: Vec::new(),
            looked: 0,
            found: 0,
        }
    }

    fn end(&mut self, now: Instant) {
        self.rest.clear();
        self.interval = if self.found * WORTH >= self.looked.max(1) {
            self.shortest
        } else {
            (self.interval * 2).min(self.shortest * LONGEST)
        };
        self.due = now + self.interval;
        (self.looked, self.found) = (0, 0);
    }
}

impl VmState {
    /// When the next step of a pass is due; never for a VM that runs from no snapshot.
    pub(super) fn back_due(&self, pause_interval: Duration) -> Option<Instant> {
        let image = self.back.image.as_ref()?;
        if image.protectable && self.live {
            return Some(self.back.due);
        }
        let pause = self.last_pause + pause_interval;
        self.guest.can_stop().then(|| self.back.due.max(pause))
    }

    /// Whether page `at`, where a file is mapped, may be frozen by write protection, as of this batch.
    pub(super) fn may_refold_live(&self, at: Index) -> bool {
        let protectable = || self.back.image.as_ref().is_some_and(|i| i.protectable);
        self.live && (!self.table.is_in_view(at) || protectable())
    }
}

/// Takes in which mappings of files other than the page store a VM has. Those in its RAM are views of one image: memfold folds no
/// RAM that QEMU itself has made of a file.
pub(super) fn note_views(vm: &mut VmState, mappings: &[FileMapping]) {
    let in_ram: Vec<(Index, &FileMapping)> = mappings
        .iter()
        .filter_map(|mapping| Some((vm.table.index_at(mapping.hva)?, mapping)))
        .collect();
    let file = in_ram.first().map(|(_, first)| first.file);
    if vm.back.image.as_ref().map(|image| image.identity) != file {
        let opened = in_ram
            .first()
            .map(|(_, first)| Image::open(vm.guest.pid(), first));
        vm.back.image = match opened.transpose() {
            Ok(image) => image,
            Err(error) => {
                debug!(vm = vm.stats.name, %error, "the image that it runs from can't be read");
                None
            }
        };
    }
    let of_image = in_ram.iter().filter(|(_, m)| Some(m.file) == file);
    vm.back.views = of_image
        .map(|(_, mapping)| Part {
            hva: mapping.hva,
            pages: mapping.pages,
            file_page: mapping.file_page,
        })
        .collect();
    let pages = vm.table.pages();
    let ranges = in_ram.iter().map(|&(first, mapping)| {
        let length = u32::try_from(mapping.pages).unwrap_or(u32::MAX);
        first..first.saturating_add(length).min(pages)
    });
    vm.table.set_views(ranges);
}

impl Image {
    fn open(pid: Pid, view: &FileMapping) -> std::io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let file = view.open(pid)?;
        let facts = file.metadata()?;
        #[allow(clippy::cast_possible_truncation)]
        // Should two numbers meet, the library refuses the second file.
        let inode = facts.ino() as u32;
        Ok(Self {
            identity: view.file,
            number: inode ^ rustix::fs::minor(facts.dev()).rotate_right(12),
            pages: facts.len() / PAGE_SIZE,
            protectable: rustix::fs::fstatfs(&file)?.f_type == TMPFS_MAGIC,
            file,
        })
    }

    /// Reads pages that are in memory. `None`: some are not, and reading them from a disk would cost more than they give.
    fn read(&self, page: u64, buffer: &mut [u8]) -> Option<()> {
        let offset = page * PAGE_SIZE;
        let parts = &mut [IoSliceMut::new(buffer)];
        match rustix::io::preadv2(&self.file, parts, offset, ReadWriteFlags::NOWAIT) {
            Ok(n) => (n == buffer.len()).then_some(()),
            // Memory files know no such reading, and need none.
            Err(Errno::OPNOTSUPP) => self.file.read_exact_at(buffer, offset).ok(),
            Err(_) => None,
        }
    }
}

/// Pages in views that may be folded although the guest has not written them: those that it has touched, if the image is in memory
/// for it alone. A bit a page.
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
    /// Finds out whether VM `id` is the only one that runs from its image.
    pub(super) fn note_company(&mut self, id: VmId) {
        let image = |vm: &VmState| vm.back.image.as_ref().map(|i| (i.identity, i.protectable));
        let Some(mine) = self.vms.get(&id).and_then(image) else {
            return;
        };
        let users = self.vms.values().filter(|vm| image(vm) == Some(mine));
        let alone = users.count() == 1 && !mine.1;
        if let Some(vm) = self.vms.get_mut(&id) {
            vm.back.alone = alone;
        }
    }

    /// Does the next step of a pass. Returns whether one was due.
    pub(super) fn fold_back_due(&mut self, now: Instant) -> bool {
        let interval = self.settings.pause_interval;
        let due = |vm: &VmState| {
            vm.stats.problem.is_none() && vm.back_due(interval).is_some_and(|due| due <= now)
        };
        let Some(id) = self.vms.iter().find(|(_, vm)| due(vm)).map(|(&id, _)| id) else {
            return false;
        };
        if let Err(error) = self.fold_back(id, now) {
            self.lost(id, &error);
        }
        true
    }

    fn fold_back(&mut self, id: VmId, now: Instant) -> Result<(), GuestError> {
        let Some(vm) = self.vms.get_mut(&id) else {
            return Ok(());
        };
        let Some(image) = &vm.back.image else {
            return Ok(());
        };
        if vm.back.rest.is_empty() {
            vm.back.rest = written(vm);
            let order = Order::AddStore {
                store: image.number,
                max_pages: image.pages,
            };
            let known = vm.guest.order(&order, Some(image.file.as_fd()))?;
            if let Reply::Error { reason } = known {
                debug!(vm = vm.stats.name, reason, "nothing is folded back");
                vm.back.rest.clear();
            }
        }
        let mut runs = Vec::new();
        let mut looked = 0;
        while looked + READ_PAGES <= STEP_PAGES {
            let Some(part) = vm.back.rest.pop() else {
                break;
            };
            let first = Part {
                pages: part.pages.min(READ_PAGES),
                ..part
            };
            vm.back.rest.extend(part.after(first.pages));
            looked += first.pages;
            equal_runs(vm.guest.pid(), image, first, &mut runs);
        }
        vm.back.looked += looked;
        vm.live = vm.guest.refold_live();
        let freeze = if vm.live && image.protectable {
            Some(Freeze::WriteProtect)
        } else {
            let limit = self.settings.pause_length.as_micros();
            vm.guest.can_stop().then(|| Freeze::Stopped {
                limit_us: u32::try_from(limit).unwrap_or(MAX_STOP_US).min(MAX_STOP_US),
            })
        };
        if let Some(freeze) = freeze.filter(|_| !runs.is_empty()) {
            if let Freeze::Stopped { .. } = freeze {
                vm.last_pause = now;
            }
            let order = Order::Fold { freeze, runs };
            let reply = vm.guest.order(&order, None)?;
            self.library_cpu_ns += vm.book_back(&order, &reply);
        }
        let Some(vm) = self.vms.get_mut(&id) else {
            return Ok(());
        };
        if vm.back.rest.is_empty() {
            vm.back.end(Instant::now());
        }
        Ok(())
    }
}

impl Part {
    /// What is left behind the first `pages` pages, if anything is.
    fn after(self, pages: u64) -> Option<Self> {
        (pages < self.pages).then(|| Self {
            hva: self.hva.add_pages(pages),
            pages: self.pages - pages,
            file_page: self.file_page + pages,
        })
    }
}

impl VmState {
    /// Counts what an order has given back; runs that it had no time for are tried again. Returns what it cost the library.
    fn book_back(&mut self, order: &Order, reply: &Reply) -> u64 {
        let (Order::Fold { runs, .. }, Reply::Outcomes { outcomes, .. }) = (order, reply) else {
            // Refused as a whole: the pass ends.
            self.back.rest.clear();
            return 0;
        };
        // Not one was begun: the VM does not run.
        if outcomes.iter().all(|outcome| *outcome == Outcome::Late) {
            self.back.rest.clear();
            return 0;
        }
        for (run, outcome) in runs.iter().zip(outcomes) {
            let done = u64::from(outcome.pages_done(run.pages));
            self.back.found += done;
            self.stats.folded_back_pages += done;
            if *outcome == Outcome::Late {
                self.back.rest.push(Part {
                    hva: Hva(run.hva),
                    pages: run.pages.into(),
                    file_page: run.store_page,
                });
            }
        }
        let Reply::Outcomes {
            cpu_ns, stopped_ns, ..
        } = reply
        else {
            return 0;
        };
        self.note_pause(*stopped_ns);
        *cpu_ns
    }

    /// Counts a pause of so many nanoseconds, if it was one.
    pub(super) fn note_pause(&mut self, stopped_ns: u64) {
        if stopped_ns > 0 {
            self.stats.pauses += 1;
            self.stats.pause_max_ms = self.stats.pause_max_ms.max(stopped_ns.div_ceil(1_000_000));
        }
    }
}

/// Private copies in the views of a VM's image.
fn written(vm: &VmState) -> Vec<Part> {
    let filter = Filter {
        all_of: category::PRESENT,
        none_of: category::FILE | category::ZERO,
        ..Filter::default()
    };
    let Some(map) = &vm.pagemap else {
        return Vec::new();
    };
    let mut parts = Vec::new();
    for view in &vm.back.views {
        let Ok(regions) = map.scan(view.hva, view.hva.add_pages(view.pages), filter) else {
            return Vec::new();
        };
        parts.extend(regions.iter().map(|region| Part {
            hva: region.start,
            pages: region.pages(),
            file_page: view.file_page + region.start.pages_since(view.hva),
        }));
    }
    parts
}

/// Finds the runs of `part`, at most [`READ_PAGES`] long, that hold what the image holds.
fn equal_runs(pid: Pid, image: &Image, part: Part, runs: &mut Vec<FoldRun>) {
    let length = usize::try_from(part.pages * PAGE_SIZE).unwrap_or(0);
    let (mut ours, mut theirs) = (vec![0; length], vec![0; length]);
    // A VM that ends, or memory that is given back meanwhile.
    if !memory::read(pid, part.hva, &mut ours).is_ok_and(|n| n == length) {
        return;
    }
    if image.read(part.file_page, &mut theirs).is_none() {
        return;
    }
    let pages = ours.chunks(PAGE_BYTES).zip(theirs.chunks(PAGE_BYTES));
    for (step, _) in (0..).zip(pages).filter(|(_, (a, b))| a == b) {
        let (hva, page) = (part.hva.add_pages(step).0, part.file_page + step);
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

//! Handles the messages of memfold's agents in guests: records in the fold engine's tables in which
//! page of guest RAM each page of a file is cached. All messages are untrusted. Messages about
//! pages outside RAM or about unknown files are counted and ignored, and the size of the VM's RAM
//! limits every table.

use std::time::{Duration, Instant};

use memfold_units::Pfn;
use memfold_wire::agent::{FileFacts, FileNumber, FileRange, FromAgent, HintRun};
use tracing::debug;

use super::budget::TokenBucket;
use super::content::Member;
use super::domain::Domain;
use super::guest::VmId;
use super::hint_stack::Hint;
use super::state::{Engine, FileState, VmState, with_domain};
use super::vm_table::PIECE;

/// Number of files that every VM may introduce. The VM may introduce one more for each page of RAM.
const MIN_FILES: usize = 1 << 16;

/// Number of bytes of paths that a VM's agent may send for each file that it may introduce.
const PATH_BYTES: usize = 256;

/// Maximum number of pages in one hint, so that a hint of one VM does not fill many batches.
const HINT_PAGES: u32 = 2048;

/// Number of pages per second that a VM's agent may report on average (256 MiB/s of page cache).
/// Hints beyond this limit are dropped.
const PAGES_PER_SECOND: f64 = 65_536.0;

/// Creates the limit for an agent's reports: two inventories of all RAM at once, and then
/// [`PAGES_PER_SECOND`].
pub(super) fn allowance(ram_pages: u32, now: Instant) -> TokenBucket {
    TokenBucket::new(
        PAGES_PER_SECOND,
        f64::from(ram_pages) * 2.0 + PAGES_PER_SECOND,
        now,
    )
}

impl Engine {
    pub(super) fn agent_session(&mut self, id: VmId) {
        let Some(vm) = self.vms.get_mut(&id) else {
            return;
        };
        vm.stats.agent_ready = false;
        vm.table.forget_cached();
        vm.stack.clear();
        vm.wait_for_pause.clear();
        vm.files.clear();
        vm.skips.clear();
        vm.path_bytes = 0;
        if let Some(domain) = self.domains.get_mut(&vm.domain) {
            domain.contents.leave_all(id);
        }
    }

    pub(super) fn agent(&mut self, id: VmId, message: FromAgent) {
        let Some((vm, domain)) = with_domain(&mut self.vms, &mut self.domains, id) else {
            return;
        };
        match message {
            FromAgent::Files(files) => {
                for file in files {
                    introduce_file(id, vm, domain, &file);
                }
            }
            FromAgent::Hints(runs) => {
                let now = Instant::now();
                for run in runs {
                    take_hint(vm, run, now);
                }
                vm.active = true;
            }
            FromAgent::Gone(runs) => {
                for run in runs {
                    if !allow(vm, run.pages) {
                        break;
                    }
                    for pfn in run.pfn..run.pfn.saturating_add(u64::from(run.pages)) {
                        let Some(at) = vm.table.index_of(Pfn(pfn)) else {
                            break;
                        };
                        vm.table.uncache(at);
                    }
                }
                vm.active = true;
            }
            FromAgent::Dirty(ranges) => set_dirty(vm, &ranges, true),
            FromAgent::Clean(ranges) => set_dirty(vm, &ranges, false),
            FromAgent::InventoryBegin => vm.table.inventory_begin(),
            FromAgent::InventoryEnd { files, pages } => {
                vm.table.inventory_end();
                vm.stats.agent_ready = true;
                debug!(
                    vm = vm.stats.name,
                    files, pages, "inventory of the guest's page cache complete"
                );
            }
            FromAgent::Counters(counters) => {
                vm.stats.events_lost = counters.events_lost;
                vm.stats.agent_cpu_us = counters.cpu_us;
                vm.stats.agent_rss_bytes = counters.rss_bytes;
            }
            // The connection to the agent handles sessions, commands and trims, and the daemon the
            // guest's memory figures.
            FromAgent::Hello { .. }
            | FromAgent::Output { .. }
            | FromAgent::Exited { .. }
            | FromAgent::InputRoom { .. }
            | FromAgent::Memory(_)
            | FromAgent::Trimmed(_) => {}
        }
    }
}

fn introduce_file(id: VmId, vm: &mut VmState, domain: &mut Domain, file: &FileFacts) {
    let member = Member {
        vm: id,
        file: file.file,
    };
    let most = MIN_FILES + vm.table.pages() as usize;
    let known = vm.files.contains_key(&file.file);
    if !known && (vm.files.len() >= most || vm.path_bytes + file.path.len() > most * PATH_BYTES) {
        return;
    }
    // A path that is sent again counts again, so the limit stops a guest that renames files without
    // end, but not a guest that has many files.
    vm.path_bytes += file.path.len();
    if file.path.is_empty() {
        // The path may come later; until then the tables keep the file's pages.
        domain.contents.leave(member);
        vm.files.entry(file.file).or_default();
        return;
    }
    let before = domain.contents.of(member);
    let candidates = domain.contents.join(member, &file.path, file.size_bytes);
    if domain.contents.of(member) != before {
        vm.files.insert(file.file, FileState::default());
        vm.skips.remove(&file.file);
        // These pages were reported before the file had a path.
        vm.offer_file(file.file, Instant::now());
    }
    let Some(content) = domain.contents.of(member) else {
        return;
    };
    let due = Instant::now() + Duration::from_secs(2);
    for other in candidates {
        domain.candidates.add(content, other, due);
    }
}

fn take_hint(vm: &mut VmState, run: HintRun, now: Instant) {
    vm.stats.hint_runs += 1;
    vm.stats.hint_pages += u64::from(run.pages);
    if !allow(vm, run.pages) {
        return;
    }
    let known = vm.files.contains_key(&run.file);
    let Some(page) = first_page(run.page, run.pages).filter(|_| known) else {
        vm.stats.bogus_pages += u64::from(run.pages);
        return;
    };
    let mut taken = 0;
    for step in 0..run.pages {
        let pfn = run.pfn.checked_add(u64::from(step));
        let Some(at) = pfn.and_then(|pfn| vm.table.index_of(Pfn(pfn))) else {
            vm.stats.bogus_pages += u64::from(run.pages - step);
            break;
        };
        if !vm.table.cache(at, run.file, page + step) {
            vm.stats.over_limit_pages += u64::from(run.pages - step);
            break;
        }
        taken += 1;
    }
    offer(vm, run.file, page, taken, now);
}

/// Puts file pages on the stack, in hints of at most [`HINT_PAGES`] pages.
fn offer(vm: &mut VmState, file: FileNumber, page: u32, pages: u32, at: Instant) {
    let mut done = 0;
    while done < pages {
        let length = (pages - done).min(HINT_PAGES);
        vm.stack.push(Hint::new(file, page + done, length, at));
        done += length;
    }
}

/// Returns whether the VM's agent may report `pages` more pages now.
fn allow(vm: &mut VmState, pages: u32) -> bool {
    let now = Instant::now();
    if vm.allowance.wait(now).is_some() {
        vm.stats.over_limit_pages += u64::from(pages);
        return false;
    }
    vm.allowance.spend(f64::from(pages), now);
    true
}

/// Converts the first page of a file range to 32 bits; `None` for files larger than 16 TiB.
fn first_page(page: u64, pages: u32) -> Option<u32> {
    let first = u32::try_from(page).ok()?;
    first.checked_add(pages).map(|_| first)
}

/// Records that the guest has written to file ranges, or has written them back to disk. The cached
/// pages of the latter are put on the stack again.
fn set_dirty(vm: &mut VmState, ranges: &[FileRange], dirty: bool) {
    let now = Instant::now();
    for &FileRange { file, page, pages } in ranges {
        if !allow(vm, pages) {
            break;
        }
        let Some(page) = first_page(page, pages) else {
            continue;
        };
        let end = page + pages;
        vm.table.set_dirty(file, page..end, dirty);
        for piece in vm.table.pieces_in(file, page..end) {
            let first = page.max(piece * PIECE);
            let last = end.min((piece * PIECE).saturating_add(PIECE));
            if !dirty {
                offer(vm, file, first, last - first, now);
            }
        }
    }
}

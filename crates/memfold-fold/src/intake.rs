//! Handles the messages of memfold's agents in guests: records in the fold engine's tables in which
//! page of guest RAM each page of a file is cached. All messages are untrusted. Messages about
//! pages outside RAM or about unknown files are counted and ignored, and the size of the VM's RAM
//! limits every table.

use std::time::{Duration, Instant};

use memfold_units::Pfn;
use memfold_wire::agent::{FileFacts, FileNumber, FileRange, FromAgent, HintRun, max_files};
use tracing::debug;

use super::budget::TokenBucket;
use super::files::File;
use super::guest::VmId;
use super::hint_stack::Hint;
use super::member::Member;
use super::state::{Engine, VmState, cached_ranges, with_domain};
use super::vm_table::PIECE;

/// Number of bytes of paths that are kept of a VM's files for each file that its agent may
/// introduce.
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

/// Creates the limit of the work for files that get another path or size. One token stands for a
/// range of cached pages that is counted anew, or for a hint that is offered again. The burst is
/// short, because a file that has to wait is not lost.
pub(super) fn move_allowance(now: Instant) -> TokenBucket {
    TokenBucket::new(PAGES_PER_SECOND, PAGES_PER_SECOND, now)
}

impl Engine {
    pub(super) fn agent_session(&mut self, id: VmId) {
        let Some(vm) = self.vms.get_mut(&id) else {
            return;
        };
        vm.stats.agent_ready = false;
        if let Some(domain) = self.domains.get_mut(&vm.domain) {
            domain
                .contents
                .leave_all(id, &|m| vm.table.cached_ranges(m.file));
        }
        vm.table.forget_cached();
        vm.stack.clear();
        vm.wait_for_pause.clear();
        vm.skips.clear();
        vm.path_bytes = 0;
        vm.late_files.clear();
        self.note_changes(id);
    }

    pub(super) fn agent(&mut self, id: VmId, message: FromAgent) {
        self.introduce_late_files(id);
        if let FromAgent::Files(files) = &message {
            for file in files {
                self.introduce_file(id, file);
                // One file's changes are settled before the next file, so that the list of changes
                // stays short.
                self.note_changes(id);
            }
        }
        let Some((vm, domain)) = with_domain(&mut self.vms, &mut self.domains, id) else {
            return;
        };
        let dropped = vm.stack.dropped();
        match message {
            FromAgent::Hints(runs) => {
                let now = Instant::now();
                for run in runs {
                    let member = Member {
                        vm: id,
                        file: run.file,
                    };
                    let is_known = domain.contents.is_known(member);
                    take_hint(vm, run, is_known, now);
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
            FromAgent::Files(_)
            | FromAgent::Hello { .. }
            | FromAgent::Output { .. }
            | FromAgent::Exited { .. }
            | FromAgent::InputRoom { .. }
            | FromAgent::Memory(_)
            | FromAgent::Trimmed(_)
            | FromAgent::Allowed { .. }
            | FromAgent::NotAllowed { .. } => {}
        }
        // A sweep finds the pages of dropped hints.
        self.sweep_wanted |= vm.stack.dropped() > dropped;
        self.note_changes(id);
    }

    /// Introduces the files that had to wait ([`VmState::late_files`]), as far as the VM's limit
    /// allows.
    pub(super) fn introduce_late_files(&mut self, id: VmId) {
        let now = Instant::now();
        while let Some(vm) = self.vms.get_mut(&id) {
            if vm.late_files.is_empty() || vm.moves.wait(now).is_some() {
                return;
            }
            let Some((_, file)) = vm.late_files.pop_first() else {
                return;
            };
            vm.path_bytes -= file.path.len();
            self.introduce_file(id, &file);
            self.note_changes(id);
        }
    }

    /// Records that a VM has this file, and returns whether the file may join its content now.
    /// Otherwise, the file is ignored because it is beyond the VM's limits, or has to wait.
    fn admit_file(&mut self, member: Member, file: &FileFacts) -> bool {
        let Some((vm, domain)) = with_domain(&mut self.vms, &mut self.domains, member.vm) else {
            return false;
        };
        let contents = &mut domain.contents;
        let most = max_files(vm.table.pages()) as usize;
        let known = contents.is_known(member);
        if !known && contents.count_files(member.vm) >= most {
            return false;
        }
        if let Some(late) = vm.late_files.remove(&file.file) {
            vm.path_bytes -= late.path.len();
        }
        let counted = contents.counted_by(member, &file.path, file.size_bytes);
        let now = Instant::now();
        let waits = counted.iter().any(Option::is_some) && vm.moves.wait(now).is_some();
        // The path of a known file replaces the earlier one, so a file that grows, and is sent
        // again each time, does not use up the limit. Of a file that waits, both paths are kept.
        let before = contents.path(member).filter(|_| !waits);
        let before = before.map_or(0, <[u8]>::len);
        let path_bytes = vm.path_bytes.saturating_sub(before) + file.path.len();
        if path_bytes > most * PATH_BYTES {
            return false;
        }
        vm.path_bytes = path_bytes;
        // The tables already keep the pages of a file that waits.
        contents.update_file(member, |_| {});
        if waits {
            vm.late_files.insert(file.file, file.clone());
            return false;
        }
        let of_content = contents.of(member).and_then(|id| contents.get(id));
        let members = of_content.map_or(0, |content| content.members.len());
        let pieces = counted[0].map_or(0, |own| vm.table.pieces(own.file).len());
        let ranges = |member: Member| cached_ranges(&self.vms, member).len();
        let ranges: usize = counted.into_iter().flatten().map(ranges).sum();
        // A content is searched for the member that leaves it.
        let cost = ranges + pieces + members / 256;
        if let Some(vm) = self.vms.get_mut(&member.vm) {
            vm.moves.spend(cost as f64, now);
        }
        true
    }

    fn introduce_file(&mut self, id: VmId, file: &FileFacts) {
        let member = Member {
            vm: id,
            file: file.file,
        };
        if !self.admit_file(member, file) {
            return;
        }
        let Some(vm) = self.vms.get(&id) else {
            return;
        };
        let Some(domain) = self.domains.get_mut(&vm.domain) else {
            return;
        };
        let cached = |m| cached_ranges(&self.vms, m);
        if file.path.is_empty() {
            // The path may come later; until then the tables keep the file's pages.
            return domain.contents.leave(member, &cached);
        }
        let before = domain.contents.of(member);
        let candidates = domain
            .contents
            .join(member, &file.path, file.size_bytes, &cached);
        let content = domain.contents.of(member);
        let due = Instant::now() + Duration::from_secs(2);
        let has_pairs = !candidates.is_empty();
        for other in candidates {
            if let Some(content) = content {
                domain.candidates.add(content, other, due);
            }
        }
        if let Some(vm) = self.vms.get_mut(&id).filter(|_| content != before) {
            let new = |file: &mut File| {
                *file = File {
                    content,
                    ..File::default()
                }
            };
            domain.contents.update_file(member, new);
            vm.skips.remove(&file.file);
            // These pages were reported before the file had a path.
            vm.offer_file(file.file, Instant::now());
        }
        if has_pairs {
            let domain = self.vms[&id].domain.clone();
            self.note_pairs(&domain);
        }
    }
}

fn take_hint(vm: &mut VmState, run: HintRun, is_known: bool, now: Instant) {
    vm.stats.hint_runs += 1;
    vm.stats.hint_pages += u64::from(run.pages);
    if !allow(vm, run.pages) {
        return;
    }
    let Some(page) = first_page(run.page, run.pages).filter(|_| is_known) else {
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

#[cfg(test)]
mod tests {
    use memfold_wire::agent::MIN_FILES;

    use super::*;
    use crate::random_changes::{PAGES, add};
    use crate::settings::EngineSettings;

    const LIMIT: usize = (MIN_FILES + PAGES) as usize * PATH_BYTES;

    fn facts(file: FileNumber, path: Vec<u8>, size_bytes: u64) -> FromAgent {
        FromAgent::Files(vec![FileFacts {
            file,
            path,
            size_bytes,
        }])
    }

    /// Returns a path of 4,096 bytes, a different one for each number.
    fn long_path(number: u32) -> Vec<u8> {
        format!("/{number:04095}").into()
    }

    fn knows(engine: &Engine, file: FileNumber) -> bool {
        contents(engine).is_known(Member { vm: 1, file })
    }

    #[test]
    fn the_limit_of_path_bytes_holds_for_files_that_get_longer_paths_later() {
        let mut engine = Engine::new(EngineSettings::default());
        add(&mut engine, 1);
        for file in 0..5000 {
            engine.agent(1, facts(file, format!("/{file}").into(), 1));
        }
        for file in 0..5000 {
            engine.agent(1, facts(file, long_path(file), 1));
        }
        let contents = contents(&engine);
        let paths = (0..5000).filter_map(|file| contents.path(Member { vm: 1, file }));
        let bytes: usize = paths.map(<[u8]>::len).sum();
        assert!((LIMIT - 4096..=LIMIT).contains(&bytes), "{bytes}");
        assert_eq!(engine.vms[&1].path_bytes, bytes);
    }

    #[test]
    fn a_file_that_grows_again_and_again_does_not_use_up_the_limit_of_path_bytes() {
        let mut engine = Engine::new(EngineSettings::default());
        add(&mut engine, 1);
        for size in 0..6000 {
            engine.agent(1, facts(1, long_path(1), size));
        }
        engine.agent(1, facts(2, long_path(2), 1));
        assert!(knows(&engine, 2));
        engine.agent(1, facts(2, Vec::new(), 0));
        assert_eq!(engine.vms[&1].path_bytes, 4096);
    }

    /// Returns hints that pages of file 1 at every second page fill all of a VM's RAM.
    fn scattered() -> FromAgent {
        let run = |pfn: u32| HintRun {
            file: 1,
            page: u64::from(pfn) * 2,
            pfn: pfn.into(),
            pages: 1,
        };
        FromAgent::Hints((0..PAGES).map(run).collect())
    }

    fn contents(engine: &Engine) -> &crate::content::Contents {
        &engine.domains[&engine.vms[&1].domain].contents
    }

    #[test]
    fn a_file_that_is_renamed_too_often_gets_its_last_path_later() {
        const FILE: Member = Member { vm: 1, file: 1 };
        let mut engine = Engine::new(EngineSettings::default());
        add(&mut engine, 1);
        engine.agent(1, facts(1, b"/a".into(), 1));
        engine.agent(1, scattered());
        // A rename costs 600 ranges and 19 pieces, so this is enough for two of them.
        engine.vms.get_mut(&1).unwrap().moves = TokenBucket::new(1.0, 1000.0, Instant::now());
        let paths = (0..4095).map(|n| [b"/b", b"/a"][n % 2].to_vec());
        let files = paths.chain([b"/last".to_vec()]).map(|path| FileFacts {
            file: 1,
            path,
            size_bytes: 1,
        });
        engine.agent(1, FromAgent::Files(files.collect()));
        // Each rename begins a new content.
        assert_eq!(contents(&engine).of(FILE), Some(2));
        assert_eq!(engine.vms[&1].late_files.len(), 1);
        assert_ne!(contents(&engine).path(FILE), Some(&b"/last"[..]));
        engine.vms.get_mut(&1).unwrap().moves = move_allowance(Instant::now());
        engine.agent(1, FromAgent::Hints(Vec::new()));
        assert_eq!(contents(&engine).path(FILE), Some(&b"/last"[..]));
        assert_eq!(engine.vms[&1].path_bytes, b"/last".len());
        assert!(engine.vms[&1].late_files.is_empty());
    }

    #[test]
    fn hints_of_a_file_that_has_to_wait_are_kept_and_the_file_joins_at_the_next_sync() {
        let (one, two) = (Member { vm: 1, file: 1 }, Member { vm: 2, file: 7 });
        let mut engine = Engine::new(EngineSettings::default());
        add(&mut engine, 1);
        add(&mut engine, 2);
        engine.agent(1, facts(1, b"/a".into(), 1));
        engine.agent(1, scattered());
        let now = Instant::now();
        engine.vms.get_mut(&2).unwrap().moves.spend(1e9, now);
        engine.agent(2, facts(7, b"/a".into(), 1));
        let run = HintRun {
            file: 7,
            page: 0,
            pfn: 0,
            pages: 1,
        };
        engine.agent(2, FromAgent::Hints(vec![run]));
        assert_eq!(contents(&engine).of(two), None);
        assert_eq!(engine.vms[&2].stats.bogus_pages, 0);
        engine.vms.get_mut(&2).unwrap().moves = move_allowance(now);
        for _ in 0..2 {
            assert!(engine.sync_due(now + Duration::from_secs(10)));
        }
        assert_eq!(contents(&engine).of(two), contents(&engine).of(one));
        assert_eq!(engine.vms[&2].table.count_matched().0, 1);
    }
}

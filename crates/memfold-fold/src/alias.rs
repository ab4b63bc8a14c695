//! Finds files of different VMs that have the same content under different paths. Files with the
//! same name and size are candidates; some of their cached pages are compared.

use std::time::Instant;

use memfold_units::PAGE_BYTES;
use memfold_wire::agent::FileNumber;
use tracing::debug;

use super::content::Content;
use super::domain::Domain;
use super::member::{ContentId, Member};
use super::state::{Engine, VmState, cached_ranges, usable};
use super::vm_map::VmMap;
use super::vm_table::PIECE;

impl Engine {
    /// Compares some cached pages of the pair of contents (files) that is due next. Returns whether
    /// a pair was due.
    pub(super) fn sample_due(&mut self, now: Instant) -> bool {
        let Some(name) = self.schedule.pairs.due(now).next().cloned() else {
            return false;
        };
        self.compare_pair(&name, now);
        self.note_pairs(&name);
        true
    }

    fn compare_pair(&mut self, name: &str, now: Instant) {
        let Some(domain) = self.domains.get_mut(name) else {
            return;
        };
        let Some(candidate) = domain.candidates.take(now) else {
            return;
        };
        match sample(&self.vms, domain, candidate.content, candidate.other) {
            Some(true) => {
                debug!(
                    domain = name,
                    "samples of cached pages show that files with two different paths have the same content"
                );
                let content = domain.contents.get(candidate.content);
                let members = content.map(|c| c.members.clone()).unwrap_or_default();
                let cached = |m| cached_ranges(&self.vms, m);
                domain
                    .contents
                    .alias(candidate.other, candidate.content, &cached);
                for member in members {
                    domain
                        .contents
                        .update_file(member, |file| file.alias = true);
                    if let Some(vm) = self.vms.get_mut(&member.vm) {
                        vm.offer_file(member.file, now);
                    }
                }
            }
            Some(false) => self.stats.case_different_path_different_content += 1,
            None => domain.candidates.put_back(candidate, now),
        }
    }
}

/// Maximum number of files of each of two contents whose cached pages are compared, so that at most
/// 256 pairs of files are looked at. A content can have more than a million files of one guest.
const MAX_FILES: usize = 16;

/// Maximum number of pieces that are searched for a page that both of two contents have in caches.
/// A guest can have many pieces without a page that may be compared.
const MAX_PIECES: usize = 1024;

/// Returns whether up to four pages that VMs cache of both contents are equal; `None` if no page
/// that VMs cache of both was found among [`MAX_FILES`] files of each and in [`MAX_PIECES`] pieces.
fn sample(vms: &VmMap<VmState>, domain: &Domain, one: ContentId, other: ContentId) -> Option<bool> {
    let (one, other) = (domain.contents.get(one)?, domain.contents.get(other)?);
    let cached = |content: &Content| -> Option<Vec<CachedFile<'_>>> {
        let members = content.members.iter().take(MAX_FILES);
        members.map(|&member| CachedFile::of(vms, member)).collect()
    };
    let (files, others) = (cached(one)?, cached(other)?);
    let pairs = files
        .iter()
        .flat_map(|a| others.iter().map(move |b| (a, b)));
    let pieces = pairs.flat_map(|(a, b)| {
        let common = |piece: &&u32| b.pieces.binary_search(piece).is_ok();
        a.pieces.iter().filter(common).map(move |&n| (a, b, n))
    });
    let mut compared = 0;
    for (a, b, piece) in pieces.take(MAX_PIECES) {
        for page in piece * PIECE..(piece + 1) * PIECE {
            let Some((left, right)) = a.read(page).zip(b.read(page)) else {
                continue;
            };
            if left != right {
                return Some(false);
            }
            compared += 1;
            if compared == 4 {
                return Some(true);
            }
        }
    }
    (compared > 0).then_some(true)
}

/// A file of a VM, and the pieces of which the VM caches pages, in ascending order.
struct CachedFile<'a> {
    vm: &'a VmState,
    file: FileNumber,
    pieces: Vec<u32>,
}

impl<'a> CachedFile<'a> {
    fn of(vms: &'a VmMap<VmState>, member: Member) -> Option<Self> {
        let (vm, file) = (vms.get(&member.vm)?, member.file);
        let pieces = vm.table.pieces(file);
        Some(Self { vm, file, pieces })
    }

    /// Reads a page of the file from the VM's memory; `None` if the VM does not cache the page, or
    /// the page may not be folded.
    fn read(&self, page: u32) -> Option<[u8; PAGE_BYTES]> {
        let hva = self.vm.table.hva(usable(self.vm, self.file, page)?)?;
        let mut bytes = [0; PAGE_BYTES];
        memfold_sys::memory::read(self.vm.guest.pid(), hva, &mut bytes).ok()?;
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use memfold_units::Hva;
    use memfold_vm::RamLayout;
    use memfold_wire::agent::{FileFacts, FromAgent, HintRun};
    use memfold_wire::library::Advice;

    use super::*;
    use crate::guest::VmId;
    use crate::random_changes::idle;
    use crate::settings::EngineSettings;

    const PAGES: u32 = 64;

    /// Adds a VM with `files` files of one path, of which it caches page 0 of file `cached`. The
    /// RAM of all VMs is the same memory of this process.
    fn add(engine: &mut Engine, id: VmId, path: &str, files: u32, cached: u32, ram: Hva) {
        let layout = RamLayout::one_block(ram, PAGES.into());
        let domain = Some(format!("alias-{}", std::process::id()));
        let (name, advice) = (format!("vm{id}"), [Advice::default()]);
        engine.add(id, name, domain, layout, &advice, idle(), None);
        let facts = |file| FileFacts {
            file,
            path: path.into(),
            size_bytes: 1 << 20,
        };
        engine.agent(id, FromAgent::Files((0..files).map(facts).collect()));
        let run = HintRun {
            file: cached,
            page: 0,
            pfn: 0,
            pages: 1,
        };
        engine.agent(id, FromAgent::Hints(vec![run]));
    }

    /// Returns the result of comparing a file of one VM with `files` files of another VM, which
    /// caches a page of file `cached`.
    fn compare(files: u32, cached: u32) -> Option<bool> {
        let buffer = vec![7_u8; (PAGES as usize + 1) * PAGE_BYTES];
        let begin = buffer.as_ptr().expose_provenance() as u64;
        let ram = Hva(begin.next_multiple_of(memfold_units::PAGE_SIZE));
        let mut engine = Engine::new(EngineSettings::default());
        add(&mut engine, 1, "/a/x", 1, 0, ram);
        add(&mut engine, 2, "/b/x", files, cached, ram);
        let domain = engine.domains.values().next().unwrap();
        let content = |vm, file| domain.contents.of(Member { vm, file }).unwrap();
        sample(&engine.vms, domain, content(1, 0), content(2, cached))
    }

    #[test]
    fn of_a_content_with_many_files_a_comparison_looks_only_at_the_first_sixteen() {
        let most = u32::try_from(MAX_FILES).unwrap();
        assert_eq!(compare(1, 0), Some(true));
        assert_eq!(compare(100, most - 1), Some(true));
        assert_eq!(
            compare(100, most),
            None,
            "the pair waits, and is dropped later"
        );
    }
}

//! Finds files of different VMs that have the same content under different paths. Files with the
//! same name and size are candidates; some of their cached pages are compared.

use std::time::Instant;

use memfold_units::PAGE_BYTES;
use tracing::debug;

use super::domain::Domain;
use super::member::ContentId;
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

/// Returns whether up to four pages that VMs cache of both contents are equal; `None` if VMs do not
/// cache the same page of both.
fn sample(vms: &VmMap<VmState>, domain: &Domain, one: ContentId, other: ContentId) -> Option<bool> {
    let (one, other) = (domain.contents.get(one)?, domain.contents.get(other)?);
    let mut compared = 0;
    let (mut left, mut right) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
    for a in &one.members {
        let vm_a = vms.get(&a.vm)?;
        for b in &other.members {
            let vm_b = vms.get(&b.vm)?;
            let pieces = vm_a.table.pieces(a.file);
            let of_b = vm_b.table.pieces(b.file);
            for &piece in pieces.iter().filter(|p| of_b.binary_search(p).is_ok()) {
                for page in piece * PIECE..(piece + 1) * PIECE {
                    let Some((at_a, at_b)) =
                        usable(vm_a, a.file, page).zip(usable(vm_b, b.file, page))
                    else {
                        continue;
                    };
                    let read = |vm: &VmState, at, buffer: &mut [u8]| {
                        vm.table.hva(at).is_some_and(|hva| {
                            memfold_sys::memory::read(vm.guest.pid(), hva, buffer).is_ok()
                        })
                    };
                    if !read(vm_a, at_a, &mut left) || !read(vm_b, at_b, &mut right) {
                        continue;
                    }
                    if left != right {
                        return Some(false);
                    }
                    compared += 1;
                    if compared == 4 {
                        return Some(true);
                    }
                }
            }
        }
    }
    (compared > 0).then_some(true)
}

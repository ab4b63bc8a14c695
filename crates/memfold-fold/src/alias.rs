//! Files of the same name and size under different paths: samples of their bytes decide whether they are one content.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use memfold_units::PAGE_BYTES;
use tracing::debug;

use super::VmId;
use super::content::ContentId;
use super::engine::{Domain, Engine, VmState};
use super::stack::Hint;
use super::table::PIECE;
use super::work::usable;

/// Most pairs that wait to be sampled in one domain.
const MAX_CANDIDATES: usize = 4096;

/// How often a pair is looked at before both have a page in memory that can be compared.
const MAX_TRIES: u8 = 5;

/// Two contents whose names and sizes are equal, to be sampled.
pub(super) struct Candidate {
    content: ContentId,
    other: ContentId,
    tries: u8,
}

/// Pairs by when they are due.
#[derive(Default)]
pub(super) struct Candidates {
    waiting: BTreeMap<(Instant, u64), Candidate>,
    next: u64,
}

impl Candidates {
    /// A new pair.
    pub fn add(&mut self, content: ContentId, other: ContentId, due: Instant) {
        let new = Candidate {
            content,
            other,
            tries: 0,
        };
        self.insert(new, due);
    }

    fn insert(&mut self, candidate: Candidate, due: Instant) {
        if self.waiting.len() < MAX_CANDIDATES {
            self.next += 1;
            self.waiting.insert((due, self.next), candidate);
        }
    }

    /// When the first is due.
    pub fn due(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(key, _)| key.0)
    }

    fn take(&mut self, now: Instant) -> Option<Candidate> {
        self.due().filter(|&due| due <= now)?;
        self.waiting.pop_first().map(|(_, candidate)| candidate)
    }

    /// Later again, unless it has been tried often.
    fn put_back(&mut self, mut candidate: Candidate, now: Instant) {
        if candidate.tries < MAX_TRIES {
            candidate.tries += 1;
            let due = now + Duration::from_secs(4 << candidate.tries);
            self.insert(candidate, due);
        }
    }
}

impl Engine {
    /// Compares samples of two files of the same name and size. Returns whether one was due.
    pub(super) fn sample_due(&mut self, now: Instant) -> bool {
        for (name, domain) in &mut self.domains {
            let Some(candidate) = domain.candidates.take(now) else {
                continue;
            };
            match sample(&self.vms, domain, candidate.content, candidate.other) {
                Some(true) => {
                    debug!(domain = name, "two paths hold the same file");
                    let members = domain
                        .contents
                        .get(candidate.content)
                        .map(|c| c.members.clone())
                        .unwrap_or_default();
                    domain.contents.alias(candidate.other, candidate.content);
                    for member in members {
                        let Some(vm) = self.vms.get_mut(&member.vm) else {
                            continue;
                        };
                        if let Some(file) = vm.files.get_mut(&member.file) {
                            file.alias = true;
                        }
                        for piece in vm.table.pieces(member.file).collect::<Vec<_>>() {
                            vm.stack.push(Hint {
                                file: member.file,
                                page: piece * PIECE,
                                pages: PIECE,
                                at: now,
                                tries: 0,
                            });
                        }
                    }
                }
                Some(false) => self.stats.case_different_path_different_content += 1,
                None => domain.candidates.put_back(candidate, now),
            }
            return true;
        }
        false
    }
}

/// Whether up to four pages that both contents have cached are equal; `None` if there is no such page yet.
fn sample(
    vms: &BTreeMap<VmId, VmState>,
    domain: &Domain,
    one: ContentId,
    other: ContentId,
) -> Option<bool> {
    let (one, other) = (domain.contents.get(one)?, domain.contents.get(other)?);
    let mut compared = 0;
    let (mut left, mut right) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
    for a in &one.members {
        let vm_a = vms.get(&a.vm)?;
        for b in &other.members {
            let vm_b = vms.get(&b.vm)?;
            for piece in vm_a
                .table
                .pieces(a.file)
                .filter(|&p| vm_b.table.has_piece(b.file, p))
            {
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

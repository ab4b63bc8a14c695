//! Counts, for each page of a content (the bytes of a file), how many of the content's files are
//! cached there. The fold engine learns from the counts which cached pages have a match in another
//! VM, without a search of all VMs' tables.

use std::collections::BTreeMap;
use std::ops::Range;

use memfold_wire::agent::FileNumber;

use super::guest::VmId;
use super::member::Member;
use super::vm_table::PIECE;

/// Files that cache one page. If there are only one or two files, it is known which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Held {
    files: u32,
    /// Exclusive or of the VMs of all these files.
    vms: VmId,
    /// Exclusive or of the numbers of all these files.
    numbers: FileNumber,
    /// The file that was the only one before the second came; `None` if it is gone, or if there is
    /// no second.
    first: Option<Member>,
}

impl Held {
    fn changed(self, member: Member, more: bool) -> Self {
        let (files, first) = if more {
            (self.files + 1, self.first.or(self.only()))
        } else {
            (self.files.saturating_sub(1), self.first)
        };
        Self {
            files,
            vms: self.vms ^ member.vm,
            numbers: self.numbers ^ member.file,
            first: first.filter(|first| files > 1 && (more || *first != member)),
        }
    }

    /// Returns the file that caches the page if it is the only one.
    fn only(self) -> Option<Member> {
        let member = Member {
            vm: self.vms,
            file: self.numbers,
        };
        (self.files == 1).then_some(member)
    }
}

/// Files that cache the pages of one content, for each page.
#[derive(Debug, Default)]
pub(super) struct Holders {
    /// First page of each range of pages that the same files cache. A range ends where the next one
    /// begins. No file caches the pages before the first range.
    ranges: BTreeMap<u32, Held>,
}

impl Holders {
    fn at(&self, page: u32) -> Held {
        let range = self.ranges.range(..=page).next_back();
        range.map_or_else(Held::default, |(_, held)| *held)
    }

    /// Counts for each of these pages that `member` caches it (`more` is `true`) or no longer
    /// caches it. Calls `alone` with each other file, and with the pages that this file is or was
    /// the only one to cache.
    pub fn change(
        &mut self,
        member: Member,
        pages: Range<u32>,
        more: bool,
        mut alone: impl FnMut(Member, Range<u32>),
    ) {
        if pages.is_empty() {
            return;
        }
        for border in [pages.start, pages.end] {
            let held = self.at(border);
            self.ranges.entry(border).or_insert(held);
        }
        let mut changed: Option<(Member, Range<u32>)> = None;
        let mut tell = |other: Option<Member>, from: u32| {
            if let Some((before, range)) = changed.take() {
                alone(before, range.start..from);
            }
            changed = other.map(|other| (other, from..pages.end));
        };
        for (&from, held) in self.ranges.range_mut(pages.clone()) {
            let before = *held;
            *held = before.changed(member, more);
            tell(if more { before.only() } else { held.only() }, from);
        }
        tell(None, pages.end);
        self.join(&pages);
    }

    /// Joins ranges in and around `pages` that the same files cache.
    fn join(&mut self, pages: &Range<u32>) {
        let mut before = pages
            .start
            .checked_sub(1)
            .map_or(Held::default(), |p| self.at(p));
        let mut same = Vec::new();
        for (&from, &held) in self.ranges.range(pages.start..=pages.end) {
            if held == before {
                same.push(from);
            }
            before = held;
        }
        for from in same {
            self.ranges.remove(&from);
        }
    }

    /// Returns the file that caches a page if it is the only one.
    pub fn only(&self, page: u32) -> Option<Member> {
        self.at(page).only()
    }

    /// Returns a file that caches a page besides `own`, if one is known, and whether there are more
    /// of them. If there are more, the known one was the first of all.
    pub fn other(&self, page: u32, own: Member) -> (Option<Member>, bool) {
        let held = self.at(page);
        let other = Member {
            vm: held.vms ^ own.vm,
            file: held.numbers ^ own.file,
        };
        match held.files {
            0 | 1 => (None, false),
            2 => (Some(other), false),
            _ => (held.first.filter(|first| *first != own), true),
        }
    }

    /// Returns which of the 64 pages of piece `piece` at least two files cache: one bit for each
    /// page.
    pub fn shared(&self, piece: u32) -> u64 {
        let first = piece * PIECE;
        let set = |held: Held| if held.files > 1 { u64::MAX } else { 0 };
        let mut bits = set(self.at(first));
        for (&from, &held) in self.ranges.range(first..=first + (PIECE - 1)) {
            let rest = u64::MAX << (from - first);
            bits = bits & !rest | set(held) & rest;
        }
        bits
    }

    /// Returns the numbers of the pieces (64 pages each) with pages that at least two files cache,
    /// in ascending order.
    pub fn shared_pieces(&self) -> Vec<u32> {
        let mut found: Vec<u32> = Vec::new();
        let ends = self.ranges.keys().skip(1).copied();
        for ((&from, held), end) in self.ranges.iter().zip(ends) {
            if held.files > 1 {
                found.extend(from / PIECE..=(end - 1) / PIECE);
            }
        }
        found.dedup();
        found
    }

    /// Returns the approximate memory use in bytes.
    pub fn own_bytes(&self) -> usize {
        // Nodes of the tree are filled to two thirds on average.
        self.ranges.len() * size_of::<(u32, Held)>() * 3 / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::tests::numbers;

    #[test]
    fn counts_of_files_that_cache_a_page_agree_with_sets_of_files_after_random_changes() {
        const PAGES: u32 = 300;
        let mut random = numbers();
        let mut holders = Holders::default();
        let members: Vec<Member> = (0..4).map(|n| Member { vm: n / 2, file: n }).collect();
        let mut model = vec![Vec::<Member>::new(); PAGES as usize];
        for _ in 0..5_000 {
            let member = members[random(4) as usize];
            let (from, length, more) = (random(PAGES), random(40), random(2) == 0);
            // Only pages that the file does not cache yet (or caches) can change.
            let end = (from + length).min(PAGES);
            let mut told = Vec::new();
            let mut wanted = Vec::new();
            for page in from..end {
                let held = &mut model[page as usize];
                if held.contains(&member) == more {
                    continue;
                }
                let before = held.clone();
                if more {
                    held.push(member);
                } else {
                    held.retain(|m| *m != member);
                }
                let few = if more { &before } else { &*held };
                wanted.extend((few.len() == 1).then(|| (few[0], page)));
                holders.change(member, page..page + 1, more, |other, pages| {
                    told.extend(pages.map(|page| (other, page)));
                });
            }
            assert_eq!(told, wanted);
        }
        let mut most = 0;
        for page in 0..PAGES {
            let held = &model[page as usize];
            most = most.max(held.len());
            if let [first, second, rest @ ..] = &held[..] {
                let (other, has_more) = holders.other(page, *second);
                assert!(other.is_none_or(|other| held.contains(&other) && other != *second));
                assert_eq!(has_more, !rest.is_empty());
                assert!(has_more || other == Some(*first));
            }
            assert_eq!(
                holders.only(page),
                held.first().copied().filter(|_| held.len() == 1)
            );
            let bit = holders.shared(page / PIECE) >> (page % PIECE) & 1;
            assert_eq!(bit == 1, held.len() > 1, "page {page}");
        }
        let mut pieces: Vec<u32> = (0..PAGES)
            .filter(|p| model[*p as usize].len() > 1)
            .collect();
        for page in &mut pieces {
            *page /= PIECE;
        }
        pieces.dedup();
        assert_eq!(holders.shared_pieces(), pieces);
        assert!(most > 2);
    }

    #[test]
    fn of_several_files_that_cache_a_page_the_first_is_known_until_it_drops_the_page() {
        let mut holders = Holders::default();
        let members: Vec<Member> = (1..=4).map(|vm| Member { vm, file: 7 }).collect();
        for member in &members {
            holders.change(*member, 0..10, true, |_, _| {});
        }
        assert_eq!(holders.other(5, members[3]), (Some(members[0]), true));
        assert_eq!(holders.other(5, members[0]), (None, true));
        holders.change(members[0], 0..10, false, |_, _| {});
        assert_eq!(holders.other(5, members[3]), (None, true));
        holders.change(members[1], 0..10, false, |_, _| {});
        assert_eq!(holders.other(5, members[3]), (Some(members[2]), false));
    }

    #[test]
    fn a_range_of_pages_that_the_same_files_cache_takes_one_entry_whatever_its_length() {
        let mut holders = Holders::default();
        let [one, two] = [1, 2].map(|vm| Member { vm, file: 7 });
        let mut told = Vec::new();
        for page in 0..1000 {
            holders.change(one, page..page + 1, true, |_, _| {});
        }
        holders.change(two, 0..1000, true, |member, pages| {
            told.push((member, pages));
        });
        assert_eq!(told, [(one, 0..1000)]);
        assert_eq!(
            (holders.ranges.len(), holders.shared_pieces().len()),
            (2, 16)
        );
        holders.change(one, 0..1000, false, |_, _| {});
        assert_eq!(holders.only(999), Some(two));
        holders.change(two, 0..1000, false, |_, _| {});
        assert!(holders.ranges.is_empty());
    }
}

//! Index of file contents: which files of which VMs probably have the same bytes, and which pages
//! of the page store hold these bytes. The fold engine looks there for pages that VMs can share.
//!
//! A [`Content`] stands for the bytes of one file of which several VMs may have a copy. Files with
//! the same path and size are assumed to have the same content. A file with the same name and size
//! under another path is added after some of its pages were compared. If a VM's file keeps
//! differing, it gets another content (a *variant*), so that VMs with this other version of the
//! file share with each other. All of this is a guess: before a page is folded, its bytes are
//! compared.

use std::collections::BTreeMap;
use std::ops::Range;

use foldhash::HashMap;
use memfold_wire::agent::FileNumber;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::guest::VmId;
use super::vm_table::{PIECE, Piece};

/// Number of a content (the bytes of a file) in its trust domain; never reused.
pub type ContentId = u32;

/// Maximum number of variants of one path and size, that is, of versions of a file that VMs of one
/// trust domain have at the same time.
const MAX_VARIANTS: usize = 4;

/// Maximum number of contents of the same name and size that a new content is compared with.
const MAX_CANDIDATES: usize = 4;

/// Maximum number of contents that are remembered for one name and size.
const MAX_NAMESAKES: usize = 64;

/// A file of one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Member {
    pub vm: VmId,
    /// Number of the file, assigned by the VM's agent.
    pub file: FileNumber,
}

/// Bytes of a file, which files of several VMs probably share.
#[derive(Debug)]
pub struct Content {
    /// Path of the first file that had this content.
    pub path: Box<[u8]>,
    /// Files of VMs that probably have this content.
    pub members: Vec<Member>,
    key: PathKey,
    store: BTreeMap<u32, Box<Piece>>,
}

impl Content {
    /// Returns the length in bytes of the files with this content.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.key.1
    }

    /// Returns the index of the store page that holds page `page` of this content; `None` if the
    /// page store does not hold that page.
    #[must_use]
    pub fn store_page(&self, page: u32) -> Option<u32> {
        self.store.get(&(page / PIECE))?[(page % PIECE) as usize].checked_sub(1)
    }

    /// Returns, for each of the 64 pages of piece `piece`, the index plus one of the store page
    /// that holds it; 0 if the page store does not hold the page.
    #[must_use]
    pub fn store_pages(&self, piece: u32) -> Piece {
        self.store.get(&piece).map_or([0; PIECE as usize], |p| **p)
    }

    fn set_store_page(&mut self, page: u32, store_page: Option<u32>) {
        let (key, at) = (page / PIECE, (page % PIECE) as usize);
        if let Some(stored) = store_page {
            let piece = self.store.entry(key);
            piece.or_insert_with(|| Box::new([0; PIECE as usize]))[at] = stored + 1;
        } else if let Some(piece) = self.store.get_mut(&key) {
            piece[at] = 0;
            if piece.iter().all(|&p| p == 0) {
                self.store.remove(&key);
            }
        }
    }
}

/// Hash of a path, and size of the file.
type PathKey = (u128, u64);

/// Hash of a file's name, and size of the file.
type NameKey = (u64, u64);

/// State of one page of the page store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StorePageFacts {
    /// Number of guest pages (of all VMs) that map this store page.
    pub references: u32,
    /// Content, and page of the content, whose bytes the index says that this store page holds;
    /// `None` if no index entry refers to the store page.
    pub holds: Option<(ContentId, u32)>,
    /// Whether the store page was freed (punched out of the store's file). Guest pages that still
    /// map it have private copies.
    pub punched: bool,
}

/// All distinct contents of files that the VMs of one trust domain cache.
#[derive(Debug, Default)]
pub struct Contents {
    all: HashMap<ContentId, Content>,
    next: ContentId,
    by_path: HashMap<PathKey, Vec<ContentId>>,
    by_name: HashMap<NameKey, Vec<ContentId>>,
    of: HashMap<Member, ContentId>,
    /// Paths of files that joined a content with another path.
    own_paths: HashMap<Member, Box<[u8]>>,
    pages: HashMap<u32, Box<[StorePageFacts; PIECE as usize]>>,
    orphans: Vec<Range<u32>>,
}

impl Contents {
    /// Returns the content of a VM's file; `None` if the file has no known path.
    #[must_use]
    pub fn of(&self, member: Member) -> Option<ContentId> {
        self.of.get(&member).copied()
    }

    /// Returns the path of a VM's file in the guest; `None` if it is unknown.
    #[must_use]
    pub fn path(&self, member: Member) -> Option<&[u8]> {
        if let Some(path) = self.own_paths.get(&member) {
            return Some(path);
        }
        Some(&self.get(self.of(member)?)?.path)
    }

    #[must_use]
    pub fn get(&self, id: ContentId) -> Option<&Content> {
        self.all.get(&id)
    }

    /// Returns every content that files of VMs share: each content with at least two members.
    pub fn shared(&self) -> impl Iterator<Item = (ContentId, &Content)> {
        self.all
            .iter()
            .filter(|(_, c)| c.members.len() > 1)
            .map(|(&id, c)| (id, c))
    }

    /// Adds a VM's file at `path` of `size` bytes. The file joins the content of that path and
    /// size, or starts a new content. Returns other contents of the same file name and size, whose
    /// bytes the caller may compare and then join by [`Contents::alias`].
    pub fn join(&mut self, member: Member, path: &[u8], size: u64) -> Vec<ContentId> {
        let key = (xxh3_128(path), size);
        if let Some(id) = self.of(member) {
            if self.all.get(&id).is_some_and(|c| c.key == key) {
                return Vec::new();
            }
            self.leave(member);
        }
        if let Some(&id) = self.by_path.get(&key).and_then(|ids| ids.first()) {
            self.add_member(id, member);
            return Vec::new();
        }
        let name = name_key(path, size);
        let candidates = self
            .by_name
            .get(&name)
            .map(|ids| ids.iter().copied().take(MAX_CANDIDATES).collect())
            .unwrap_or_default();
        let id = self.begin(member, path, key);
        let namesakes = self.by_name.entry(name).or_default();
        if namesakes.len() < MAX_NAMESAKES {
            namesakes.push(id);
        }
        candidates
    }

    fn begin(&mut self, member: Member, path: &[u8], key: PathKey) -> ContentId {
        let id = self.next;
        self.next += 1;
        let content = Content {
            path: path.into(),
            members: vec![member],
            key,
            store: BTreeMap::new(),
        };
        self.all.insert(id, content);
        self.of.insert(member, id);
        self.by_path.entry(key).or_default().push(id);
        id
    }

    fn add_member(&mut self, id: ContentId, member: Member) {
        if let Some(content) = self.all.get_mut(&id) {
            content.members.push(member);
            self.of.insert(member, id);
        }
    }

    /// Removes a VM's file from its content. A content of no file is removed, too, and the index no
    /// longer refers to its store pages.
    pub fn leave(&mut self, member: Member) {
        self.own_paths.remove(&member);
        self.leave_content(member);
    }

    fn leave_content(&mut self, member: Member) {
        let Some(id) = self.of.remove(&member) else {
            return;
        };
        if let Some(content) = self.all.get_mut(&id) {
            content.members.retain(|&m| m != member);
            if content.members.is_empty() {
                self.end(id);
            }
        }
    }

    fn end(&mut self, id: ContentId) -> Option<Content> {
        let content = self.all.remove(&id)?;
        for piece in content.store.values() {
            for stored in piece.iter().filter_map(|p| p.checked_sub(1)) {
                self.facts_mut(stored).holds = None;
                self.release_facts(stored);
            }
        }
        let remove = |ids: Option<&mut Vec<ContentId>>| {
            ids.is_some_and(|ids| {
                ids.retain(|&i| i != id);
                ids.is_empty()
            })
        };
        if remove(self.by_path.get_mut(&content.key)) {
            self.by_path.remove(&content.key);
        }
        let name = name_key(&content.path, content.size());
        if remove(self.by_name.get_mut(&name)) {
            self.by_name.remove(&name);
        }
        Some(content)
    }

    /// Removes all files of a VM from their contents.
    pub fn leave_all(&mut self, vm: VmId) {
        let members: Vec<Member> = self.of.keys().filter(|m| m.vm == vm).copied().collect();
        for member in members {
            self.leave(member);
        }
    }

    /// Joins two contents, of which some pages were compared and equal: the files of `other` become
    /// files of `id`.
    pub fn alias(&mut self, id: ContentId, other: ContentId) {
        if id == other || !self.all.contains_key(&id) {
            return;
        }
        let Some(old) = self.end(other) else { return };
        for member in old.members {
            let path = || old.path.clone();
            self.own_paths.entry(member).or_insert_with(path);
            self.add_member(id, member);
        }
    }

    /// Moves a file whose bytes keep differing from its content's to the next content (variant) of
    /// the same path and size. Returns `false` if there is no other variant to try.
    pub fn try_variant(&mut self, member: Member) -> bool {
        let known = self
            .of(member)
            .and_then(|id| Some((id, self.all.get(&id)?)));
        let Some((id, content)) = known else {
            return false;
        };
        let (key, path, alone) = (
            content.key,
            content.path.clone(),
            content.members.len() == 1,
        );
        let variants = self.by_path.get(&key).cloned().unwrap_or_default();
        let at = variants.iter().position(|&v| v == id);
        let next = at.map_or(0, |at| at + 1);
        if next >= MAX_VARIANTS {
            return false;
        }
        match variants.get(next) {
            Some(&variant) => {
                self.leave_content(member);
                self.add_member(variant, member);
            }
            None if !alone => {
                self.leave_content(member);
                self.begin(member, &path, key);
            }
            // The member is alone in the last variant, so it can differ only from an outdated store
            // page.
            None => return false,
        }
        true
    }

    /// Returns the state of store page `store_page`: how many guest pages map it, and what it
    /// holds.
    #[must_use]
    pub fn facts(&self, store_page: u32) -> StorePageFacts {
        self.pages
            .get(&(store_page / PIECE))
            .map_or_else(Default::default, |p| p[(store_page % PIECE) as usize])
    }

    fn facts_mut(&mut self, store_page: u32) -> &mut StorePageFacts {
        let piece = self
            .pages
            .entry(store_page / PIECE)
            .or_insert_with(|| Box::new([StorePageFacts::default(); PIECE as usize]));
        &mut piece[(store_page % PIECE) as usize]
    }

    /// Counts, for each of the `pages` store pages from `first` on, one more guest page that maps
    /// it.
    pub fn add_references(&mut self, mut first: u32, mut pages: u32) {
        while pages > 0 {
            let within = first % PIECE;
            let step = pages.min(PIECE - within);
            self.facts_mut(first);
            if let Some(piece) = self.pages.get_mut(&(first / PIECE)) {
                for facts in &mut piece[within as usize..(within + step) as usize] {
                    facts.references += 1;
                }
            }
            first += step;
            pages -= step;
        }
    }

    /// Counts one guest page more (`more` is `true`) or fewer that maps store page `store_page`.
    pub fn count_reference(&mut self, store_page: u32, more: bool) {
        let facts = self.facts_mut(store_page);
        if more {
            facts.references += 1;
        } else {
            facts.references = facts.references.saturating_sub(1);
            self.release_facts(store_page);
        }
    }

    /// Records that store page `store_page` holds page `page` of `content`. An earlier store page
    /// of that page loses its index entry.
    pub fn index(&mut self, content: ContentId, page: u32, store_page: u32) {
        self.unindex(content, page);
        if let Some(entry) = self.all.get_mut(&content) {
            entry.set_store_page(page, Some(store_page));
            self.facts_mut(store_page).holds = Some((content, page));
        }
    }

    /// Removes the index entry of page `page` of `content`, so that no more guest pages are folded
    /// onto its store page.
    pub fn unindex(&mut self, content: ContentId, page: u32) {
        let entry = self.all.get_mut(&content);
        let stored = entry.and_then(|entry| {
            let stored = entry.store_page(page)?;
            entry.set_store_page(page, None);
            Some(stored)
        });
        if let Some(stored) = stored {
            self.facts_mut(stored).holds = None;
            self.release_facts(stored);
        }
    }

    /// Removes the index entry that says what store page `store_page` holds.
    pub fn unindex_store_page(&mut self, store_page: u32) {
        if let Some((content, page)) = self.facts(store_page).holds {
            self.unindex(content, page);
        }
    }

    /// Records that a store page was freed (punched out of the store's file). No guest page can be
    /// folded onto it any more.
    pub fn set_punched(&mut self, store_page: u32) {
        self.facts_mut(store_page).punched = true;
        self.release_facts(store_page);
    }

    /// Removes the record of a store page that no VM maps and no index entry refers to. If the
    /// store's file still contains the page, the page becomes an orphan.
    fn release_facts(&mut self, store_page: u32) {
        let facts = self.facts_mut(store_page);
        if facts.references > 0 || facts.holds.is_some() {
            return;
        }
        let punched = std::mem::take(facts).punched;
        let key = store_page / PIECE;
        let piece = self.pages.get(&key);
        if piece.is_some_and(|p| p.iter().all(|f| *f == StorePageFacts::default())) {
            self.pages.remove(&key);
        }
        if !punched {
            self.add_orphans(store_page..store_page + 1);
        }
    }

    /// Adds orphans: pages in the page store's file that no table of this engine refers to.
    pub fn add_orphans(&mut self, pages: Range<u32>) {
        let last = self.orphans.last_mut();
        match last.filter(|last| last.end == pages.start) {
            Some(last) => last.end = pages.end,
            None => self.orphans.push(pages),
        }
    }

    /// Returns the orphans (pages in the store's file that no table refers to) that were added
    /// since the last call. The caller must free them, because nothing else refers to them.
    pub fn take_orphans(&mut self) -> Vec<u32> {
        let orphans = std::mem::take(&mut self.orphans);
        let unknown = |&page: &u32| self.facts(page) == StorePageFacts::default();
        orphans.into_iter().flatten().filter(unknown).collect()
    }

    /// Returns the store pages that an index entry refers to or a VM maps, each with its state. The
    /// list also has unused pages, with an empty state.
    pub fn known_store_pages(&self) -> impl Iterator<Item = (u32, StorePageFacts)> + '_ {
        self.pages.iter().flat_map(|(&piece, facts)| {
            facts.iter().enumerate().map(move |(i, &f)| {
                #[allow(clippy::cast_possible_truncation)] // an index within a piece is below 64
                let within = i as u32;
                (piece * PIECE + within, f)
            })
        })
    }

    /// Returns the approximate memory use of the index in bytes.
    #[must_use]
    pub fn own_bytes(&self) -> u64 {
        let contents = self.all.values();
        let contents =
            contents.map(|c| c.store.len() * (PIECE as usize * 4 + 24) + c.path.len() + 200);
        let paths = self.own_paths.values().map(|path| path.len() + 32);
        let facts = self.pages.len() * PIECE as usize * size_of::<StorePageFacts>();
        (contents.chain(paths).sum::<usize>() + facts + self.of.len() * 24) as u64
    }
}

fn name_key(path: &[u8], size: u64) -> NameKey {
    let name = path.rsplit(|&b| b == b'/').next().unwrap_or(path);
    (xxh3_64(name), size)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Member = Member { vm: 1, file: 10 };
    const B: Member = Member { vm: 2, file: 20 };
    const C: Member = Member { vm: 3, file: 30 };

    #[test]
    fn files_of_two_vms_with_the_same_path_and_size_are_taken_for_the_same_file() {
        let mut contents = Contents::default();
        assert!(contents.join(A, b"/usr/bin/perl", 100).is_empty());
        assert!(contents.join(B, b"/usr/bin/perl", 100).is_empty());
        assert_eq!(contents.of(A), contents.of(B));
        contents.join(C, b"/usr/bin/perl", 200);
        assert_ne!(
            contents.of(A),
            contents.of(C),
            "another size is another file"
        );
    }

    #[test]
    fn a_file_of_the_same_name_in_another_directory_is_a_candidate_for_sharing() {
        let mut contents = Contents::default();
        contents.join(A, b"/usr/lib/x/libz.so", 100);
        let candidates = contents.join(B, b"/opt/lib/libz.so", 100);
        assert_eq!(candidates, [contents.of(A).unwrap()]);
        assert_ne!(contents.of(A), contents.of(B));
        contents.alias(candidates[0], contents.of(B).unwrap());
        assert_eq!(contents.of(A), contents.of(B));
        let paths = |contents: &Contents| [A, B].map(|m| contents.path(m).map(<[u8]>::to_vec));
        let own = [
            Some(b"/usr/lib/x/libz.so".to_vec()),
            Some(b"/opt/lib/libz.so".to_vec()),
        ];
        assert_eq!(paths(&contents), own);
        assert!(contents.try_variant(B));
        assert_eq!(paths(&contents), own, "also when it proves to be another");
        contents.leave(B);
        assert_eq!(contents.path(B), None);
        assert!(contents.own_paths.is_empty());
    }

    #[test]
    fn two_files_that_differ_from_the_first_file_of_their_path_share_one_second_version() {
        let mut contents = Contents::default();
        for m in [A, B, C] {
            contents.join(m, b"/usr/bin/perl", 100);
        }
        assert!(contents.try_variant(B));
        assert_ne!(contents.of(A), contents.of(B));
        assert!(contents.try_variant(C));
        assert_eq!(contents.of(B), contents.of(C));
        contents.leave(C);
        assert!(!contents.try_variant(B), "alone in the last variant");
    }

    #[test]
    fn a_page_of_the_page_store_is_forgotten_once_it_has_no_content_and_no_reference() {
        let mut contents = Contents::default();
        contents.join(A, b"/f", 1);
        let id = contents.of(A).unwrap();
        contents.index(id, 7, 1000);
        contents.count_reference(1000, true);
        assert_eq!(contents.get(id).unwrap().store_page(7), Some(1000));
        assert_eq!(
            contents.facts(1000),
            StorePageFacts {
                references: 1,
                holds: Some((id, 7)),
                punched: false
            }
        );
        contents.index(id, 7, 2000);
        assert_eq!(contents.facts(1000).holds, None);
        contents.leave_all(1);
        assert_eq!(contents.facts(2000), StorePageFacts::default());
        contents.count_reference(1000, false);
        assert!(
            contents.pages.is_empty(),
            "nothing is remembered of pages that nobody needs"
        );
        assert_eq!(contents.take_orphans(), [2000, 1000]);
        assert!(contents.take_orphans().is_empty());
    }

    #[test]
    fn a_store_page_without_content_is_listed_for_freeing_unless_it_is_mapped_or_punched() {
        let mut contents = Contents::default();
        contents.join(A, b"/f", 1);
        let id = contents.of(A).unwrap();
        // The pages were filled and found to differ, replaced, or punched.
        for (page, stored) in [(0, 100), (1, 101), (1, 102), (2, 103)] {
            contents.index(id, page, stored);
        }
        contents.unindex_store_page(100);
        contents.count_reference(103, true);
        contents.set_punched(103);
        contents.unindex_store_page(103);
        contents.count_reference(103, false);
        assert_eq!(contents.take_orphans(), [101, 100]);
        // The page is mapped again before the orphans are taken.
        contents.unindex_store_page(102);
        contents.count_reference(102, true);
        assert!(contents.take_orphans().is_empty());
        contents.count_reference(102, false);
        assert_eq!(contents.take_orphans(), [102]);
        assert!(contents.pages.is_empty());
    }
}

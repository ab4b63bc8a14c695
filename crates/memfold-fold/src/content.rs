//! Index of file contents: which files of which VMs probably have the same bytes, and which pages
//! of the page store hold these bytes. The fold engine looks there for pages that VMs can share.
//!
//! A [`Content`] stands for the bytes of one file of which several VMs may have a copy. Files with
//! the same path and size are assumed to have the same content. A file with the same name and size
//! under another path is added after some of its pages were compared. If a VM's file keeps
//! differing, it gets another content (a *variant*), so that VMs with this other version of the
//! file share with each other. All of this is a guess: before a page is folded, its bytes are
//! compared.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use foldhash::HashMap;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::files::{File, Files};
use super::guest::VmId;
use super::holders::Holders;
use super::member::{ContentId, Member};
use super::vm_table::{PIECE, Piece};

/// Maximum number of variants of one path and size, that is, of versions of a file that VMs of one
/// trust domain have at the same time.
const MAX_VARIANTS: usize = 4;

/// Maximum number of contents of the same name and size that a new content is compared with.
const MAX_CANDIDATES: usize = 4;

/// Maximum number of contents that are remembered for one name and size.
const MAX_NAMESAKES: usize = 64;

/// Bytes of a file, which files of several VMs probably share.
#[derive(Debug)]
pub struct Content {
    /// Path of the first file that had this content.
    pub path: Box<[u8]>,
    /// Files of VMs that probably have this content.
    pub members: Vec<Member>,
    key: PathKey,
    store: BTreeMap<u32, Box<Piece>>,
    /// Which of the members cache which pages; empty if there is only one member.
    holders: Holders,
}

/// Returns the ranges of pages of a VM's file that the VM caches.
pub type CachedRanges<'a> = &'a dyn Fn(Member) -> Vec<Range<u32>>;

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

    /// Returns which of the 64 pages of piece `piece` the page store holds or at least two members
    /// cache: one bit for each page.
    #[must_use]
    pub fn matched(&self, piece: u32) -> u64 {
        let stored = self.store.get(&piece).into_iter();
        let stored = stored.flat_map(|stored| stored.iter().zip(0..));
        stored.fold(self.holders.shared(piece), |bits, (stored, page)| {
            bits | u64::from(*stored != 0) << page
        })
    }

    /// Returns the numbers of the pieces (64 pages each) with pages that at least two members
    /// cache, in ascending order.
    #[must_use]
    pub fn shared_pieces(&self) -> Vec<u32> {
        self.holders.shared_pieces()
    }

    /// Returns `own`, and the members that the counts name for the pages `bits` (one bit for each
    /// of the 64 pages of piece `piece`), all of which `own` caches: the second of two members, or
    /// the first of many. Also returns which pages have members that the counts do not name; those
    /// send hints of their own.
    #[must_use]
    pub fn known_holders(&self, piece: u32, bits: u64, own: Member) -> (Vec<Member>, u64) {
        let (mut known, mut more) = (vec![own], 0);
        let mut bits = bits & self.holders.shared(piece);
        while bits != 0 {
            let page = bits.trailing_zeros();
            let (other, has_more) = self.holders.other(piece * PIECE + page, own);
            known.extend(other.filter(|other| !known.contains(other)));
            more |= u64::from(has_more) << page;
            bits &= bits - 1;
        }
        (known, more)
    }

    /// Returns the only member that caches a page; `None` if no member or several do.
    fn only_holder(&self, page: u32) -> Option<Member> {
        match self.members[..] {
            [member] => Some(member),
            _ => self.holders.only(page),
        }
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
    files: HashMap<VmId, Files>,
    /// Paths of files that joined a content with another path.
    own_paths: HashMap<Member, Box<[u8]>>,
    pages: HashMap<u32, Box<[StorePageFacts; PIECE as usize]>>,
    orphans: Vec<Range<u32>>,
    /// Pages of files for which [`Content::matched`] may have changed.
    unsettled: Vec<(Member, Range<u32>)>,
}

impl Contents {
    /// Returns the content of a VM's file; `None` if the file has no known path.
    #[must_use]
    pub fn of(&self, member: Member) -> Option<ContentId> {
        self.files.get(&member.vm)?.content(member.file)
    }

    /// Returns whether a VM's agent has introduced a file.
    #[must_use]
    pub fn is_known(&self, member: Member) -> bool {
        let files = self.files.get(&member.vm);
        files.is_some_and(|files| files.is_known(member.file))
    }

    /// Returns what is known of a VM's file; `None` if the VM's agent has not introduced it.
    #[must_use]
    pub fn file(&self, member: Member) -> Option<File> {
        self.files.get(&member.vm)?.get(member.file)
    }

    /// Changes what is known of a VM's file, which need not be known before.
    pub fn update_file(&mut self, member: Member, change: impl FnOnce(&mut File)) {
        let files = self.files.entry(member.vm).or_default();
        let before = files.get(member.file);
        let mut file = before.unwrap_or_default();
        change(&mut file);
        if before != Some(file) {
            files.set(member.file, file);
        }
    }

    /// Returns the number of files that a VM's agent has introduced.
    #[must_use]
    pub fn count_files(&self, vm: VmId) -> usize {
        self.files.get(&vm).map_or(0, Files::len)
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
    pub fn join(
        &mut self,
        member: Member,
        path: &[u8],
        size: u64,
        cached: CachedRanges<'_>,
    ) -> Vec<ContentId> {
        let key = (xxh3_128(path), size);
        if let Some(id) = self.of(member) {
            if self.all.get(&id).is_some_and(|c| c.key == key) {
                return Vec::new();
            }
            self.leave(member, cached);
        }
        if let Some(&id) = self.by_path.get(&key).and_then(|ids| ids.first()) {
            self.add_member(id, member, cached);
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

    /// Returns the files whose cached pages have to be counted if a file gets this path and size by
    /// [`Contents::join`], or loses its path by [`Contents::leave`] (`path` is empty): the file
    /// itself, and the only other file of that path and size.
    #[must_use]
    pub fn counted_by(&self, member: Member, path: &[u8], size: u64) -> [Option<Member>; 2] {
        let key = (xxh3_128(path), size);
        let before = self.of(member).and_then(|id| self.all.get(&id));
        if path.is_empty() {
            return [before.map(|_| member), None];
        }
        if before.is_some_and(|content| content.key == key) {
            return [None, None];
        }
        let own = self.is_known(member).then_some(member);
        let content = self.by_path.get(&key).and_then(|ids| ids.first());
        let content = content.and_then(|id| self.all.get(id));
        let only = content.filter(|content| content.members.len() == 1);
        [own, only.map(|content| content.members[0])]
    }

    fn begin(&mut self, member: Member, path: &[u8], key: PathKey) -> ContentId {
        let id = self.next;
        self.next += 1;
        let content = Content {
            path: path.into(),
            members: vec![member],
            key,
            store: BTreeMap::new(),
            holders: Holders::default(),
        };
        self.all.insert(id, content);
        self.update_file(member, |file| file.content = Some(id));
        self.by_path.entry(key).or_default().push(id);
        id
    }

    fn add_member(&mut self, id: ContentId, member: Member, cached: CachedRanges<'_>) {
        let Some(content) = self.all.get_mut(&id) else {
            return;
        };
        if let [only] = content.members[..] {
            for pages in cached(only) {
                content.holders.change(only, pages, true, |_, _| {});
            }
        }
        if content.members.len() == content.members.capacity() {
            // Doubling the list would leave much memory of many lists unused.
            content.members.reserve_exact(content.members.len() / 8 + 1);
        }
        content.members.push(member);
        self.update_file(member, |file| file.content = Some(id));
        for pages in cached(member) {
            self.count_cached(member, pages, true);
        }
    }

    /// Records that a VM caches pages of a file (`more` is `true`) or no longer caches them.
    pub fn count_cached(&mut self, member: Member, pages: Range<u32>, more: bool) {
        let Some(id) = self.of(member) else { return };
        let Some(content) = self.all.get_mut(&id) else {
            return;
        };
        let unsettled = &mut self.unsettled;
        if content.members.len() > 1 {
            let changed = |other, pages| unsettled.push((other, pages));
            content.holders.change(member, pages.clone(), more, changed);
        }
        if more && (content.members.len() > 1 || !content.store.is_empty()) {
            self.unsettled.push((member, pages));
        }
    }

    /// Returns pages of files for which [`Content::matched`] may have changed since the last call.
    pub fn take_unsettled(&mut self) -> Vec<(Member, Range<u32>)> {
        std::mem::take(&mut self.unsettled)
    }

    /// Removes a VM's file from its content. A content of no file is removed, too, and the index no
    /// longer refers to its store pages.
    pub fn leave(&mut self, member: Member, cached: CachedRanges<'_>) {
        self.own_paths.remove(&member);
        self.leave_content(member, cached);
    }

    fn leave_content(&mut self, member: Member, cached: CachedRanges<'_>) {
        if let Some(id) = self.forget_content(member, cached) {
            self.retain_members(id, |m| m != member);
        }
    }

    /// Records that a VM's file has no content, and returns the one that it had. The caller removes
    /// the file from the content's list of members.
    fn forget_content(&mut self, member: Member, cached: CachedRanges<'_>) -> Option<ContentId> {
        let id = self.of(member)?;
        for pages in cached(member) {
            self.count_cached(member, pages.clone(), false);
            self.unsettled.push((member, pages));
        }
        self.update_file(member, |file| file.content = None);
        Some(id)
    }

    /// Removes members from a content. A content of no file is removed, too.
    fn retain_members(&mut self, id: ContentId, stays: impl Fn(Member) -> bool) {
        if let Some(content) = self.all.get_mut(&id) {
            content.members.retain(|&member| stays(member));
            match content.members.len() {
                0 => drop(self.end(id)),
                1 => content.holders = Holders::default(),
                _ => {}
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

    /// Removes all files of a VM from their contents, and forgets them.
    pub fn leave_all(&mut self, vm: VmId, cached: CachedRanges<'_>) {
        let files = self.files.get(&vm).into_iter().flat_map(Files::numbers);
        let members: Vec<Member> = files.map(|file| Member { vm, file }).collect();
        let mut left = BTreeSet::new();
        for member in members {
            self.own_paths.remove(&member);
            left.extend(self.forget_content(member, cached));
        }
        // One search for each content: a guest may have very many files of one content.
        for id in left {
            self.retain_members(id, |member| member.vm != vm);
        }
        self.files.remove(&vm);
    }

    /// Joins two contents, of which some pages were compared and equal: the files of `other` become
    /// files of `id`.
    pub fn alias(&mut self, id: ContentId, other: ContentId, cached: CachedRanges<'_>) {
        if id == other || !self.all.contains_key(&id) {
            return;
        }
        let Some(old) = self.end(other) else { return };
        for member in old.members {
            let path = || old.path.clone();
            self.own_paths.entry(member).or_insert_with(path);
            self.add_member(id, member, cached);
        }
    }

    /// Moves a file whose bytes keep differing from its content's to the next content (variant) of
    /// the same path and size. Returns `false` if there is no other variant to try.
    pub fn try_variant(&mut self, member: Member, cached: CachedRanges<'_>) -> bool {
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
                self.leave_content(member, cached);
                self.add_member(variant, member, cached);
            }
            None if !alone => {
                self.leave_content(member, cached);
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
            let only = entry.only_holder(page);
            self.unsettled
                .extend(only.map(|only| (only, page..page + 1)));
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
            Some((stored, entry.only_holder(page)))
        });
        if let Some((stored, only)) = stored {
            self.unsettled
                .extend(only.map(|only| (only, page..page + 1)));
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
        let contents = contents.map(|c| {
            let stored = c.store.len() * (PIECE as usize * 4 + 24);
            let members = c.members.capacity() * size_of::<Member>();
            stored + members + c.holders.own_bytes() + c.path.len() + 200
        });
        let paths = self.own_paths.values().map(|path| path.len() + 32);
        let facts = self.pages.len() * PIECE as usize * size_of::<StorePageFacts>();
        let files = self.files.values().map(Files::own_bytes);
        (contents.chain(paths).chain(files).sum::<usize>() + facts) as u64
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

    fn nothing(_: Member) -> Vec<Range<u32>> {
        Vec::new()
    }

    #[test]
    fn files_of_two_vms_with_the_same_path_and_size_are_taken_for_the_same_file() {
        let mut contents = Contents::default();
        assert!(contents.join(A, b"/usr/bin/perl", 100, &nothing).is_empty());
        assert!(contents.join(B, b"/usr/bin/perl", 100, &nothing).is_empty());
        assert_eq!(contents.of(A), contents.of(B));
        contents.join(C, b"/usr/bin/perl", 200, &nothing);
        assert_ne!(
            contents.of(A),
            contents.of(C),
            "another size is another file"
        );
    }

    #[test]
    fn a_file_of_the_same_name_in_another_directory_is_a_candidate_for_sharing() {
        let mut contents = Contents::default();
        contents.join(A, b"/usr/lib/x/libz.so", 100, &nothing);
        let candidates = contents.join(B, b"/opt/lib/libz.so", 100, &nothing);
        assert_eq!(candidates, [contents.of(A).unwrap()]);
        assert_ne!(contents.of(A), contents.of(B));
        contents.alias(candidates[0], contents.of(B).unwrap(), &nothing);
        assert_eq!(contents.of(A), contents.of(B));
        let paths = |contents: &Contents| [A, B].map(|m| contents.path(m).map(<[u8]>::to_vec));
        let own = [
            Some(b"/usr/lib/x/libz.so".to_vec()),
            Some(b"/opt/lib/libz.so".to_vec()),
        ];
        assert_eq!(paths(&contents), own);
        assert!(contents.try_variant(B, &nothing));
        assert_eq!(paths(&contents), own, "also when it proves to be another");
        contents.leave(B, &nothing);
        assert_eq!(contents.path(B), None);
        assert!(contents.own_paths.is_empty());
    }

    #[test]
    fn two_files_that_differ_from_the_first_file_of_their_path_share_one_second_version() {
        let mut contents = Contents::default();
        for m in [A, B, C] {
            contents.join(m, b"/usr/bin/perl", 100, &nothing);
        }
        assert!(contents.try_variant(B, &nothing));
        assert_ne!(contents.of(A), contents.of(B));
        assert!(contents.try_variant(C, &nothing));
        assert_eq!(contents.of(B), contents.of(C));
        contents.leave(C, &nothing);
        assert!(
            !contents.try_variant(B, &nothing),
            "alone in the last variant"
        );
    }

    #[test]
    fn removing_a_vm_with_many_files_of_one_path_costs_no_more_than_files_of_as_many_paths() {
        const FILES: u32 = 40_000;
        let cost_ns = |path: &dyn Fn(u32) -> String| {
            let mut contents = Contents::default();
            for file in 0..FILES {
                contents.join(Member { vm: 1, file }, path(file).as_bytes(), 1, &nothing);
            }
            contents.join(B, path(0).as_bytes(), 1, &nothing);
            let began_ns = memfold_sys::cpu::thread_cpu_ns();
            contents.leave_all(1, &nothing);
            let members = &contents.get(contents.of(B).unwrap()).unwrap().members;
            assert_eq!(*members, [B]);
            assert_eq!((contents.all.len(), contents.count_files(1)), (1, 0));
            memfold_sys::cpu::thread_cpu_ns() - began_ns
        };
        let of_one = cost_ns(&|_| "/f".to_owned());
        let of_many = cost_ns(&|file| format!("/{file}"));
        assert!(of_one < of_many * 4, "{of_one} ns and {of_many} ns");
    }

    #[test]
    fn a_page_of_the_page_store_is_forgotten_once_it_has_no_content_and_no_reference() {
        let mut contents = Contents::default();
        contents.join(A, b"/f", 1, &nothing);
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
        contents.leave_all(1, &nothing);
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
        contents.join(A, b"/f", 1, &nothing);
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

//! Tables of one VM's memory for the fold engine: which file page each guest page caches, and which
//! page of the page store each guest page maps. The first table follows the messages of the agent
//! in the guest, which may be wrong.
//!
//! The tables store runs of pages ([`packed`](super::packed)). An agent with false hints can fill
//! much of the tables. [`VmTable::cache`] therefore refuses pieces beyond a limit that depends on
//! the size of the VM's RAM.

use std::ops::Range;
use std::sync::Arc;

use memfold_units::{Hva, Pfn};
use memfold_wire::agent::FileNumber;

use memfold_vm::RamLayout;

use super::bits::Bits;
use super::cached_pages::{Cached, CachedPages};
pub use super::numbering::Index;
use super::numbering::Numbering;
use super::packed::{Run, Table, Value as _};
use super::places::Places;
pub use super::places::{PIECE, Piece};

/// State of a guest page that maps the page store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Index in the page store of the page that the guest page maps.
    pub store_page: u32,
    /// Whether the guest page still shows the store page: at the last sync with the kernel's page
    /// tables, the guest had not written it since it was folded.
    pub shared: bool,
}

/// Pages of a file that the VM caches now and did not cache before, or the other way round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub file: FileNumber,
    pub pages: Range<u32>,
    /// Whether the VM caches the pages now.
    pub cached: bool,
}

/// Tables of one VM's guest pages: which file pages they cache, which store pages they map, and
/// marks such as "dirty".
#[derive(Debug)]
pub struct VmTable {
    numbering: Arc<Numbering>,
    cached: Table<Cached>,
    places: Places,
    cached_pages: u64,
    cached_runs: u64,
    /// Changes of the cached pages since the last [`VmTable::take_changes`].
    changes: Vec<Change>,
    /// Cached pages that the page store holds or another file of the trust domain has.
    matched: Bits,
    /// Store page that each guest page maps, plus one.
    mapped: Table<u32>,
    shared: Bits,
    /// Pages that map the page store and that had a private copy at a sync with the kernel's page
    /// tables. Unlike `shared`, an agent's message never changes this set.
    copied: Bits,
    dirty: Bits,
    refused: Bits,
    planned: Bits,
    /// Pages that were discarded because they held only zeroes, and that are still not in memory.
    zero: Bits,
    /// Pages that map a snapshot's image (views).
    view: Bits,
    /// Pages for which the snapshot's image holds data. Holes of the image use no memory.
    image_data: Bits,
    /// Pages in views that may be folded anyway: the guest has written them, or no other VM has the
    /// image in memory.
    foldable: Bits,
    seen: Option<Bits>,
}

impl VmTable {
    /// Creates empty tables for a VM whose RAM has this layout (at most 16 TiB).
    #[must_use]
    pub fn new(layout: RamLayout) -> Self {
        let numbering = Numbering::new(layout);
        let total = numbering.pages();
        Self {
            numbering: Arc::new(numbering),
            cached: Table::new(total),
            places: Places::default(),
            cached_pages: 0,
            cached_runs: 0,
            changes: Vec::new(),
            matched: Bits::new(total),
            mapped: Table::new(total),
            shared: Bits::new(total),
            copied: Bits::new(total),
            dirty: Bits::new(total),
            refused: Bits::new(total),
            planned: Bits::new(total),
            zero: Bits::new(total),
            view: Bits::new(total),
            image_data: Bits::new(total),
            foldable: Bits::new(total),
            seen: None,
        }
    }

    /// Returns the layout of the VM's RAM.
    #[must_use]
    pub fn layout(&self) -> &RamLayout {
        &self.numbering.layout
    }

    /// Returns the size of the VM's RAM in pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.numbering.pages()
    }

    /// Returns the table index of guest page frame `pfn`; `None` for a page frame outside RAM.
    #[must_use]
    pub fn index_of(&self, pfn: Pfn) -> Option<Index> {
        self.numbering.index_of(pfn)
    }

    /// Returns the table index of the guest page at host virtual address `hva` in QEMU; `None` for
    /// an address outside RAM.
    #[must_use]
    pub fn index_at(&self, hva: Hva) -> Option<Index> {
        self.index_of(self.layout().pfn_of(hva)?)
    }

    /// Returns the host virtual address in QEMU of the guest page with table index `at`; `None` for
    /// an index outside RAM.
    #[must_use]
    pub fn hva(&self, at: Index) -> Option<Hva> {
        self.numbering.hva(at)
    }

    /// Returns whether guest page `next` directly follows guest page `at`, both in guest memory and
    /// in QEMU's memory.
    #[must_use]
    pub fn adjacent(&self, at: Index, next: Index) -> bool {
        self.numbering.adjacent(at, next)
    }

    /// Returns a copy of the table of cached pages. The copy is cheap: one reference count for each
    /// 256 pages.
    #[must_use]
    pub fn copy_cached(&self) -> CachedPages {
        CachedPages {
            numbering: self.numbering.clone(),
            cached: self.cached.clone(),
        }
    }

    /// Records that guest page `at` now caches page `page` of `file`. Returns `false` if the VM's
    /// table is full.
    pub fn cache(&mut self, at: Index, file: FileNumber, page: u32) -> bool {
        let most = 1024 + u64::from(self.pages()) / 8;
        if !self.places.has_room_for(file, page, most) {
            return false;
        }
        let Some(stored) = file.checked_add(1) else {
            return false;
        };
        if self.cached(at) != Some((file, page)) {
            self.uncache(at);
            if let Some(before) = self.places.set(file, page, Some(at)) {
                // The guest has moved the page (by migration; or it was dropped and read again
                // while events were lost).
                self.set_cached(before, Cached::default());
                self.matched.set(at, self.matched.has(before));
                self.matched.set(before, false);
            } else {
                self.note_change(file, page, true);
            }
            self.set_cached(at, Cached { file: stored, page });
        }
        self.dirty.set(at, false);
        self.refused.set(at, false);
        if let Some(seen) = &mut self.seen {
            // An inventory reports pages that were there before, so the results of the last sync
            // are still valid.
            seen.set(at, true);
        } else {
            // The guest has filled the page anew, so a fold of its old bytes has ended.
            self.shared.set(at, false);
            self.foldable.set(at, true);
        }
        true
    }

    /// Records that guest page `at` no longer caches a file page.
    pub fn uncache(&mut self, at: Index) {
        let Some((file, page)) = self.cached(at) else {
            return;
        };
        self.set_cached(at, Cached::default());
        self.matched.set(at, false);
        if self.places.get(file, page) == Some(at) {
            self.places.set(file, page, None);
            self.note_change(file, page, false);
        }
    }

    fn set_cached(&mut self, at: Index, value: Cached) {
        let before = self.cached.set(at, value);
        let is_cached = |cached: Cached| cached != Cached::default();
        self.cached_pages += u64::from(is_cached(value));
        self.cached_pages -= u64::from(is_cached(before));
        // A page begins a run unless it continues the page before.
        let left = at.checked_sub(1).map(|left| self.cached.get(left));
        let left = left
            .filter(|left| is_cached(*left))
            .and_then(|left| left.after(1));
        let begins = |before: Option<Cached>, page| is_cached(page) && before != Some(page);
        let right = at
            .checked_add(1)
            .map_or(Cached::default(), |right| self.cached.get(right));
        let follows = |page| Some(page).filter(|page| is_cached(*page))?.after(1);
        let begun = |page| u64::from(begins(left, page)) + u64::from(begins(follows(page), right));
        self.cached_runs += begun(value);
        self.cached_runs -= begun(before);
    }

    fn note_change(&mut self, file: FileNumber, page: u32, cached: bool) {
        let last = self
            .changes
            .last_mut()
            .filter(|last| (last.file, last.pages.end, last.cached) == (file, page, cached));
        match last {
            Some(last) => last.pages.end += 1,
            None => self.changes.push(Change {
                file,
                pages: page..page.saturating_add(1),
                cached,
            }),
        }
    }

    /// Returns the changes of the cached pages since the last call, in order. A page that moved in
    /// guest memory is no change.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Returns the ranges of pages of `file` that the VM caches, in ascending order.
    #[must_use]
    pub fn cached_ranges(&self, file: FileNumber) -> Vec<Range<u32>> {
        self.places.ranges(file)
    }

    /// Sets which cached pages of a file range have a match: the page store holds them, or another
    /// file of the trust domain has them. `matched` returns one bit for each of the 64 pages of a
    /// piece.
    pub fn set_matched(
        &mut self,
        file: FileNumber,
        pages: Range<u32>,
        mut matched: impl FnMut(u32) -> u64,
    ) {
        let mut piece = None;
        for run in self.places.runs_in(file, pages) {
            for (page, place) in (run.at..run.at + run.pages).zip(run.value..) {
                let (_, bits) = match piece {
                    Some(known @ (number, _)) if number == page / PIECE => known,
                    _ => *piece.insert((page / PIECE, matched(page / PIECE))),
                };
                self.matched.set(place - 1, bits >> (page % PIECE) & 1 == 1);
            }
        }
    }

    /// Returns the number of cached pages that have a match ([`VmTable::set_matched`]), and how
    /// many of them are shared: they show a page of the page store or of a snapshot's image.
    #[must_use]
    pub fn count_matched(&self) -> (u64, u64) {
        let shared = self.shared.words();
        let template = self.view.words().zip(self.foldable.words());
        let words = self.matched.words().zip(shared).zip(template);
        words.fold(
            (0, 0),
            |(all, folded), ((matched, shared), (view, foldable))| {
                let count = |bits: u64| u64::from(bits.count_ones());
                let shared = shared | view & !foldable;
                (all + count(matched), folded + count(matched & shared))
            },
        )
    }

    /// Returns the guest page that caches page `page` of `file`; `None` if no page does.
    #[must_use]
    pub fn place(&self, file: FileNumber, page: u32) -> Option<Index> {
        self.places.get(file, page)
    }

    /// Returns, for the pages `range` of a piece of `file`, the guest pages (each plus one) that
    /// cache them and may be folded. A value of 0 stands for a page that is not cached, is dirty,
    /// or was found to differ from the page store. Returns `None` if all values are 0.
    #[must_use]
    pub fn usable(&self, file: FileNumber, piece: u32, range: &Range<usize>) -> Option<Piece> {
        let places = self.places.piece(file, piece)?;
        let mut usable = [0; PIECE as usize];
        let mut any = 0;
        for (to, &place) in usable[range.clone()].iter_mut().zip(&places[range.clone()]) {
            let is_usable =
                place != 0 && !self.dirty.has(place - 1) && !self.refused.has(place - 1);
            *to = if is_usable { place } else { 0 };
            any |= *to;
        }
        (any != 0).then_some(usable)
    }

    /// Returns the numbers of the pieces (64 pages each) of `file` that have cached pages, in
    /// ascending order.
    #[must_use]
    pub fn pieces(&self, file: FileNumber) -> Vec<u32> {
        self.places.pieces(file, 0..u32::MAX)
    }

    /// Returns the number of guest pages that cache a file page.
    #[must_use]
    pub const fn cached_pages(&self) -> u64 {
        self.cached_pages
    }

    /// Returns the number of runs of cached pages: pages that are consecutive in the tables and in
    /// the file.
    #[must_use]
    pub const fn cached_runs(&self) -> u64 {
        self.cached_runs
    }

    /// Returns the file, and the page of the file, that guest page `at` caches; `None` if it caches
    /// none.
    #[must_use]
    pub fn cached(&self, at: Index) -> Option<(FileNumber, u32)> {
        let Cached { file, page } = self.cached.get(at);
        Some((file.checked_sub(1)?, page))
    }

    /// Marks the cached pages of a file range as dirty (written, but not yet written back to disk)
    /// or clean. The cost depends on the number of cached pages, not on the length of the range.
    pub fn set_dirty(&mut self, file: FileNumber, pages: Range<u32>, dirty: bool) {
        for at in self.places_in(file, pages) {
            self.dirty.set(at, dirty);
            if dirty {
                self.foldable.set(at, true);
            } else {
                self.refused.set(at, false);
            }
        }
    }

    fn places_in(&self, file: FileNumber, pages: Range<u32>) -> Vec<Index> {
        let runs = self.places.runs_in(file, pages);
        runs.flat_map(|run| (run.value - 1)..(run.value - 1 + run.pages))
            .collect()
    }

    /// Returns the numbers of the pieces (64 pages each) in a file range that have cached pages, in
    /// ascending order.
    #[must_use]
    pub fn pieces_in(&self, file: FileNumber, pages: Range<u32>) -> Vec<u32> {
        self.places.pieces(file, pages)
    }

    /// Returns whether guest page `at` is dirty: the guest has written it, and has not yet written
    /// it back to disk.
    #[must_use]
    pub fn is_dirty(&self, at: Index) -> bool {
        self.dirty.has(at)
    }

    /// Records that the bytes of guest page `at` differ from the page store's, so that the page is
    /// not tried again. A new hint for the page clears this mark.
    pub fn refuse(&mut self, at: Index) {
        self.refused.set(at, true);
    }

    /// Allows pages of a file range that were found to differ from the page store to be tried
    /// again, because their bytes have been read from disk since.
    pub fn settle(&mut self, file: FileNumber, pages: Range<u32>) {
        for at in self.places_in(file, pages) {
            self.refused.set(at, false);
        }
    }

    /// Marks guest page `at` as part of the present batch. Returns `false` if it was marked
    /// already.
    pub fn plan(&mut self, at: Index) -> bool {
        let new = !self.planned.has(at);
        self.planned.set(at, true);
        new
    }

    /// Clears the mark that guest page `at` is part of a batch.
    pub fn unplan(&mut self, at: Index) {
        self.planned.set(at, false);
    }

    /// Returns whether guest page `at` was found to differ from the page store.
    #[must_use]
    pub fn is_refused(&self, at: Index) -> bool {
        self.refused.has(at)
    }

    /// Returns the store page that guest page `at` maps; `None` if it maps none.
    #[must_use]
    pub fn mapped(&self, at: Index) -> Option<Mapped> {
        let store_page = self.mapped.get(at).checked_sub(1)?;
        Some(Mapped {
            store_page,
            shared: self.shared.has(at),
        })
    }

    /// Returns the runs of cached pages: for each, the first guest page, the number of pages, the
    /// file, and the first page of the file.
    pub fn all_cached(&self) -> impl Iterator<Item = (Index, u32, FileNumber, u32)> + '_ {
        let runs = self.cached.runs();
        runs.map(|Run { at, pages, value }| (at, pages, value.file - 1, value.page))
    }

    /// Returns, for each guest page, the store page that it maps, plus one; 0 for none.
    #[must_use]
    pub fn all_mapped(&self) -> Vec<u32> {
        let mut all = vec![0; self.pages() as usize];
        for run in self.mapped.runs() {
            let of_run = all[run.at as usize..].iter_mut().zip(run.value..);
            of_run
                .take(run.pages as usize)
                .for_each(|(to, store_page)| *to = store_page);
        }
        all
    }

    /// Returns the runs of pages that map the page store: for each, the first guest page, the
    /// number of pages, and the first store page.
    pub fn mapped_runs(&self) -> impl Iterator<Item = (Index, u32, u32)> + '_ {
        let runs = self.mapped.runs();
        runs.map(|Run { at, pages, value }| (at, pages, value - 1))
    }

    /// Returns which of the 64 guest pages from page `64 * number` on map the page store and had a
    /// private copy at the last sync.
    #[must_use]
    pub fn copied(&self, number: usize) -> u64 {
        self.copied.word(number)
    }

    /// Records which guest pages have private copies: `own` has one bit for each guest page. The
    /// other pages that map the page store still show it. Returns the number of pages that map the
    /// page store, and how many of them have private copies.
    pub fn set_copied(&mut self, own: &[u64]) -> (u64, u64) {
        let mut mapped = vec![0_u64; own.len()];
        for run in self.mapped.runs() {
            for at in run.at..run.at + run.pages {
                if let Some(word) = mapped.get_mut(at as usize / 64) {
                    *word |= 1 << (at % 64);
                }
            }
        }
        let (mut pages, mut copied) = (0, 0);
        for (number, (mapped, own)) in mapped.into_iter().zip(own).enumerate() {
            self.shared.set_word(number, mapped & !own);
            self.copied.set_word(number, mapped & own);
            pages += u64::from(mapped.count_ones());
            copied += u64::from((mapped & own).count_ones());
        }
        (pages, copied)
    }

    /// Sets the store page that guest page `at` maps, or records that it maps none (`None`).
    pub fn set_mapped(&mut self, at: Index, mapped: Option<Mapped>) {
        self.mapped.set(at, mapped.map_or(0, |m| m.store_page + 1));
        self.shared.set(at, mapped.is_some_and(|m| m.shared));
        self.copied.set(at, false);
        if mapped.is_some() {
            self.view.set(at, false);
            // The page would count twice as debt.
            self.zero.set(at, false);
        }
    }

    /// Sets which guest pages are in *views*: private mappings of the files of a snapshot (its RAM
    /// image and disks).
    pub fn set_views(&mut self, views: impl Iterator<Item = Range<Index>>) {
        self.view = Bits::of(self.pages(), views);
    }

    /// Sets for which guest pages the snapshot's files hold data. The other pages of views are in
    /// holes, which use no memory.
    pub fn set_image_data(&mut self, data: impl Iterator<Item = Range<Index>>) {
        self.image_data = Bits::of(self.pages(), data);
    }

    /// Returns the number of guest pages that still show data of the snapshot's files, without a
    /// private copy. `own` has one bit for each guest page, which is set if the page has a private
    /// copy.
    #[must_use]
    pub fn count_shared_views(&self, own: &[u64]) -> u64 {
        let views = self.view.words().zip(self.image_data.words());
        own.iter()
            .zip(views)
            .map(|(own, (view, data))| u64::from((view & data & !own).count_ones()))
            .sum()
    }

    /// Sets which guest pages may be folded (one bit for each page). Returns whether a cached page
    /// in a view (a private mapping of a snapshot's file) may be folded now that could not be
    /// folded before.
    pub fn set_foldable(&mut self, bits: &[u64]) -> bool {
        let mut any = false;
        for ((number, word), &now) in (0..).step_by(64).zip(0..).zip(bits) {
            let mut new = now & !self.foldable.word(word) & self.view.word(word);
            while new != 0 && !any {
                any = self.cached(number + new.trailing_zeros()).is_some();
                new &= new - 1;
            }
            self.foldable.set_word(word, now);
        }
        any
    }

    /// Returns the number of guest pages in views (private mappings of a snapshot's files), and how
    /// many of them have private copies. `own` has one bit for each guest page, which is set if the
    /// page has a private copy.
    #[must_use]
    pub fn count_views(&self, own: &[u64]) -> (u64, u64) {
        let words = own.iter().zip(self.view.words());
        words.fold((0, 0), |(all, written), (own, view)| {
            let count = |bits: u64| u64::from(bits.count_ones());
            (all + count(view), written + count(own & view))
        })
    }

    /// Returns whether guest page `at` is in a view (a private mapping of a snapshot's file). Such
    /// a page can be frozen only by write protection or by a stop of the VM.
    #[must_use]
    pub fn is_in_view(&self, at: Index) -> bool {
        self.view.has(at)
    }

    /// Returns whether guest page `at` still belongs to its snapshot: the page is in memory once
    /// for all VMs that run from this snapshot, or not at all.
    #[must_use]
    pub fn is_template(&self, at: Index) -> bool {
        self.view.has(at) && !self.foldable.has(at)
    }

    /// Records that guest page `at` was discarded because it held only zeroes.
    pub fn set_zero(&mut self, at: Index) {
        self.zero.set(at, true);
    }

    /// Removes from the set of discarded zero pages those that are in memory again. `own` has one
    /// bit for each guest page, which is set if the page is in memory. Returns the number of zero
    /// pages left.
    pub fn keep_zero(&mut self, own: &[u64]) -> u64 {
        let mut left = 0;
        for (number, own) in own.iter().enumerate() {
            let zero = self.zero.word(number) & !own;
            self.zero.set_word(number, zero);
            left += u64::from(zero.count_ones());
        }
        left
    }

    /// Begins an inventory, in which the agent reports all pages of the guest's page cache again.
    /// At the inventory's end, cached pages that it did not report are removed from the table.
    pub fn inventory_begin(&mut self) {
        self.seen = Some(Bits::new(self.pages()));
    }

    /// Ends an inventory: removes the cached pages that the agent did not report in it.
    pub fn inventory_end(&mut self) {
        let Some(seen) = self.seen.take() else { return };
        let pages = self
            .cached
            .runs()
            .flat_map(|run| run.at..run.at + run.pages);
        let missing: Vec<Index> = pages.filter(|&at| !seen.has(at)).collect();
        for at in missing {
            self.uncache(at);
        }
        self.cached.pack_short_runs(true);
    }

    /// Removes all cached pages from the table, because a new agent session numbers its files anew.
    /// The records of mapped store pages stay.
    pub fn forget_cached(&mut self) {
        let total = self.pages();
        self.cached = Table::new(total);
        self.places = Places::default();
        self.cached_pages = 0;
        self.cached_runs = 0;
        self.changes = Vec::new();
        self.matched = Bits::new(total);
        self.dirty = Bits::new(total);
        self.refused = Bits::new(total);
        self.seen = None;
    }

    /// Packs the parts of the tables that have short runs and were not changed since the last call.
    pub fn pack_unchanged(&mut self) {
        self.cached.pack_short_runs(false);
        self.mapped.pack_short_runs(false);
    }

    /// Returns whether parts of the tables with short runs are unpacked.
    #[must_use]
    pub const fn has_unpacked(&self) -> bool {
        self.cached.has_unpacked() || self.mapped.has_unpacked()
    }

    /// Returns the memory use of the tables in bytes.
    #[must_use]
    pub fn own_bytes(&self) -> u64 {
        let sets = [
            &self.shared,
            &self.copied,
            &self.dirty,
            &self.refused,
            &self.planned,
            &self.matched,
        ];
        let more = [&self.zero, &self.view, &self.image_data, &self.foldable];
        let sets = sets.into_iter().chain(more).map(Bits::own_bytes);
        (self.cached.own_bytes()
            + self.mapped.own_bytes()
            + self.places.own_bytes()
            + sets.sum::<usize>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cached_pages::PageRun;
    use memfold_vm::{RamBlock, RamSlot};

    fn table() -> VmTable {
        let hva = Hva(0x7000_0000_0000);
        VmTable::new(RamLayout {
            blocks: vec![RamBlock {
                name: "ram0".into(),
                hva,
                pages: 2048,
            }],
            slots: vec![
                RamSlot {
                    pfn: Pfn(0),
                    pages: 1024,
                    hva,
                    block: 0,
                },
                RamSlot {
                    pfn: Pfn(1 << 20),
                    pages: 1024,
                    hva: hva.add_pages(1024),
                    block: 0,
                },
            ],
        })
    }

    #[test]
    fn page_indexes_of_guest_ram_continue_across_memory_slots() {
        let t = table();
        assert_eq!(t.index_of(Pfn(5)), Some(5));
        assert_eq!(t.index_of(Pfn(1024)), None);
        assert_eq!(t.index_of(Pfn((1 << 20) + 3)), Some(1027));
        assert_eq!(t.hva(1027), Some(Hva(0x7000_0000_0000).add_pages(1027)));
        assert_eq!(
            t.index_at(Hva(0x7000_0000_0000).add_pages(1027)),
            Some(1027)
        );
        assert!(t.adjacent(5, 6));
        assert!(
            !t.adjacent(1023, 1024),
            "the next slot is elsewhere in guest memory"
        );
    }

    #[test]
    fn the_tables_of_a_vm_hold_at_most_one_file_page_for_a_memory_page_and_vice_versa() {
        let mut t = table();
        assert!(t.cache(7, 1, 100));
        assert!(t.cache(7, 2, 5));
        assert_eq!((t.place(1, 100), t.place(2, 5)), (None, Some(7)));
        assert!(t.cache(9, 2, 5));
        assert_eq!(
            (t.cached(7), t.place(2, 5), t.cached_pages()),
            (None, Some(9), 1)
        );
        t.uncache(9);
        assert_eq!((t.cached_pages(), t.places.len()), (0, 0));
    }

    #[test]
    fn a_copy_of_the_table_of_cached_pages_lists_the_runs_at_the_time_of_the_copy() {
        let mut t = table();
        // These are the last two pages of a slot and the first of the next slot, which is at
        // another place in guest memory.
        for (at, page) in [
            (1022, 8),
            (1023, 9),
            (1024, 10),
            (1030, u32::MAX),
            (1031, 0),
        ] {
            assert!(t.cache(at, 3, page));
        }
        assert!(t.cache(1025, 4, 11) && t.cache(2047, 5, 0));
        let copy = t.copy_cached();
        t.forget_cached();
        let run = |at, pages, file, page| PageRun {
            hva: t.hva(at).unwrap(),
            pages,
            file,
            page,
        };
        let runs: Vec<PageRun> = copy.runs().collect();
        let wanted = [
            run(1022, 2, 3, 8),
            run(1024, 1, 3, 10),
            run(1025, 1, 4, 11),
            run(1030, 1, 3, u32::MAX),
            run(1031, 1, 3, 0),
            run(2047, 1, 5, 0),
        ];
        assert_eq!(runs, wanted);
        assert_eq!(t.copy_cached().runs().count(), 0);
    }

    #[test]
    fn a_discarded_zero_page_that_is_folded_counts_only_as_folded() {
        let mut t = table();
        t.set_zero(70);
        t.set_zero(71);
        let mapped = Mapped {
            store_page: 5,
            shared: true,
        };
        t.set_mapped(70, Some(mapped));
        assert_eq!(t.keep_zero(&[0; 32]), 1);
        assert_eq!(t.set_copied(&[0; 32]), (1, 0));
    }

    #[test]
    fn cached_pages_missing_in_a_full_list_from_the_agent_are_forgotten() {
        let mut t = table();
        t.cache(1, 1, 1);
        t.cache(2, 1, 2);
        t.inventory_begin();
        t.cache(2, 1, 2);
        t.inventory_end();
        assert_eq!((t.place(1, 1), t.place(1, 2)), (None, Some(2)));
    }

    #[test]
    fn hints_of_a_lying_agent_cannot_grow_the_tables_beyond_the_size_of_its_ram() {
        let mut t = table();
        let taken = (0..100_000_u32)
            .filter(|&n| t.cache(n % 2048, n, 0))
            .count();
        assert!(t.places.len() <= 2048 && taken > 0);
        let before = t.own_bytes();
        t.set_dirty(1, 0..u32::MAX, true);
        // One part of the set of dirty pages.
        assert!(t.own_bytes() <= before + 512, "{before}, {}", t.own_bytes());
    }
}

//! Format of the file for copies before write ([`KeepPast`]): the bytes that pages had before the
//! VM wrote to them.
//!
//! ```text
//!   page 0            u32 slots used | u32 errno: why nothing is kept any more, 0 if all is
//!   from page 1       table: a u32 for each page of the order's ranges, one range behind the other
//!   from the next     slots: a page each
//! ```
//! All numbers are in the host's byte order. The daemon makes the file (a memfd, sealed against
//! shrinking), with the pages of its table allocated and as many slots as it allows. Both processes
//! map the first part and change table entries by compare-and-exchange:
//!
//! | entry | meaning | set by |
//! |---|---|---|
//! | 0 | the page is protected and unchanged | |
//! | n | the old bytes are in slot n - 1; the VM may have written to the page since | library, before it lifts the protection |
//! | [`DONE`] | the page is not needed: the daemon has read it, or never wanted it | daemon |
//!
//! So the daemon reads a page in memory and then changes its entry from 0 to [`DONE`]. If that
//! succeeds, the bytes read are the old ones.
//!
//! [`KeepPast`]: crate::library::Order::KeepPast

/// Entry of a page that is not needed.
pub const DONE: u32 = u32::MAX;

/// Word of the file with the number of used slots.
pub const USED_WORD: u64 = 0;

/// Word of the file with the `errno` that ended the copy: `ESTALE` if a page had lost its
/// protection, `ECANCELED` if the order or its connection ended.
pub const ERRNO_WORD: u64 = 1;

/// Words in a page.
const PAGE_WORDS: u64 = 1024;

/// Layout of a file for a number of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pages: u64,
}

impl Layout {
    /// Creates the layout for ranges of `pages` pages in total; `None` if that is zero, or more
    /// than entries can number.
    #[must_use]
    pub const fn new(pages: u64) -> Option<Self> {
        if pages == 0 || pages >= DONE as u64 {
            return None;
        }
        Some(Self { pages })
    }

    /// Returns the word that is the entry of page `index`.
    #[must_use]
    pub const fn entry_word(self, index: u64) -> u64 {
        PAGE_WORDS + index
    }

    /// Returns the number of pages before the slots, which both processes map.
    #[must_use]
    pub const fn front_pages(self) -> u64 {
        1 + self.pages.div_ceil(PAGE_WORDS)
    }

    /// Returns the page of the file that is slot `slot`.
    #[must_use]
    pub const fn slot_page(self, slot: u32) -> u64 {
        self.front_pages() + slot as u64
    }

    /// Returns the length of the file in pages if it has a slot for every page. It may be shorter;
    /// then the copy fails when the slots are used up.
    #[must_use]
    pub const fn file_pages(self) -> u64 {
        self.front_pages() + self.pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_table_and_the_page_slots_do_not_overlap() {
        for pages in [1, 1023, 1024, 1025, 1 << 20] {
            let layout = Layout::new(pages).unwrap();
            let last_entry = layout.entry_word(pages - 1);
            assert!(USED_WORD < ERRNO_WORD && ERRNO_WORD < layout.entry_word(0));
            assert!(last_entry / PAGE_WORDS < layout.slot_page(0), "{pages}");
            let last = u32::try_from(pages - 1).unwrap();
            assert_eq!(layout.slot_page(last) + 1, layout.file_pages());
        }
        assert_eq!(Layout::new(0), None);
        assert_eq!(Layout::new(u64::from(DONE)), None);
    }
}

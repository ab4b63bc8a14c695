//! The file in which memory's past is kept: what pages held before the VM wrote to them
//! ([`KeepPast`]).
//!
//! ```text
//!   page 0            u32 slots used | u32 errno: why nothing is kept any more, 0 if all is
//!   from page 1       table: a u32 for each page of the order's ranges, one range behind the other
//!   from the next     slots: a page each
//! ```
//! All in the host's byte order. The daemon makes the file (a memfd, sealed against shrinking),
//! with the pages of its table allocated and as many slots as it allows; both processes map the
//! front and change table entries by compare-and-exchange:
//!
//! | entry | means | who sets it |
//! |---|---|---|
//! | 0 | the page is protected, and is as it was | |
//! | n | its bytes of then are in slot n - 1; the VM may have written to it since | library, before it lifts the protection |
//! | [`DONE`] | nobody needs it: the daemon has read it, or never wanted it | daemon |
//!
//! So a page that was read, and whose entry can be changed from 0 to [`DONE`] afterwards, was read
//! as it was.
//!
//! [`KeepPast`]: crate::library::Order::KeepPast

/// Entry of a page that nobody needs.
pub const DONE: u32 = u32::MAX;

/// Word of the file that counts used slots.
pub const USED_WORD: u64 = 0;

/// Word of the file with the `errno` that ended it: `ESTALE` a page was not protected any more,
/// `ECANCELED` the order or its connection ended.
pub const ERRNO_WORD: u64 = 1;

/// Words in a page.
const PAGE_WORDS: u64 = 1024;

/// Where things lie in a file for so many pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pages: u64,
}

impl Layout {
    /// The layout for ranges of `pages` pages in all; `None` if that is none, or more than entries
    /// can number.
    #[must_use]
    pub const fn new(pages: u64) -> Option<Self> {
        if pages == 0 || pages >= DONE as u64 {
            return None;
        }
        Some(Self { pages })
    }

    /// The word of the entry of page `index`.
    #[must_use]
    pub const fn entry_word(self, index: u64) -> u64 {
        PAGE_WORDS + index
    }

    /// Pages in front of the slots: what both processes map.
    #[must_use]
    pub const fn front_pages(self) -> u64 {
        1 + self.pages.div_ceil(PAGE_WORDS)
    }

    /// The page of the file that is slot `slot`.
    #[must_use]
    pub const fn slot_page(self, slot: u32) -> u64 {
        self.front_pages() + slot as u64
    }

    /// Length of the file in pages if there is a slot for every page. It may be shorter: then
    /// keeping ends with the last slot.
    #[must_use]
    pub const fn file_pages(self) -> u64 {
        self.front_pages() + self.pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_and_slots_do_not_touch() {
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

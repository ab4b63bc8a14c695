//! Format of a file through which a snapshot of a running VM gets the old bytes of its memory: the
//! bytes that pages had before the VM wrote to them. memfold's library in QEMU fills the file
//! ([`KeepPast`]); the daemon reads it.
//!
//! ```text
//!   page 0            u32 number of used slots | u32 errno that ended the copy; 0 while it goes on
//!   from page 1       table: a u32 entry for each page of the order's ranges, range after range
//!   after the table   slots: a page each
//! ```
//! All numbers are in the host's byte order. The daemon creates the file (a memfd, sealed against
//! shrinking), allocates the pages of the table, and limits the number of slots by the file's
//! length. Both processes map the pages before the slots, and change table entries by
//! compare-and-exchange:
//!
//! | entry | meaning | set by |
//! |---|---|---|
//! | 0 | the page is protected and unchanged | |
//! | n | the old bytes are in slot n - 1; the VM may have written to the page since | library, before it lifts the protection |
//! | [`DONE`] | the page needs no copy: the daemon has read the page, or does not want it | daemon |
//!
//! The daemon reads a page in memory and then changes the page's entry from 0 to [`DONE`]. If the
//! change succeeds, the bytes that the daemon read are the old ones.
//!
//! [`KeepPast`]: crate::library::Order::KeepPast

/// Table entry of a page that needs no copy: the daemon has read the page, or does not want it.
pub const DONE: u32 = u32::MAX;

/// Index, in a file for copies before write, of the `u32` word with the number of used slots.
pub const USED_WORD: u64 = 0;

/// Index, in a file for copies before write, of the `u32` word with the `errno` that ended the
/// copy: `ESTALE` if a page had lost its write protection, `ECANCELED` if the order or its
/// connection ended.
pub const ERRNO_WORD: u64 = 1;

/// Number of `u32` words in a page.
const PAGE_WORDS: u64 = 1024;

/// Layout of a file for copies before write: positions of its table and slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pages: u64,
}

impl Layout {
    /// Creates the layout for ranges of `pages` pages in total. Returns `None` if `pages` is zero
    /// or too large for the numbers in table entries.
    #[must_use]
    pub const fn new(pages: u64) -> Option<Self> {
        if pages == 0 || pages >= DONE as u64 {
            return None;
        }
        Some(Self { pages })
    }

    /// Returns the index in the file of the `u32` word that is the table entry of page `index`,
    /// counted through all ranges of the order.
    #[must_use]
    pub const fn entry_word(self, index: u64) -> u64 {
        PAGE_WORDS + index
    }

    /// Returns the number of file pages before the slots: the header and the table. Both processes
    /// map these pages.
    #[must_use]
    pub const fn front_pages(self) -> u64 {
        1 + self.pages.div_ceil(PAGE_WORDS)
    }

    /// Returns the index in the file of the page that is slot number `slot`, from 0.
    #[must_use]
    pub const fn slot_page(self, slot: u32) -> u64 {
        self.front_pages() + slot as u64
    }

    /// Returns the length in pages of a file with a slot for every page of the ranges. A shorter
    /// file is allowed; then the copy fails when the slots are used up.
    #[must_use]
    pub const fn file_pages(self) -> u64 {
        self.front_pages() + self.pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_copy_file_of_a_live_save_the_entry_table_and_the_page_slots_do_not_overlap() {
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

//! Types for addresses: guest-physical addresses, virtual addresses of a process, and page numbers
//! in the page store's file.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{PAGE_SIZE, PageCount};

macro_rules! address {
    ($(#[$doc:meta])* $name:ident, $unit:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// Returns the address that is `pages` pages after this one; `None` if that exceeds 64
            /// bits.
            #[must_use]
            pub const fn checked_add_pages(self, pages: PageCount) -> Option<Self> {
                let Some(step) = pages.0.checked_mul($unit) else { return None };
                match self.0.checked_add(step) {
                    Some(v) => Some(Self(v)),
                    None => None,
                }
            }

            /// Returns the address that is `pages` pages after this one, or the largest 64-bit
            /// number if that exceeds 64 bits.
            #[must_use]
            pub const fn add_pages(self, pages: u64) -> Self {
                Self(self.0.saturating_add(pages.saturating_mul($unit)))
            }

            /// Returns the number of whole pages from `start` to this address; 0 if this address is
            /// before `start`.
            #[must_use]
            pub const fn pages_since(self, start: Self) -> u64 {
                self.0.saturating_sub(start.0) / $unit
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address! {
    /// A guest-physical address in bytes.
    Gpa, PAGE_SIZE
}
address! {
    /// A virtual address in bytes, in one process: a QEMU process, unless a doc names another
    /// process.
    Hva, PAGE_SIZE
}
address! {
    /// A guest page frame number: a guest-physical address divided by [`PAGE_SIZE`].
    Pfn, 1
}
address! {
    /// The number of a page in a page-store file: file offset divided by [`PAGE_SIZE`].
    StorePage, 1
}

impl Gpa {
    /// Returns the number of the page frame that contains this guest-physical address.
    #[must_use]
    pub const fn pfn(self) -> Pfn {
        Pfn(self.0 / PAGE_SIZE)
    }
}

impl Pfn {
    /// Returns the guest-physical address at which the page frame begins; `None` if that exceeds 64
    /// bits.
    #[must_use]
    pub const fn gpa(self) -> Option<Gpa> {
        match self.0.checked_mul(PAGE_SIZE) {
            Some(v) => Some(Gpa(v)),
            None => None,
        }
    }
}

impl StorePage {
    /// Returns the offset of this page in the page-store file, in bytes.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.0 * PAGE_SIZE
    }
}

impl Hva {
    /// Returns whether the address is the first of a page, a multiple of [`PAGE_SIZE`].
    #[must_use]
    pub const fn is_page_aligned(self) -> bool {
        self.0 % PAGE_SIZE == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_address_converts_to_its_page_frame_number_and_back() {
        assert_eq!(Gpa(0x1234_5678).pfn(), Pfn(0x12345));
        assert_eq!(Pfn(0x12345).gpa(), Some(Gpa(0x1234_5000)));
        assert_eq!(Pfn(u64::MAX).gpa(), None);
    }

    #[test]
    fn adding_pages_to_an_address_adds_whole_pages_in_every_address_type() {
        assert_eq!(Hva(0x1000).add_pages(2), Hva(0x3000));
        assert_eq!(Pfn(1).add_pages(2), Pfn(3));
        assert_eq!(Hva(0x5000).pages_since(Hva(0x3000)), 2);
        assert_eq!(Hva(u64::MAX).checked_add_pages(PageCount(1)), None);
    }
}

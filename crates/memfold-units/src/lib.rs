//! Newtypes for pages and addresses, so that guest-physical, host-virtual and page-store addresses
//! cannot be confused.
//!
//! The crate does no I/O and has no state. Other crates use a bare `u64` as an address only for a
//! system call or in a message.
//!
//! | type | unit | space |
//! |---|---|---|
//! | [`Gpa`] | bytes | guest-physical addresses of one VM |
//! | [`Pfn`] | pages | page frames of one VM |
//! | [`Hva`] | bytes | virtual addresses of one process (QEMU) |
//! | [`StorePage`] | pages | offset in one page-store file |
//! | [`PageCount`], [`ByteSize`] | pages, bytes | amounts |

mod address;
mod amount;

pub use address::{Gpa, Hva, Pfn, StorePage};
pub use amount::{ByteSize, PageCount, ParseByteSizeError};

/// Size of a base page in bytes. memfold runs on `x86_64`, where it is always 4096.
pub const PAGE_SIZE: u64 = 4096;

/// [`PAGE_SIZE`] as `usize`, for buffer sizes.
pub const PAGE_BYTES: usize = 4096;

/// Number of base pages in a transparent huge page (2 MiB on `x86_64`).
pub const HUGE_PAGE_PAGES: u64 = 512;

//! Between a VM's QEMU and those who lend it memory: a small process on the borrower's host, one
//! for each lent part of a swap disk.
//!
//! ```text
//!   QEMU --NBD, Unix socket--> relay (sums) --NBD--> lender's export          it believes no lender:
//!                                           --NBD--> another's (stripes)      what is read is what was written, or an error
//! ```
//! It is this program again, `memfold relay`, so that the daemon may die: whoever started it gave
//! it its [`Orders`] and has heard that it is ready. It serves one client, in whose life it has one
//! connection to each lender, and ends with the first of them that ends. So nobody has to end it:
//! who wants it gone cuts its client's connection. Killed at any instant it is a lender that died.
//!
//! Its own pages are locked: it stands in the way of memory that a guest waits for.

pub mod asks;
mod buffer;
pub mod compare;
mod ended;
mod orders;
mod program;
pub mod serve;
pub mod start;
pub mod stream;
pub mod stripes;
pub mod sums;

pub use ended::{Ended, Why};
pub use orders::{Orders, Said};
pub use program::main;

//! The relay between a VM's QEMU and its lenders: a small process on the borrower's host, one for
//! each lent part of a swap disk. It verifies every block that a lender returns.
//!
//! ```text
//!   QEMU --NBD, Unix socket--> relay (sums) --NBD--> lender's export          lenders are not trusted: a read
//!                                           --NBD--> another's (stripes)      returns the bytes written, or an error
//! ```
//! The relay is this program again (`memfold relay`), as a process that outlives the daemon. Its
//! starter passes it its [`Orders`] and waits until it reports that it is ready. It serves one
//! client, and has one connection to each lender. It ends when the first of these connections ends,
//! so cutting its client's connection ends it. To QEMU, a killed relay looks
//! like a dead lender.
//!
//! The relay's pages are locked, because guests wait for the memory that it serves.

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

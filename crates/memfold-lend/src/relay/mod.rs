//! The relay between a VM's QEMU and its lenders: a small process on the borrower's host, one for
//! each copy of a swap disk that is in lenders' memory. The relay keeps a checksum of each block
//! that QEMU writes, and compares every block that a lender returns. So a read returns the bytes
//! that were written, or an error.
//!
//! ```text
//!   QEMU --NBD, Unix socket--> relay --NBD--> export of the lender
//!                                    --NBD--> export of a second lender, if blocks alternate (stripes)
//! ```
//!
//! The relay is the program `memfold` again (`memfold relay`), as a process that outlives the
//! daemon. The daemon sends the relay its [`Orders`] and waits until the relay reports that it is
//! ready. The relay serves one client, and has one connection to each lender. The relay ends when
//! any of its connections ends; so closing the client's connection ends the relay. To QEMU, a
//! killed relay looks like a dead lender.
//!
//! The relay's pages are locked in memory, because guests wait for the memory that the relay
//! serves.

pub mod asks;
mod buffer;
pub mod compare;
mod messages;
mod program;
pub mod serve;
pub mod start;
pub mod stream;
pub mod stripes;
pub mod sums;

pub use messages::{Ended, Orders, Said, Why};
pub use program::main;

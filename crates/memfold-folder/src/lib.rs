//! What folds: carries out orders on the RAM of its own process. `memfold-qemu` has it work inside
//! QEMU.
//!
//! ```text
//!   daemon                      QEMU process
//!   +--------+  Unix socket   +------------------------------------------------------------+
//!   | decides| -------------> | serve -> Folder -> fold | release | zero | map              |
//!   +--------+ <------------- |            |                                               |
//!                 replies     |            +-- ram      blocks, what of them is folded      |
//!                             |            +-- stores   read-only windows on page stores    |
//!                             |            +-- staging  where frozen pages wait             |
//!                             |            +-- past     copies before writes, for snapshots |
//!                             | madvise (interposed) -> discard                             |
//!                             +------------------------------------------------------------+
//! ```
//!
//! Invariants, each held by the module named:
//! 1. At no instant does a guest read zeroes or old bytes: pages are frozen while their mapping is
//!    exchanged (`freeze`).
//! 2. Whatever happens while pages are frozen (an error, a panic, the daemon's death), they go
//!    back: a guard's `drop` (`freeze`).
//! 3. Between freeze and thaw there is no allocation, no lock, no socket and no panic path (`fold`,
//!    `release`, `zero`).
//! 4. No page is replaced before its frozen bytes were compared with the store, within the store's
//!    size (`fold`, `stores`).
//! 5. What QEMU discards reads as zeroes afterwards, folded or not (`discard`).
//! 6. What is kept of the past is copied before the write that waits for it goes on, or nothing is
//!    kept any more (`copy_before_write`).
//!
//! The same [`Folder`] works in any process on memory of its own: the stress tests and
//! `memfold bench fold` use it so.

/// Writes a line to standard error, which is a log here. `eprintln!` panics where that log can't be
/// written.
#[macro_export]
macro_rules! say {
    ($($words:tt)*) => {{
        // Nobody could be told.
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{}\n", format_args!($($words)*)));
    }};
}

mod bitmap;
mod copy_before_write;
mod discard;
mod fold;
mod folder;
mod freeze;
mod monitor;
mod ram;
mod release;
pub mod serve;
mod state;
mod stores;
mod zero;

pub use folder::Folder;
pub use monitor::Monitor;

//! Carries out the daemon's orders on the RAM of its own process: folds, releases, drops zeroes,
//! maps files. `memfold-qemu` runs it inside QEMU.
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
//! Invariants, each kept by the module named:
//! 1. A guest never reads zeroes or old bytes in the meantime: pages are frozen while their mapping
//!    is exchanged (`freeze`).
//! 2. Frozen pages always go back, even after an error, a panic or the daemon's death: a guard's
//!    `drop` does it (`freeze`).
//! 3. Between freeze and thaw there is no allocation, no lock, no socket access and no possible
//!    panic (`fold`, `release`, `zero`).
//! 4. No page is replaced before its frozen bytes were compared with the store, within the size of
//!    the store's file (`fold`, `stores`).
//! 5. Memory that QEMU discards reads as zeroes afterwards, folded or not (`discard`).
//! 6. Old bytes for a snapshot are copied before the write to their page continues. If one copy
//!    fails, the whole copy is marked as failed (`copy_before_write`).
//!
//! The same [`Folder`] works in any process, on memory of that process: the stress tests and
//! `memfold bench fold` use it so.

/// Writes a line to standard error, which goes to a log. Unlike `eprintln!`, it does not panic if
/// the log cannot be written.
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

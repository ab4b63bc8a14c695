//! Executes the daemon's orders on the RAM of its own process: folds runs of pages, turns folded
//! pages into anonymous memory again (*release*), discards pages of zeroes, and maps files.
//! `memfold-qemu` runs this crate inside QEMU.
//!
//! To *fold* a run of pages is to replace the run by a private (copy-on-write) mapping of the same
//! bytes in a *page store*, a file that many VMs map.
//!
//! ```text
//!   daemon                      QEMU process
//!   +--------+  Unix socket   +------------------------------------------------------------+
//!   | decides| -------------> | serve -> Folder -> fold | release | zero | map              |
//!   +--------+ <------------- |            |                                               |
//!                 replies     |            +-- ram      RAM blocks and their folded pages   |
//!                             |            +-- stores   read-only windows on page stores    |
//!                             |            +-- staging  holds pages while they are frozen   |
//!                             |            +-- past     copy before write, for snapshots    |
//!                             |            +-- arrival  pages that the daemon still fetches   |
//!                             | madvise (interposed) -> discard                             |
//!                             +------------------------------------------------------------+
//! ```
//!
//! Invariants, each kept by the module named:
//! 1. A guest never reads zeroes or outdated bytes during a fold: pages are frozen while their
//!    mapping is replaced (`freeze`).
//! 2. Frozen pages always go back, even after an error, a panic or the daemon's death: a guard's
//!    `drop` does it (`freeze`).
//! 3. Between freeze and thaw there is no allocation, no lock, no socket access and no possible
//!    panic (`fold`, `release`, `zero`).
//! 4. No page is replaced before its frozen bytes were compared with the store, within the size of
//!    the store's file (`fold`, `stores`).
//! 5. Memory that QEMU discards reads as zeroes afterwards, folded or not (`discard`).
//! 6. Old bytes for a snapshot are copied before the write to their page continues. If one copy
//!    fails, the whole copy is marked as failed (`copy_before_write`).
//! 7. A page that has yet to arrive is mapped once, and nobody reads or writes the page before
//!    (`arrival`).
//!
//! The same [`Folder`] works in any process, on memory of that process. The stress tests and
//! `memfold bench fold` use it in this way.

/// Writes a line to standard error. Unlike `eprintln!`, the macro does not panic if the line cannot
/// be written.
#[macro_export]
macro_rules! say {
    ($($words:tt)*) => {{
        // An error is ignored, because there is no other place to report it.
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{}\n", format_args!($($words)*)));
    }};
}

mod arrival;
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

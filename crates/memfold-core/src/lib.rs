//! All of memfold below the command line.
//!
//! Floors, from the ground; no arrow runs up:
//!
//! | floor | rooms |
//! |---|---|
//! | top | [`api`] |
//! | | [`daemon`]: the running whole |
//! | | [`ledger`]: what is where, in bytes; [`estimate`]: what could be saved |
//! | mechanisms | [`fold`], [`ksm`], [`snapshot`], [`segment`], [`lend`] |
//! | | [`vm`]: QEMU processes and the links to them |
//! | | [`libvirt`]: its domains, enabled and found |
//! | ground | [`store`], [`host`], [`progress`], [`caught`] |

use std::sync::OnceLock;

pub mod api;
pub mod caught;
pub mod daemon;
pub mod estimate;
pub mod fold;
pub mod history;
pub mod host;
pub mod ksm;
pub mod ledger;
pub mod lend;
pub mod libvirt;
pub mod progress;
pub mod segment;
pub mod snapshot;
pub mod store;
mod tls_key;
pub mod vm;

/// Writes a line to standard error, which is a log here. `eprintln!` panics where that log can't be written.
#[macro_export]
macro_rules! say {
    ($($words:tt)*) => {{
        // Nobody could be told.
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{}\n", format_args!($($words)*)));
    }};
}

static COMMIT: OnceLock<&str> = OnceLock::new();

/// Tells which commit the program is built from. The program knows it, and not this library: it would be compiled anew for each commit.
pub fn set_commit(commit: &'static str) {
    // The first word stays.
    let _ = COMMIT.set(commit);
}

/// The commit that the program is built from; `unknown` in other programs.
#[must_use]
pub fn commit() -> &'static str {
    COMMIT.get().copied().unwrap_or("unknown")
}

//! memfold's agent in the guest.
//!
//! ```text
//!   kernel events --> trace (ring, format) --+--> page_cache (files, resolve) --> batch --+
//!   cached files ---> worker (walk, residency) +                                          +--> port
//!   shells ---------> commands -----------------------------------------------------------+
//! ```
//!
//! | module | what it is about |
//! |---|---|
//! | [`agent`] | the main loop: connection, deadlines, messages |
//! | `page_cache` | from events and findings to hints |
//! | [`trace`], `ring`, [`format`](mod@format) | the kernel's events |
//! | `worker`, `walk`, `residency`, `throttle` | inventories, in the background |
//! | `files`, `resolve`, [`mounts`], [`glob`] | file numbers, paths, file systems, rules |
//! | `batch`, `port` | messages, and the way out |
//! | `commands` | commands for the daemon |
//! | [`free_pages`] | what a snapshot can leave out |
//! | [`extents`], `block_devices` | which disk holds what a snapshot could copy |
//! | [`segment`] | read-only images shared with other VMs, laid over the guest's own directories; not part of the main loop |
//! | `wake`, `backoff` | waking the main loop, and what it does rarely |

/// Writes a line to standard error, which is a log here. `eprintln!` panics where that log can't be
/// written.
macro_rules! say {
    ($($words:tt)*) => {{
        // Nobody could be told.
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{}\n", format_args!($($words)*)));
    }};
}

pub mod agent;
mod backoff;
mod batch;
mod block_devices;
mod commands;
pub mod extents;
mod files;
pub mod format;
pub mod free_pages;
pub mod glob;
pub mod mounts;
mod page_cache;
mod port;
pub mod reseed;
mod residency;
mod resolve;
mod ring;
pub mod segment;
mod throttle;
pub mod trace;
mod wake;
mod walk;
mod worker;

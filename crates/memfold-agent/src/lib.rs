//! memfold's agent in the guest: reports to the daemon which file pages the guest's page cache
//! holds, and in which page frames.
//!
//! ```text
//!   kernel events --> trace (ring, format) --+--> page_cache (files, resolve) --> batch --+
//!   cached files ---> worker (walk, residency) +                                          +--> port
//!   shells ---------> commands -----------------------------------------------------------+
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`agent`] | the main loop: connection, deadlines, messages |
//! | `page_cache` | converts events and findings to hints |
//! | [`trace`], `ring`, [`format`](mod@format) | the kernel's events |
//! | `worker`, `walk`, `residency`, `throttle` | inventories of the page cache, in the background |
//! | `files`, `resolve`, [`mounts`], [`glob`] | file numbers, paths, file systems, rules |
//! | `batch`, `port` | messages and their sending |
//! | `commands` | shell commands that the daemon runs, at once or with live input and output |
//! | [`consent`] | what the guest's owner lets the host do |
//! | `privileges` | capabilities that the agent gives up |
//! | [`copy`] | copies of files between guest and host |
//! | [`memory`] | figures of the guest's memory; trimming of its page cache |
//! | [`free_pages`] | free page frames, which a snapshot can leave out |
//! | [`extents`], `block_devices` | where files are stored on the guest's disks |
//! | [`drop_caches`] | files are dropped from the page cache, until a deadline |
//! | `file_list` | lists of paths that the host sends |
//! | [`segment`] | read-only images shared with other VMs, mounted over the guest's own directories; not part of the main loop |
//! | `wake`, `backoff` | waking the main loop; the schedule of its repeated work |

/// Writes a line to standard error, which goes to a log. Unlike `eprintln!`, it does not panic if
/// the log cannot be written.
macro_rules! say {
    ($($words:tt)*) => {{
        // A failure is ignored, because there is no other place to report it.
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{}\n", format_args!($($words)*)));
    }};
}

pub mod agent;
mod backoff;
mod batch;
mod block_devices;
mod commands;
pub mod consent;
pub mod copy;
pub mod drop_caches;
pub mod extents;
mod file_list;
mod files;
pub mod format;
pub mod free_pages;
pub mod glob;
pub mod memory;
pub mod mounts;
mod page_cache;
mod port;
mod privileges;
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

//! The guest's memory: figures for the daemon, and trimming of the page cache by the daemon's
//! order.
//!
//! ```text
//!   /proc, debugfs, control groups --> reader (parse) --> reports --> FromAgent::Memory
//!   ToAgent::Trim --> trim (groups: memory.reclaim), step by step, watched --> FromAgent::Trimmed
//! ```
//! Beside that, [`hotplug`] prepares the kernel for memory that virtio-mem plugs.

mod groups;
pub(crate) mod hotplug;
pub mod parse;
pub mod reader;
mod reports;
mod trim;

pub(crate) use reader::total_pages;
pub(crate) use reports::Reports;
pub(crate) use trim::Trimmer;

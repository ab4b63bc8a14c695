//! The guest's memory: figures for the daemon, and trimming of the page cache by the daemon's
//! order.
//!
//! ```text
//!   /proc, debugfs, control groups --> reader (parse) --> reports --> FromAgent::Memory
//!   ToAgent::Trim --> trim (groups: memory.reclaim), step by step, watched --> FromAgent::Trimmed
//! ```

mod groups;
pub mod parse;
pub mod reader;
mod reports;
mod trim;

pub(crate) use reports::Reports;
pub(crate) use trim::Trimmer;

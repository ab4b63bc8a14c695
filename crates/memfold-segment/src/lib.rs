//! Segments: read-only images of files that VMs of one trust domain map and execute in place, so
//! that these files never enter a guest's page cache. The drawing shows the three tasks around a
//! segment, and the modules that do them. (Segments are like the shared segments, DCSS, of z/VM.)
//!
//! ```text
//!   build    source -> tree (chosen files) -> EROFS image, padded -> SHELF/NAME/GENERATION/      (source, tree, build, shelf)
//!   rank     which files would save memory in a segment, by the pages that VMs really cache        (rank)
//!   attach   QEMU maps the image (virtio-pmem) -> guest mounts it with DAX, over its own directories       (memfold_daemon)
//! ```
//! An image never changes after its build; each later build makes a separate image, the segment's
//! next *generation*. An image's pages are in the host's page cache, one copy for all VMs, and the
//! host may reclaim them. With `--pinned`, a copy of the image is kept in memory instead.

mod build;
mod error;
mod ext;
mod manifest;
mod name;
pub mod rank;
mod shelf;
#[cfg(test)]
mod small_disk;
mod source;
mod tools;
mod tree;

pub use build::{Request, build, check};
pub use error::SegmentError;
pub use ext::{Facts as DebugfsFacts, facts as debugfs_facts};
pub use manifest::{Manifest, SegmentInfo};
pub use name::Reference;
pub use rank::Ranked;
pub use shelf::{DEFAULT_SHELF, Draft, Shelf};
pub use source::Source;
pub use tools::{free_above_reserve, run as run_tool, tool};
pub use tree::PROGRAMS;

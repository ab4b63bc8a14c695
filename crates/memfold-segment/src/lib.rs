//! Segments: read-only images of files that VMs of one trust domain map and execute in place, so that these files never enter a guest's
//! page cache (study A's DCSS).
//!
//! ```text
//!   build    source -> tree (chosen files) -> EROFS image, padded -> SHELF/NAME/GENERATION/      (source, tree, build, shelf)
//!   rank     which files are worth their place, by the pages that VMs really cache                (rank)
//!   attach   QEMU maps the image (virtio-pmem) -> guest mounts it with DAX -> lays it over its own tree    (memfold_daemon::daemon)
//! ```
//! An image never changes once it is published: a new generation lies beside it. Its pages are the host's page cache, one copy for all
//! VMs, which the host may reclaim; `--pinned` keeps a copy in memory instead.

mod build;
mod ext;
mod manifest;
mod name;
pub mod rank;
mod shelf;
mod source;
mod tree;

use std::io;
use std::path::PathBuf;

pub use build::{PROGRAMS, Request, build};
pub use manifest::{Manifest, SegmentInfo};
pub use name::Reference;
pub use rank::Ranked;
pub use shelf::{DEFAULT_SHELF, Draft, Shelf};
pub use source::{run as run_tool, tool};

/// Why something was not done with a segment. Nothing is half done then.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// No such segment.
    #[error("no segment '{0}'; 'memfold segment list' shows all")]
    Unknown(String),
    /// The name can't be one.
    #[error("{0}")]
    Name(String),
    /// What it is to be built from can't be used.
    #[error("cannot build a segment from '{from}': {why}")]
    Source {
        /// What was given.
        from: String,
        /// What is wrong with it, and what would do.
        why: String,
    },
    /// A program that builds images is missing.
    #[error("{program} is not installed, which {what}; install {package}")]
    Missing {
        /// The program.
        program: &'static str,
        /// What it is for.
        what: &'static str,
        /// Debian's package.
        package: &'static str,
    },
    /// A program failed.
    #[error("{program} failed: {why}")]
    Tool {
        /// The program.
        program: &'static str,
        /// What it said.
        why: String,
    },
    /// Its files can't be read or written.
    #[error("cannot use {path}")]
    Files {
        /// Which.
        path: PathBuf,
        /// From the kernel.
        #[source]
        source: io::Error,
    },
    /// It belongs to another trust domain.
    #[error(
        "segment '{segment}' belongs to trust domain '{domain}', and VM '{vm}' to {other}; only VMs of '{domain}' may map it"
    )]
    Foreign {
        /// The segment.
        segment: String,
        /// Its domain.
        domain: String,
        /// The VM.
        vm: String,
        /// The VM's, in words.
        other: String,
    },
    /// VMs or snapshots need it.
    #[error("segment '{name}' is used by {users}; end or remove these first")]
    InUse {
        /// Its name.
        name: String,
        /// By whom.
        users: String,
    },
    /// A VM writes it, and no other may have it meanwhile.
    #[error(
        "segment '{name}' is written by VM '{writer}': build the next generation from there (--from vm:{writer}), or take it off there (memfold segment detach {writer} {name})"
    )]
    Written {
        /// Its name.
        name: String,
        /// The VM.
        writer: String,
    },
    /// It is not what was built.
    #[error("segment '{name}' can't be used: {why}; build it anew")]
    Broken {
        /// Its name.
        name: String,
        /// What is wrong.
        why: String,
    },
    /// This VM or host can't.
    #[error("{0}")]
    Impossible(String),
}

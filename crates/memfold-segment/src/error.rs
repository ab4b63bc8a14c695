//! Errors of operations on segments: build, verify, attach, remove.

use std::io;
use std::path::{Path, PathBuf};

/// Reason why an operation on a segment failed. After an error, no partial result remains.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum SegmentError {
    #[error("no segment named '{0}'; 'memfold segment list' shows all segments")]
    Unknown(String),
    #[error("{0}")]
    Name(String),
    #[error("cannot build a segment from '{from}': {why}")]
    Source { from: String, why: String },
    #[error("{program}, which {what}, is not installed; install {package}")]
    Missing {
        program: &'static str,
        what: &'static str,
        package: &'static str,
    },
    #[error("{program} failed: {why}")]
    Tool { program: &'static str, why: String },
    #[error("cannot read or write {path}")]
    Files {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "segment '{segment}' belongs to trust domain '{domain}', and VM '{vm}' to {other}; only VMs of '{domain}' may map it"
    )]
    Foreign {
        segment: String,
        domain: String,
        vm: String,
        other: String,
    },
    #[error("segment '{name}' is used by {users}; end or remove these users first")]
    InUse { name: String, users: String },
    #[error(
        "segment '{name}' is being written by VM '{writer}'; build the next generation from that VM (--from vm:{writer}), or detach the segment there (memfold segment detach {writer} {name})"
    )]
    Written { name: String, writer: String },
    #[error("cannot use segment '{name}': {why}; build the segment again")]
    Broken { name: String, why: String },
    #[error("{0}")]
    Impossible(String),
    /// Another operation uses the segment. The same request is possible after that operation.
    #[error("{0}")]
    Busy(String),
}

pub(super) fn broken(segment: &str, why: String) -> SegmentError {
    let name = segment.to_owned();
    SegmentError::Broken { name, why }
}

/// Returns a function that adds the path to an I/O error.
pub(super) fn failed(path: &Path) -> impl Fn(io::Error) -> SegmentError {
    move |source| SegmentError::Files {
        path: path.into(),
        source,
    }
}

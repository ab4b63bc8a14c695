//! Count and size of the files in the snapshot directory or the segment directory.

use memfold_units::ByteSize;

/// Totals over all snapshots, or over all segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnShelf {
    /// Number of snapshots or segments in the directory.
    pub count: u64,
    /// Number of snapshots or segments that cannot be used.
    pub broken: u64,
    /// Bytes: for snapshots, the space that they take on disk; for segments, the part of them in
    /// the host's page cache.
    pub bytes: ByteSize,
}

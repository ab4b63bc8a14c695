//! Count and size of the files in the snapshot directory or the segment directory.

use memfold_units::ByteSize;

/// Totals over all snapshots, or over all segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnShelf {
    /// Number of all snapshots or segments.
    pub count: u64,
    /// Number of those that cannot be used.
    pub broken: u64,
    /// Bytes: the space that snapshots take on disk, or the part of segments in the host's page
    /// cache.
    pub bytes: ByteSize,
}

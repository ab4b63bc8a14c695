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

impl OnShelf {
    fn add(&mut self, is_broken: bool, bytes: u64) {
        self.count += 1;
        self.broken += u64::from(is_broken);
        self.bytes += ByteSize(bytes);
    }

    /// Counts all snapshots; `None` if their directory cannot be read.
    pub(crate) fn of_snapshots(shelf: &memfold_snapshot::Shelf) -> Option<Self> {
        let mut all = Self::default();
        for name in shelf.names().ok()? {
            // Another thread may remove the snapshot at this moment.
            let bytes = shelf.disk_bytes(&name).unwrap_or(0);
            all.add(shelf.manifest(&name).is_err(), bytes);
        }
        Some(all)
    }

    /// Counts all segments; `None` if their directory cannot be read.
    pub(crate) fn of_segments(shelf: &memfold_segment::Shelf) -> Option<Self> {
        let mut all = Self::default();
        for segment in shelf.all().ok()? {
            let is_broken = shelf.problem(&segment).is_some();
            all.add(is_broken, shelf.resident_bytes(&segment));
        }
        Some(all)
    }
}

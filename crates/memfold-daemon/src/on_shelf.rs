//! What lies in the directory of snapshots or of segments, in short.

use memfold_units::ByteSize;

/// Files of snapshots or segments, together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnShelf {
    /// How many there are.
    pub count: u64,
    /// Of them, those that can't be used.
    pub broken: u64,
    /// Bytes: of snapshots, what they take on disk; of segments, what of them is in the host's
    /// memory.
    pub bytes: ByteSize,
}

//! How much is taken at once.

/// Largest request body in bytes.
pub(crate) const MAX_BODY: usize = 1 << 20;

/// Longest body there, in bytes: fingerprints of some hundred VMs.
pub(crate) const MOST_FINGERPRINTS: usize = 64 << 20;

/// Streams at once.
pub(crate) const MOST_STREAMS: usize = 16;

/// Of them, of those who may only read: they can't keep those out who operate.
pub(crate) const MOST_OF_READERS: usize = 12;

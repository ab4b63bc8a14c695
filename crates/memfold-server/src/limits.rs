//! How much is taken at once.

/// Largest request body in bytes.
pub(crate) const MAX_BODY: usize = 1 << 20;

/// Largest body with fingerprints, in bytes: those of some hundred VMs.
pub(crate) const MOST_FINGERPRINTS: usize = 64 << 20;

/// Streams of samples at once.
pub(crate) const MOST_STREAMS: usize = 16;

/// Of them, of those who may only read: they can't keep those out who operate.
pub(crate) const MOST_OF_READERS: usize = 12;

//! Limits of the daemon's API: sizes of request bodies, and numbers of open streams of live
//! samples.

/// Largest request body, in bytes.
pub(crate) const MAX_BODY: usize = 1 << 20;

/// Largest request body with fingerprints of hosts, in bytes: enough for some hundred VMs.
pub(crate) const MOST_FINGERPRINTS: usize = 64 << 20;

/// Largest number of concurrent streams of live samples.
pub(crate) const MOST_STREAMS: usize = 16;

/// Largest number of concurrent streams of readers, so that readers cannot use up all streams.
pub(crate) const MOST_OF_READERS: usize = 12;

//! The input of a save: the snapshot's name, options, and results of the steps before it.

use std::time::{Duration, Instant};

use super::candidates::Candidate;
use super::free::Frames;
use super::manifest::{Keep, Steps};

/// The input of a save: the snapshot's name, options, and results of the steps before it.
#[allow(clippy::struct_excessive_bools)] // what was asked for, and what the guest has
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of the snapshot.
    pub name: String,
    /// What the guest was told to keep, for the manifest.
    pub keep: Keep,
    /// Why memfold chose that, for the manifest.
    pub keep_reason: Option<String>,
    /// Trust domain.
    pub domain: Option<String>,
    /// For the manifest.
    pub of_boot: Option<String>,
    /// Whether the VM goes on while its RAM is copied.
    pub live: bool,
    /// Pages that the VM's disks may hold too: those that do are kept by reference. Ascending by
    /// `hva`; none overlaps.
    pub candidates: Vec<Candidate>,
    /// Whether the image is compressed.
    pub compress: bool,
    /// When the save began.
    pub began: Instant,
    /// Frames that the guest had free while its writes were tracked; or why that isn't known.
    pub free: Result<Vec<Frames>, String>,
    /// Why the guest has caches that it was to drop.
    pub cache_kept: Option<String>,
    /// The steps that were before.
    pub steps: Steps,
    /// Whether memfold's agent runs in the guest.
    pub agent: bool,
    /// Whether the guest's kernel knows its VM generation ID.
    pub generation_id: bool,
}

/// A time in milliseconds.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

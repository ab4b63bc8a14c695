//! Input of a save: the snapshot's name, the save's options, and results of the steps before it.

use std::time::{Duration, Instant};

use super::candidates::Candidate;
use super::manifest::{Keep, Steps};

/// Input of a save: the snapshot's name, the save's options, and results of the steps before it.
#[allow(clippy::struct_excessive_bools)] // independent options and facts
#[derive(Clone, Debug)]
pub struct Request {
    /// Name that the snapshot will have.
    pub name: String,
    /// Which caches the guest was told to keep; recorded in the manifest.
    pub keep: Keep,
    /// Reason why memfold chose `keep`, recorded in the manifest; `None` if the user chose it.
    pub keep_reason: Option<String>,
    /// Trust domain of the VM, and so of the snapshot; `None`: the VM shares with no other VM.
    pub domain: Option<String>,
    /// For a boot snapshot, the mark of the VM's QEMU process, recorded in the manifest; otherwise
    /// `None`.
    pub of_boot: Option<String>,
    /// Whether the VM runs while its RAM is copied (a live save).
    pub live: bool,
    /// Pages of the VM's memory that its disks may contain, too, by ascending `hva` and without
    /// overlaps. The image only refers to pages that a disk really contains.
    pub candidates: Vec<Candidate>,
    /// Whether the RAM image is compressed after it was written.
    pub compress: bool,
    /// Time at which the save began.
    pub began: Instant,
    /// Reason why the guest still has caches that it should have dropped; `None` if it dropped them
    /// or should keep them.
    pub cache_kept: Option<String>,
    /// Durations of the steps that are done before the save.
    pub steps: Steps,
    /// Whether memfold's agent runs in the guest.
    pub agent: bool,
    /// Whether the guest's kernel has a driver for the VM generation ID.
    pub generation_id: bool,
}

/// Converts a duration to milliseconds.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

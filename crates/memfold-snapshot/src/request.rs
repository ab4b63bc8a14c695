//! Input of a save: the snapshot's name, the options that the user gave, and facts about the VM
//! that the daemon found out before the save.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::candidates::Candidate;
use super::cpu::Cpu;
use super::manifest::{Keep, Steps};
use super::parent::Parent;

/// How a save encrypts the memory of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encrypt {
    /// Name of the operator's key, among the keys of the snapshot directory.
    pub key: String,
    /// Whether disks and other files in the snapshot may be unencrypted.
    pub plain_disks: bool,
}

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
    /// Reason why all pages are saved although the VM runs from a snapshot, recorded in the
    /// manifest; `None` if there is none, or if the user asked for all pages.
    pub whole_reason: Option<String>,
    /// Trust domain of the VM, and so of the snapshot; `None`: the VM shares with no other VM.
    pub domain: Option<String>,
    /// For a boot snapshot, the mark of the VM's QEMU process, recorded in the manifest; otherwise
    /// `None`.
    pub of_boot: Option<String>,
    /// Whether the snapshot is removed when no VM needs it.
    pub fork: bool,
    /// Whether the VM runs while its RAM is copied.
    pub live: bool,
    /// The parent, if the snapshot is to be a layer on it.
    pub parent: Option<Arc<Parent>>,
    /// Number of the VM's pages that are not the parent's, a moment ago.
    pub changed: u64,
    /// The VM's CPU, if it is known: that of the snapshot from which the VM runs.
    pub cpu: Option<Cpu>,
    /// Pages that the VM's disks may contain, too, by ascending `hva` and without overlaps. Pages
    /// that a disk contains are kept by reference.
    pub candidates: Vec<Candidate>,
    /// Whether the RAM image is compressed: after it was written, or before it is encrypted.
    pub compress: bool,
    /// How the snapshot's memory is encrypted; `None`: not at all.
    pub encrypt: Option<Encrypt>,
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
    /// Boot ID of the guest's kernel; `None` if no agent tells it.
    pub guest_boot: Option<String>,
}

/// Converts a duration to milliseconds.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

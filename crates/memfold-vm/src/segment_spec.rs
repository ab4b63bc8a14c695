//! The part of a VM's description that names a segment which the VM maps.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A segment that a VM maps, as the VM's description names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentSpec {
    /// Name of the segment: `NAME` stands for the newest build when the VM starts,
    /// `NAME@GENERATION` for one build. For a running VM, this is always the latter.
    pub name: String,
    /// Whether the segment is the guest's root file system. Only the first segment can be, and only
    /// if the VM's description names a kernel.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub root: bool,
    /// Path of the segment's image file; set by the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// Length of the segment's image in bytes; set by the daemon.
    #[serde(default)]
    pub bytes: u64,
    /// BLAKE3 digest of the segment's image; set by the daemon. The description of a saved VM
    /// already contains it, and the daemon refuses an image with another digest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Guest-physical address of the segment's device, set only for a saved VM; unset: QEMU chooses
    /// the address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<u64>,
}

impl SegmentSpec {
    /// Returns a segment with this name and with default settings.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// Returns the segment's name without the number of the build (`@GENERATION`).
    #[must_use]
    pub fn base_name(&self) -> &str {
        self.name.split('@').next().unwrap_or(&self.name)
    }
}

//! The description of a segment within a VM description.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A segment that a VM maps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentSpec {
    /// `NAME` (the newest generation when the VM starts) or `NAME@GENERATION`; for a running VM
    /// always the latter.
    pub name: String,
    /// Whether the segment is the guest's root file system. Allowed only for the first segment, and
    /// with a kernel in the description.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub root: bool,
    /// Path of the segment's image; set by the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// Length of the segment's image in bytes; set by the daemon.
    #[serde(default)]
    pub bytes: u64,
    /// BLAKE3 of the image; set by the daemon. In the description of a saved VM it is already set,
    /// and an image with another digest is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Guest-physical address of the segment's device, set only for a saved VM; unset: QEMU chooses
    /// one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<u64>,
}

impl SegmentSpec {
    /// Returns a segment with this name and default settings.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// Returns the name without the generation.
    #[must_use]
    pub fn base_name(&self) -> &str {
        self.name.split('@').next().unwrap_or(&self.name)
    }
}

//! The description of a segment within a VM description.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A segment that a VM maps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentSpec {
    /// `NAME`, the newest generation when the VM starts, or `NAME@GENERATION`; of a running VM
    /// always the latter.
    pub name: String,
    /// The guest's root file system. The first segment only, with a kernel of the description's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub root: bool,
    /// Its image; the daemon fills that in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// Length of the image in bytes; the daemon fills that in.
    #[serde(default)]
    pub bytes: u64,
    /// BLAKE3 of the image; the daemon fills that in. Set already, no other image may take its
    /// place: of a VM that was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Where the guest sees it, if that is not for QEMU to choose: of a VM that was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<u64>,
}

impl SegmentSpec {
    /// A segment by name.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            root: false,
            image: None,
            bytes: 0,
            digest: None,
            address: None,
        }
    }

    /// Its name without the generation.
    #[must_use]
    pub fn base_name(&self) -> &str {
        self.name.split('@').next().unwrap_or(&self.name)
    }
}

//! The manifest of a segment's generation, `manifest.json`: what it contains and how it was built.

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Version of `manifest.json` and of what lies in an image. Others are refused.
pub const FORMAT: u32 = 1;

/// One generation of a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// Its name.
    pub name: String,
    /// 1, 2, ...
    pub generation: u32,
    /// The only trust domain whose VMs may map it.
    pub domain: String,
    /// Length of the image in bytes, padding included: the size of the device that guests see.
    pub image_bytes: u64,
    /// BLAKE3 of the image, 64 hexadecimal digits.
    pub digest: String,
    /// BLAKE3 of the tree in it: names, kinds, modes, owners, times, links and bytes of all files.
    pub content: String,
    /// Regular files in it.
    pub files: u64,
    /// Their bytes.
    pub content_bytes: u64,
    /// Directories that guests lay it over.
    pub lay: Vec<String>,
    /// Whether it holds a whole system that can be a VM's root.
    pub root: bool,
    /// Whether it is held in memory, so that the host can't drop it: at most swap it out.
    pub pinned: bool,
    /// What it was built from, as it was said.
    pub from: Vec<String>,
    /// When, in seconds since 1970.
    pub created_s: u64,
    /// The memfold that built it.
    pub memfold: String,
}

impl Manifest {
    /// `NAME@GENERATION`.
    #[must_use]
    pub fn reference(&self) -> String {
        format!("{}@{}", self.name, self.generation)
    }

    /// Guest RAM that each VM spends on describing it: 64 bytes for each page (`struct page`).
    #[must_use]
    pub const fn struct_page_bytes(&self) -> ByteSize {
        ByteSize(self.image_bytes / 64)
    }
}

/// A segment in short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SegmentInfo {
    /// What it says of itself.
    pub segment: Manifest,
    /// Names of VMs that map it; `process N` for those that this daemon doesn't know.
    pub users: Vec<String>,
    /// The VM that writes its next generation, so that no other may map it.
    pub writer: Option<String>,
    /// Its pages that are in the host's memory now, in bytes.
    pub resident_bytes: u64,
    /// Guest RAM that each VM spends on describing it, in bytes.
    pub struct_page_bytes: u64,
    /// What keeps its image from being changed: `immutable` (the file system's flag), `memory` (a
    /// copy there), or `nothing`.
    pub protection: String,
    /// Why it can't be used, if it can't.
    pub problem: Option<String>,
}

//! The manifest of a segment's generation (`manifest.json`): its contents and how it was built.

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Version of the format of `manifest.json` and of images; other versions are refused.
pub const FORMAT: u32 = 1;

/// One generation of a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Manifest {
    /// Version of the format, [`FORMAT`].
    pub format: u32,
    /// Name of the segment.
    pub name: String,
    /// Number of the build of this segment from changed files, from 1.
    pub generation: u32,
    /// Trust domain of the segment; only VMs of this domain may map it.
    pub domain: String,
    /// Length of the image in bytes, padding included: the size of the device that guests see.
    pub image_bytes: u64,
    /// BLAKE3 of the image, 64 hexadecimal digits.
    pub digest: String,
    /// BLAKE3 of the files in the image: names, kinds, modes, owners, times, links and bytes.
    pub content: String,
    /// Number of regular files in the image.
    pub files: u64,
    /// Total size of these files, in bytes.
    pub content_bytes: u64,
    /// Directories over which guests mount the segment.
    pub lay: Vec<String>,
    /// Whether the image holds a whole system that can be a VM's root.
    pub root: bool,
    /// Whether the image is kept in memory; then the host cannot drop it, only swap it out.
    pub pinned: bool,
    /// Sources of the files, as given in the request.
    pub from: Vec<String>,
    /// Time of the build, in seconds since 1970.
    pub created_s: u64,
    /// Version of the memfold that built the generation.
    pub memfold: String,
}

impl Manifest {
    /// Returns the reference to the generation, `NAME@GENERATION`.
    #[must_use]
    pub fn reference(&self) -> String {
        format!("{}@{}", self.name, self.generation)
    }

    /// Returns the guest RAM that describes the segment's pages in each VM: 64 bytes per page
    /// (`struct page`).
    #[must_use]
    pub const fn struct_page_bytes(&self) -> ByteSize {
        ByteSize(self.image_bytes / 64)
    }
}

/// Summary of a segment's generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SegmentInfo {
    /// Manifest of the generation.
    pub segment: Manifest,
    /// Names of VMs that map the generation; `process N` for processes unknown to this daemon.
    pub users: Vec<String>,
    /// Name of the VM that writes the next generation; while it does, no other VM may map the
    /// segment.
    pub writer: Option<String>,
    /// Bytes of the image in the host's memory now.
    pub resident_bytes: u64,
    /// Guest RAM that describes the segment's pages in each VM, in bytes.
    pub struct_page_bytes: u64,
    /// Protection of the image against changes: `immutable` (file system flag), `memory` (a copy in
    /// memory), or `nothing`.
    pub protection: String,
    /// Why the generation cannot be used; unset: it can be used.
    pub problem: Option<String>,
}

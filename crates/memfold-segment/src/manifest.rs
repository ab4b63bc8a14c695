//! The manifest of a segment's image (`manifest.json`): what the image contains, and how it was
//! built. Each image of a segment is a numbered generation with its own manifest.

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Version of the format of a segment's `manifest.json` and image; other versions are refused.
pub const FORMAT: u32 = 1;

/// Description of one generation of a segment: the image that one build has made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Manifest {
    /// Version of the format of this manifest and its image.
    pub format: u32,
    /// Name of the segment.
    pub name: String,
    /// Number of this image among all images that were built for the segment, from 1.
    pub generation: u32,
    /// Trust domain of the segment; only VMs of this domain may map it.
    pub domain: String,
    /// Length of the segment's image in bytes, including padding. Guests see a device of this size.
    pub image_bytes: u64,
    /// BLAKE3 digest of the segment's image, 64 hexadecimal digits.
    pub digest: String,
    /// BLAKE3 digest of the files in the image (names, kinds, modes, owners, times, links and
    /// bytes), 64 hexadecimal digits.
    pub content: String,
    /// Number of regular files in the segment's image.
    pub files: u64,
    /// Total size of the regular files in the segment's image, in bytes.
    pub content_bytes: u64,
    /// Absolute paths of the directories over which guests mount the segment.
    pub lay: Vec<String>,
    /// Whether the segment holds a whole system, which can be a VM's root file system.
    pub root: bool,
    /// Whether a copy of the image is kept in memory (tmpfs) while VMs use the segment. The host
    /// cannot drop the copy, only swap it out.
    pub pinned: bool,
    /// Sources of the segment's files, as given in the build request.
    pub from: Vec<String>,
    /// Time at which the image was built, in seconds since 1970.
    pub created_s: u64,
    /// Version of the memfold that built the image.
    pub memfold: String,
}

impl Manifest {
    /// Returns the text by which commands name this image of the segment: `NAME@GENERATION`.
    #[must_use]
    pub fn reference(&self) -> String {
        format!("{}@{}", self.name, self.generation)
    }

    /// Returns the amount of RAM that each guest needs to describe the segment's pages: 64 bytes
    /// per page (`struct page`).
    #[must_use]
    pub const fn struct_page_bytes(&self) -> ByteSize {
        ByteSize(self.image_bytes / 64)
    }
}

/// Description and present state of one image (generation) of a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SegmentInfo {
    /// Description of the segment's image from its build.
    pub segment: Manifest,
    /// Names of the VMs that map the segment's image; `process N` for a process that this daemon
    /// does not know.
    pub users: Vec<String>,
    /// Name of the VM in which files of the segment are changed for the next build; null if there
    /// is none. Meanwhile no other VM may map the segment.
    pub writer: Option<String>,
    /// Size of the part of the image that is in the host's memory now, in bytes.
    pub resident_bytes: u64,
    /// RAM that each guest needs to describe the segment's pages, in bytes.
    pub struct_page_bytes: u64,
    /// Protection of the segment's image against changes: `immutable` (file system flag), `memory`
    /// (a copy in memory), or `nothing`.
    pub protection: String,
    /// Reason why VMs cannot use the segment's image; null if they can.
    pub problem: Option<String>,
}

//! API types for segments (read-only images of files that several VMs share): build a segment, rank
//! files by what a segment of them would save, attach a segment to a VM.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A segment that a VM maps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmSegment {
    /// Reference to the segment, `NAME@GENERATION`.
    pub segment: String,
    /// State of the segment in the guest.
    pub state: SegmentState,
}

/// State of a segment in a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SegmentState {
    /// The guest sees the segment's device; nothing more is known.
    Attached,
    /// The segment is the guest's root file system.
    Root,
    /// The segment is mounted over the guest's own files.
    Laid,
    /// The segment was unmounted in the guest; the device remains until the VM ends.
    TakenOff,
    /// The segment could not be mounted over the guest's own files; the text says why.
    Failed(String),
}

/// `POST /v1/segments`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BuildRequest {
    /// Name of the segment.
    pub name: String,
    /// Trust domain of the segment.
    pub domain: String,
    /// Sources of the files: one directory or disk image on the daemon's host, packages (`.deb`
    /// files, `package:NAME`), or a running VM (`vm:NAME`).
    pub from: Vec<String>,
    /// Glob patterns of paths to include, beginning with a slash; empty: `/usr/**` and `/opt/**`,
    /// or everything with `root`.
    #[serde(default)]
    pub include: Vec<String>,
    /// Glob patterns of paths to exclude.
    #[serde(default)]
    pub exclude: Vec<String>,
    /// Most bytes of files to include. Files are then ranked by the page caches of the domain's
    /// VMs, and those with the highest savings are included. Unset: all files.
    pub top_files_bytes: Option<u64>,
    /// Number of VMs that will map the segment, for the ranking of `top_files_bytes`; unset: the
    /// number of running VMs.
    pub for_vms: Option<u64>,
    /// Whether the segment is a whole root file system.
    #[serde(default)]
    pub root: bool,
    /// Whether the image is kept in memory while VMs use it.
    #[serde(default)]
    pub pinned: bool,
}

/// Result of building a segment.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct BuildResult {
    /// Manifest of the newest generation.
    pub segment: memfold_segment::Manifest,
    /// Whether this generation is new; `false`: the newest generation already held the same files.
    pub is_new: bool,
}

/// `POST /v1/segments/rank`
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RankRequest {
    /// VMs whose cached files are ranked; empty: all VMs of the domain.
    pub vms: Vec<String>,
    /// Trust domain whose VMs are considered; unset: all domains.
    pub domain: Option<String>,
    /// Number of VMs that will map the segment; unset: for each file, as many as cache it now.
    pub for_vms: Option<u64>,
    /// Glob patterns of files to rank; empty: `/usr/**` and `/opt/**`.
    pub include: Vec<String>,
}

/// `POST /v1/vms/{name}/segments`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachSegmentRequest {
    /// Reference to the segment: `NAME` or `NAME@GENERATION`.
    pub segment: String,
    /// Whether only the device is attached, and the guest does not mount the segment.
    #[serde(default)]
    pub no_lay: bool,
    /// Whether the guest first compares all bytes of the segment's files with its own, not only
    /// names, sizes and times.
    #[serde(default)]
    pub content: bool,
    /// Whether this VM writes the segment's next generation (`from` = `vm:NAME`). This is refused
    /// if another VM maps any generation. No other VM may map one until this VM detaches the
    /// segment or ends.
    #[serde(default)]
    pub writer: bool,
}

/// Result of attaching a segment.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct AttachedSegment {
    /// The segment and its state in the guest.
    pub segment: VmSegment,
    /// Report of the guest's agent, if the agent changed anything.
    #[schema(value_type = Option<Object>)]
    pub report: Option<serde_json::Value>,
}

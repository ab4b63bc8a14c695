//! Requests and reports of building, ranking and attaching segments.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A segment that a VM maps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmSegment {
    /// `NAME@GENERATION`.
    pub segment: String,
    /// State of the segment in the guest.
    pub state: SegmentState,
}

/// State of a segment in a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SegmentState {
    /// The guest sees the device; nothing more is known.
    Attached,
    /// The segment is the guest's root file system.
    Root,
    /// The segment is overlaid on the guest's own files.
    Laid,
    /// The overlay was removed; the device remains until the VM ends.
    TakenOff,
    /// The segment could not be overlaid on the guest's own files; the text says why.
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
    /// Sources: one directory or disk image on the daemon's host, packages (`.deb` files,
    /// `package:NAME`), or a running VM (`vm:NAME`).
    pub from: Vec<String>,
    /// Globs of paths to include, beginning with a slash; empty: `/usr/**` and `/opt/**`, or
    /// everything with `root`.
    #[serde(default)]
    pub include: Vec<String>,
    /// Globs of paths to exclude.
    #[serde(default)]
    pub exclude: Vec<String>,
    /// Include only the files with the highest savings, ranked by the page caches of the domain's
    /// VMs, up to this many bytes.
    #[serde(default)]
    pub top_files_bytes: Option<u64>,
    /// Number of VMs that will map the segment, for that ranking; unset: the number of running VMs.
    #[serde(default)]
    pub for_vms: Option<u64>,
    /// Whether to build a whole root file system.
    #[serde(default)]
    pub root: bool,
    /// Whether to keep the image in memory.
    #[serde(default)]
    pub pinned: bool,
}

/// Result of a build.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct BuildResult {
    /// The newest generation.
    pub segment: memfold_segment::Manifest,
    /// Whether the generation is new; `false`: the newest generation already held the same files.
    pub is_new: bool,
}

/// `POST /v1/segments/rank`
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RankRequest {
    /// VMs whose cached files are ranked; empty: all VMs of the domain.
    #[serde(default)]
    pub vms: Vec<String>,
    /// Trust domain; unset: all domains.
    #[serde(default)]
    pub domain: Option<String>,
    /// Number of VMs that will map the segment; unset: for each file, as many as cache it now.
    #[serde(default)]
    pub for_vms: Option<u64>,
    /// Globs of files to rank; empty: `/usr/**` and `/opt/**`.
    #[serde(default)]
    pub include: Vec<String>,
}

/// `POST /v1/vms/{name}/segments`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachSegmentRequest {
    /// `NAME` or `NAME@GENERATION`.
    pub segment: String,
    /// Whether to attach only the device, without an overlay in the guest.
    #[serde(default)]
    pub no_lay: bool,
    /// Whether the guest first compares all bytes with its own files, not only names, sizes and
    /// times.
    #[serde(default)]
    pub content: bool,
    /// Whether this VM is to write the segment's next generation (`from` = `vm:NAME`). Refused if
    /// another VM maps any generation; no other VM may map one until this VM detaches the segment
    /// or ends.
    #[serde(default)]
    pub writer: bool,
}

/// Result of attaching a segment.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct AttachedSegment {
    /// The segment and its state in the guest.
    pub segment: VmSegment,
    /// Report of the guest's agent, if the agent did something.
    #[schema(value_type = Option<Object>)]
    pub report: Option<serde_json::Value>,
}

//! API types for segments (read-only images of files that several VMs share): build a segment, rank
//! files by what a segment of them would save, attach a segment to a VM.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A segment that is attached to a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmSegment {
    /// Reference to the segment, `NAME@GENERATION`.
    pub segment: String,
    /// State of the segment in the guest, for example whether the guest has mounted it.
    pub state: SegmentState,
}

/// State, in the guest, of a segment that is attached to the guest's VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SegmentState {
    /// The guest has the segment's device; nothing more is known.
    Attached,
    /// The segment is the guest's root file system.
    Root,
    /// The segment is mounted over the guest's own files.
    Laid,
    /// The guest has unmounted the segment; the segment's device remains until the VM ends.
    TakenOff,
    /// The guest could not mount the segment over its own files; the text says why.
    Failed(String),
}

/// Request body of `POST /v1/segments`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BuildRequest {
    /// Name of the segment to build.
    pub name: String,
    /// Trust domain of the segment. Only VMs of this domain may map the segment.
    pub domain: String,
    /// Sources of the segment's files: one directory or disk image on the daemon's host, packages
    /// (`.deb` files, `package:NAME`), or a running VM (`vm:NAME`).
    pub from: Vec<String>,
    /// Glob patterns of paths to include in the segment, beginning with a slash. Empty: `/usr/**`
    /// and `/opt/**`, or everything with `root`.
    #[serde(default)]
    pub include: Vec<String>,
    /// Glob patterns of paths to exclude from the segment.
    #[serde(default)]
    pub exclude: Vec<String>,
    /// Maximum total size of the files in the segment, in bytes. The files with the highest savings
    /// for each byte are then included, computed from the page caches of the domain's VMs. Unset:
    /// all files.
    pub top_files_bytes: Option<u64>,
    /// Number of VMs that will map the segment, from which the savings for `top_files_bytes` are
    /// computed; unset: the number of the domain's running VMs.
    pub for_vms: Option<u64>,
    /// Whether the segment is a whole root file system.
    #[serde(default)]
    pub root: bool,
    /// Whether the segment's image is kept in memory while VMs use it.
    #[serde(default)]
    pub pinned: bool,
}

/// Result of building a segment.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct BuildResult {
    /// Manifest of the segment's newest generation (build).
    pub segment: memfold_segment::Manifest,
    /// Whether the request has built a new generation of the segment; `false`: the newest
    /// generation already held the same files.
    pub is_new: bool,
}

/// Request body of `POST /v1/segments/rank`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RankRequest {
    /// Names of the VMs whose cached files are ranked; empty: all VMs of the domain.
    pub vms: Vec<String>,
    /// Trust domain whose VMs are examined; unset: all domains.
    pub domain: Option<String>,
    /// Number of VMs that will map the segment, from which the savings are computed; unset: the
    /// number of the examined VMs.
    pub for_vms: Option<u64>,
    /// Glob patterns of the files to rank; empty: `/usr/**` and `/opt/**`.
    pub include: Vec<String>,
}

/// Request body of `POST /v1/vms/{name}/segments`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachSegmentRequest {
    /// Reference to the segment to attach: `NAME` (the newest generation) or `NAME@GENERATION`.
    pub segment: String,
    /// Whether only the segment's device is attached, and the guest does not mount the segment.
    #[serde(default)]
    pub no_lay: bool,
    /// Whether the guest, before it mounts the segment, compares all bytes of the segment's files
    /// with its own files; `false`: only the files' metadata.
    #[serde(default)]
    pub content: bool,
    /// Whether the next generation of the segment is built from this VM (`from` = `vm:NAME`). The
    /// request is refused if another VM maps a generation. No other VM may map a generation until
    /// this VM detaches the segment or ends.
    #[serde(default)]
    pub writer: bool,
}

/// Result of attaching a segment.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct AttachedSegment {
    /// The segment and its state in the guest.
    pub segment: VmSegment,
    /// Report of the guest's agent on the mounted files; null: the agent changed nothing.
    #[schema(value_type = Option<Object>)]
    pub report: Option<serde_json::Value>,
}

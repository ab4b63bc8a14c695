//! Requests and reports of building, ranking and attaching segments.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A segment that a VM maps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmSegment {
    /// `NAME@GENERATION`.
    pub segment: String,
    /// What the guest does with it.
    pub state: SegmentState,
}

/// What a guest does with a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SegmentState {
    /// It sees the device; nothing is known of more.
    Attached,
    /// It is the guest's root.
    Root,
    /// It lies over the guest's own files.
    Laid,
    /// It was taken off again; the device stays until the VM ends.
    TakenOff,
    /// It could not be laid over the guest's own files, and why.
    Failed(String),
}

/// `POST /v1/segments`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BuildRequest {
    /// Name of the segment.
    pub name: String,
    /// Its trust domain.
    pub domain: String,
    /// One directory or disk image of the daemon's host, packages (`.deb` files, `package:NAME`),
    /// or a running VM (`vm:NAME`).
    pub from: Vec<String>,
    /// Globs of paths, beginning with a slash; none: `/usr/**` and `/opt/**`, or everything with
    /// `root`.
    #[serde(default)]
    pub include: Vec<String>,
    /// Globs of paths to leave out.
    #[serde(default)]
    pub exclude: Vec<String>,
    /// Take only the best files for the domain's VMs, by what they cache now, in so many bytes.
    #[serde(default)]
    pub top_files_bytes: Option<u64>,
    /// How many VMs are to map it, for that choice; unset: those that run.
    #[serde(default)]
    pub for_vms: Option<u64>,
    /// Build a whole root file system.
    #[serde(default)]
    pub root: bool,
    /// Hold it in memory.
    #[serde(default)]
    pub pinned: bool,
}

/// What a build made.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct BuildResult {
    /// The newest generation.
    pub segment: memfold_segment::Manifest,
    /// Whether it is new; `false`: the newest one held the same files already.
    pub is_new: bool,
}

/// `POST /v1/segments/rank`
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RankRequest {
    /// VMs whose files are ranked; none: all of the domain.
    #[serde(default)]
    pub vms: Vec<String>,
    /// Trust domain; unset: all.
    #[serde(default)]
    pub domain: Option<String>,
    /// How many VMs are to map the segment; unset: as many as cache a file now.
    #[serde(default)]
    pub for_vms: Option<u64>,
    /// Only files of which one of these globs is true; none: `/usr/**` and `/opt/**`.
    #[serde(default)]
    pub include: Vec<String>,
}

/// `POST /v1/vms/{name}/segments`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachSegmentRequest {
    /// `NAME` or `NAME@GENERATION`.
    pub segment: String,
    /// Only attach the device; don't have the guest lay it over its files.
    #[serde(default)]
    pub no_lay: bool,
    /// Have the guest compare all bytes with its own files first, not only names, sizes and times.
    #[serde(default)]
    pub content: bool,
    /// Only if no other VM maps any generation of it, and none may until this VM takes it off or
    /// ends: what its guest writes becomes the next generation (`from` = `vm:NAME`).
    #[serde(default)]
    pub writer: bool,
}

/// What a guest has done with a segment.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct AttachedSegment {
    /// What is mapped, and where the guest sees it.
    pub segment: VmSegment,
    /// What the agent said of it, if it did something.
    #[schema(value_type = Option<Object>)]
    pub report: Option<serde_json::Value>,
}

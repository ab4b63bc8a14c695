//! API paths for segments: build, list, verify, remove, attach and detach segments, and rank files
//! by the memory that a segment with them would save.

use axum::extract::Path as UrlPath;
use memfold_api::{
    AttachSegmentRequest, AttachedSegment, BuildRequest, BuildResult, ErrorBody, RankRequest,
};
use memfold_segment::{Ranked, SegmentInfo};
use memfold_snapshot::Step;

use super::answer::{Answered, Asked, Named, Served, blocking};

/// Returns all segments, with their users and sizes.
#[utoipa::path(get, path = "/v1/segments", responses((status = 200, body = Vec<SegmentInfo>)))]
pub(super) async fn segments(daemon: Served) -> Answered<Vec<SegmentInfo>> {
    blocking(daemon, |d| d.segments().list()).await
}

/// Builds a segment, or the next generation (build) of a segment.
#[utoipa::path(post, path = "/v1/segments", request_body = BuildRequest, responses((status = 200, body = BuildResult), (status = 400, body = ErrorBody)))]
pub(super) async fn build_segment(
    daemon: Served,
    request: Asked<BuildRequest>,
) -> Answered<BuildResult> {
    blocking(daemon, move |d| d.segments().build(&request)).await
}

/// Ranks files by the memory that a segment with these files would save, best first.
#[utoipa::path(post, path = "/v1/segments/rank", request_body = RankRequest, responses((status = 200, body = Vec<Ranked>)))]
pub(super) async fn rank_segments(
    daemon: Served,
    request: Asked<RankRequest>,
) -> Answered<Vec<Ranked>> {
    blocking(daemon, move |d| d.segments().rank(&request)).await
}

/// Removes a segment, or one generation (build) of a segment. Returns the removed generations.
#[utoipa::path(delete, path = "/v1/segments/{name}", responses((status = 200, body = Vec<String>), (status = 409, body = ErrorBody)))]
pub(super) async fn remove_segment(daemon: Served, name: Named) -> Answered<Vec<String>> {
    blocking(daemon, move |d| d.segments().remove(&name)).await
}

/// Verifies a segment. Returns the problem; null if the segment is intact.
#[utoipa::path(post, path = "/v1/segments/{name}/verify", responses((status = 200, body = Option<String>)))]
pub(super) async fn verify_segment(daemon: Served, name: Named) -> Answered<Option<String>> {
    blocking(daemon, move |d| d.segments().verify(&name)).await
}

/// Returns the progress of a segment's build; null: no build is in progress.
#[utoipa::path(get, path = "/v1/segments/{name}/progress", responses((status = 200, body = Option<Step>)))]
pub(super) async fn segment_progress(daemon: Served, name: Named) -> Answered<Option<Step>> {
    blocking(daemon, move |d| Ok(d.segments().progress(&name))).await
}

/// Attaches a segment to a running VM.
#[utoipa::path(post, path = "/v1/vms/{name}/segments", request_body = AttachSegmentRequest, responses((status = 200, body = AttachedSegment), (status = 400, body = ErrorBody)))]
pub(super) async fn attach_segment(
    daemon: Served,
    name: Named,
    request: Asked<AttachSegmentRequest>,
) -> Answered<AttachedSegment> {
    blocking(daemon, move |d| d.segments().attach(&name, &request)).await
}

/// Unmounts a segment in a guest. The segment's device stays until the VM ends.
#[utoipa::path(delete, path = "/v1/vms/{name}/segments/{segment}", responses((status = 200, body = AttachedSegment), (status = 400, body = ErrorBody)))]
pub(super) async fn detach_segment(
    daemon: Served,
    UrlPath((name, segment)): UrlPath<(String, String)>,
) -> Answered<AttachedSegment> {
    blocking(daemon, move |d| d.segments().detach(&name, &segment)).await
}

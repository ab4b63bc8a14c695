//! API paths of snapshots.

use memfold_api::{ErrorBody, RestoreRequest, SaveRequest, VerifyReport, VmInfo};
use memfold_snapshot::{Manifest, SnapshotInfo, Step};

use super::answer::{Answered, Asked, Named, Served, blocking};

/// Returns all snapshots, with the VMs that run from them.
#[utoipa::path(get, path = "/v1/snapshots", responses((status = 200, body = Vec<SnapshotInfo>)))]
pub(super) async fn snapshots(daemon: Served) -> Answered<Vec<SnapshotInfo>> {
    blocking(daemon, |d| d.snapshots().list()).await
}

/// Saves a VM, which continues to run. Returns the snapshot's manifest.
#[utoipa::path(post, path = "/v1/snapshots", request_body = SaveRequest, responses((status = 200, body = Object), (status = 409, body = ErrorBody)))]
pub(super) async fn save_snapshot(
    daemon: Served,
    request: Asked<SaveRequest>,
) -> Answered<Manifest> {
    blocking(daemon, move |d| d.snapshots().save(&request)).await
}

/// Returns the manifest of a snapshot.
#[utoipa::path(get, path = "/v1/snapshots/{name}", responses((status = 200, body = Object), (status = 404, body = ErrorBody)))]
pub(super) async fn snapshot(daemon: Served, name: Named) -> Answered<Manifest> {
    blocking(daemon, move |d| d.snapshots().manifest(&name)).await
}

/// Removes a snapshot that is not in use.
#[utoipa::path(delete, path = "/v1/snapshots/{name}", responses((status = 200), (status = 409, body = ErrorBody)))]
pub(super) async fn remove_snapshot(daemon: Served, name: Named) -> Answered<()> {
    blocking(daemon, move |d| d.snapshots().remove(&name)).await
}

/// Reads a snapshot completely, compares its checksums, and tries to start a VM from it.
#[utoipa::path(post, path = "/v1/snapshots/{name}/verify", responses((status = 200, body = VerifyReport)))]
pub(super) async fn verify_snapshot(daemon: Served, name: Named) -> Answered<VerifyReport> {
    blocking(daemon, move |d| d.snapshots().verify(&name)).await
}

/// Returns the progress of the operation on a snapshot; null: none is in progress.
#[utoipa::path(get, path = "/v1/snapshots/{name}/progress", responses((status = 200, body = Option<Step>)))]
pub(super) async fn snapshot_progress(daemon: Served, name: Named) -> Answered<Option<Step>> {
    blocking(daemon, move |d| Ok(d.snapshots().progress(&name))).await
}

/// Starts a VM from a snapshot.
#[utoipa::path(post, path = "/v1/snapshots/{name}/restore", request_body = RestoreRequest, responses((status = 200, body = VmInfo)))]
pub(super) async fn restore(
    daemon: Served,
    name: Named,
    request: Asked<RestoreRequest>,
) -> Answered<VmInfo> {
    blocking(daemon, move |d| d.snapshots().restore(&name, &request)).await
}

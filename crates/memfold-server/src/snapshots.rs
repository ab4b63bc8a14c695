//! API paths for snapshots: save, restore, list, verify and remove snapshots, and copy them to and
//! from object stores.

use axum::extract::Query;
use memfold_api::{
    CompactReport, ErrorBody, ForkReport, ForkRequest, PullBody, PushBody, RekeyReport,
    RekeyRequest, RemoteStore, RemoveOptions, RestoreRequest, SaveRequest, VerifyReport, VmInfo,
};
use memfold_snapshot::{Manifest, SnapshotInfo, Step};
use memfold_transfer::{PullReport, PushReport, RemoteSnapshot, RemoveReport};

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
    blocking(daemon, move |d| d.snapshots().public_manifest(&name)).await
}

/// Saves a running VM at this instant as the snapshot from which its forks start, and makes the VM
/// share the snapshot's memory.
#[utoipa::path(post, path = "/v1/vms/{name}/fork", request_body = ForkRequest, responses((status = 200, body = ForkReport), (status = 409, body = ErrorBody)))]
pub(super) async fn fork(
    daemon: Served,
    name: Named,
    request: Asked<ForkRequest>,
) -> Answered<ForkReport> {
    blocking(daemon, move |d| d.snapshots().fork(&name, &request)).await
}

/// Makes a layer complete, so that it needs no other snapshot.
#[utoipa::path(post, path = "/v1/snapshots/{name}/compact", responses((status = 200, body = CompactReport), (status = 409, body = ErrorBody)))]
pub(super) async fn compact(daemon: Served, name: Named) -> Answered<CompactReport> {
    blocking(daemon, move |d| d.snapshots().compact(&name)).await
}

/// Changes the key of an encrypted snapshot. VMs that run from the snapshot go on.
#[utoipa::path(post, path = "/v1/snapshots/{name}/rekey", request_body = RekeyRequest, responses((status = 200, body = RekeyReport), (status = 400, body = ErrorBody)))]
pub(super) async fn rekey(
    daemon: Served,
    name: Named,
    request: Asked<RekeyRequest>,
) -> Answered<RekeyReport> {
    blocking(daemon, move |d| d.snapshots().rekey(&name, &request)).await
}

/// Removes a snapshot that is not in use.
#[utoipa::path(delete, path = "/v1/snapshots/{name}", params(RemoveOptions), responses((status = 200), (status = 409, body = ErrorBody)))]
pub(super) async fn remove_snapshot(
    daemon: Served,
    name: Named,
    Query(options): Query<RemoveOptions>,
) -> Answered<()> {
    blocking(daemon, move |d| {
        d.snapshots().refuse_if_defined(&name)?;
        if options.merge {
            d.snapshots().remove_and_merge(&name)
        } else {
            d.snapshots().remove(&name)
        }
    })
    .await
}

/// Reads a snapshot completely, compares its checksums, and tries to start a VM from the snapshot.
#[utoipa::path(post, path = "/v1/snapshots/{name}/verify", responses((status = 200, body = VerifyReport)))]
pub(super) async fn verify_snapshot(daemon: Served, name: Named) -> Answered<VerifyReport> {
    blocking(daemon, move |d| d.snapshots().verify(&name)).await
}

/// Returns the progress of the operation on a snapshot; null: no operation is in progress.
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

/// Copies a snapshot to an object store. Chunks that the store has are not sent again.
#[utoipa::path(post, path = "/v1/snapshots/{name}/push", request_body = PushBody, responses((status = 200, body = PushReport), (status = 409, body = ErrorBody)))]
pub(super) async fn push(
    daemon: Served,
    name: Named,
    Asked(body): Asked<PushBody>,
) -> Answered<PushReport> {
    blocking(daemon, move |d| d.snapshots().push(&name, body)).await
}

/// Copies a snapshot from an object store. A repeated request continues an interrupted copy.
#[utoipa::path(post, path = "/v1/snapshots/{name}/pull", request_body = PullBody, responses((status = 200, body = PullReport), (status = 409, body = ErrorBody)))]
pub(super) async fn pull(
    daemon: Served,
    name: Named,
    Asked(body): Asked<PullBody>,
) -> Answered<PullReport> {
    blocking(daemon, move |d| d.snapshots().pull(&name, body)).await
}

/// Returns the snapshots in an object store. The store's address is in the body, because it may be
/// secret.
#[utoipa::path(post, path = "/v1/remote-snapshots/list", request_body = RemoteStore, responses((status = 200, body = Vec<RemoteSnapshot>)))]
pub(super) async fn remote_snapshots(
    daemon: Served,
    Asked(store): Asked<RemoteStore>,
) -> Answered<Vec<RemoteSnapshot>> {
    blocking(daemon, move |d| d.snapshots().list_remote(&store.url)).await
}

/// Removes a snapshot from an object store, and the chunks that no other snapshot there needs.
#[utoipa::path(post, path = "/v1/remote-snapshots/{name}/remove", request_body = RemoteStore, responses((status = 200, body = RemoveReport), (status = 404, body = ErrorBody)))]
pub(super) async fn remove_remote_snapshot(
    daemon: Served,
    name: Named,
    Asked(store): Asked<RemoteStore>,
) -> Answered<RemoveReport> {
    blocking(daemon, move |d| {
        d.snapshots().remove_remote(&name, &store.url)
    })
    .await
}

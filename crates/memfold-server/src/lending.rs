//! API paths of lending and borrowing, and of the lease registry that other daemons use.

use axum::Json;
use axum::extract::{Extension, Path as UrlPath};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use memfold_api::{BorrowRequest, Borrowed, ErrorBody, LeaseReport, LendRequest};
use memfold_daemon::DaemonError;
use memfold_lend::calls::{Answer, Call};
use memfold_lend::lvm::Volume;
use memfold_lend::{Lease, LeaseId, LenderStatus};
use memfold_snapshot::Step;

use super::access::Visitor;
use super::answer::{Answered, Asked, Named, Served, blocking, refusal_with_hint};

/// Returns the status of this host's lending; null: this host does not lend.
#[utoipa::path(get, path = "/v1/lend", responses((status = 200, body = Option<Object>)))]
pub(super) async fn lending(daemon: Served) -> Answered<Option<LenderStatus>> {
    blocking(daemon, |d| Ok(d.lending().status())).await
}

/// Begins to lend RAM of this host, or changes the amount.
#[utoipa::path(post, path = "/v1/lend", request_body = LendRequest, responses((status = 200, body = Object), (status = 501, body = ErrorBody)))]
pub(super) async fn lend(daemon: Served, request: Asked<LendRequest>) -> Answered<LenderStatus> {
    blocking(daemon, move |d| d.lending().lend(&request)).await
}

/// Recalls all leases and ends lending.
#[utoipa::path(delete, path = "/v1/lend", responses((status = 200, body = Option<Object>)))]
pub(super) async fn lend_no_more(daemon: Served) -> Answered<Option<LenderStatus>> {
    blocking(daemon, |d| Ok(d.lending().stop())).await
}

/// Moves a VM's swap disk to lent RAM.
#[utoipa::path(post, path = "/v1/vms/{name}/borrow", request_body = BorrowRequest, responses((status = 200, body = Borrowed), (status = 409, body = ErrorBody)))]
pub(super) async fn borrow(
    daemon: Served,
    name: Named,
    request: Asked<BorrowRequest>,
) -> Answered<Borrowed> {
    blocking(daemon, move |d| {
        d.swap_disks().borrow_memory(&name, &request)
    })
    .await
}

/// Moves a VM's swap disk back to this host's disk.
#[utoipa::path(post, path = "/v1/vms/{name}/return", responses((status = 200, body = Borrowed), (status = 404, body = ErrorBody)))]
pub(super) async fn give_back(daemon: Served, name: Named) -> Answered<Borrowed> {
    blocking(daemon, move |d| d.swap_disks().return_memory(&name)).await
}

/// Returns how far the move of a VM's swap disk to lent RAM or back has come; null: the disk is not
/// being moved.
#[utoipa::path(get, path = "/v1/vms/{name}/swap/progress", responses((status = 200, body = Option<Step>)))]
pub(super) async fn swap_progress(daemon: Served, name: Named) -> Answered<Option<Step>> {
    blocking(daemon, move |d| Ok(d.swap_disks().progress(&name))).await
}

/// Puts an LVM swap volume of this host on lent RAM.
#[utoipa::path(post, path = "/v1/volumes/{group}/{name}/borrow", request_body = BorrowRequest, responses((status = 200, body = Borrowed), (status = 409, body = ErrorBody)))]
pub(super) async fn borrow_for_volume(
    daemon: Served,
    UrlPath((group, name)): UrlPath<(String, String)>,
    request: Asked<BorrowRequest>,
) -> Answered<Borrowed> {
    blocking(daemon, move |d| {
        d.swap_volumes().borrow(&volume(&group, &name)?, &request)
    })
    .await
}

/// Takes an LVM swap volume off lent RAM.
#[utoipa::path(post, path = "/v1/volumes/{group}/{name}/return", responses((status = 200, body = Borrowed), (status = 409, body = ErrorBody)))]
pub(super) async fn return_volume(
    daemon: Served,
    UrlPath((group, name)): UrlPath<(String, String)>,
) -> Answered<Borrowed> {
    blocking(daemon, move |d| {
        d.swap_volumes().give_back(&volume(&group, &name)?)
    })
    .await
}

/// Returns how far the move of an LVM swap volume to lent RAM or back has come; null: the volume is
/// not being moved.
#[utoipa::path(get, path = "/v1/volumes/{group}/{name}/swap/progress", responses((status = 200, body = Option<Step>)))]
pub(super) async fn volume_progress(
    daemon: Served,
    UrlPath((group, name)): UrlPath<(String, String)>,
) -> Answered<Option<Step>> {
    blocking(daemon, move |d| {
        Ok(d.swap_volumes().progress(&volume(&group, &name)?))
    })
    .await
}

fn volume(group: &str, name: &str) -> Result<Volume, DaemonError> {
    let parsed = format!("{group}/{name}").parse();
    parsed.map_err(DaemonError::BadRequest)
}

/// Returns all leases and lenders, and the loans of this host's VMs and volumes.
#[utoipa::path(get, path = "/v1/leases", responses((status = 200, body = LeaseReport)))]
pub(super) async fn leases(daemon: Served) -> Answered<LeaseReport> {
    blocking(daemon, |d| d.reports().leases()).await
}

/// Recalls a lease that this host has granted, by its number. The borrower has 10 s to return the
/// memory, and one more second for each 20 MiB if the lender holds the only copy. Returns the lease
/// as it was before.
#[utoipa::path(post, path = "/v1/leases/{id}/return", responses((status = 200, body = Object), (status = 409, body = ErrorBody)))]
pub(super) async fn recall_lease(daemon: Served, UrlPath(id): UrlPath<u64>) -> Answered<Lease> {
    blocking(daemon, move |d| d.leases().recall(LeaseId(id))).await
}

/// Makes a lender usable again that was distrusted because it had served wrong bytes. Returns
/// whether the lender was distrusted.
#[utoipa::path(delete, path = "/v1/lenders/{name}/distrust", responses((status = 200, body = bool)))]
pub(super) async fn trust(daemon: Served, name: Named) -> Answered<bool> {
    blocking(daemon, move |d| Ok(d.leases().trust(&name))).await
}

/// Executes a call of another daemon at the lease registry that this daemon serves.
#[utoipa::path(post, path = "/v1/registry", request_body = Object, responses((status = 200, body = Object), (status = 400, body = ErrorBody)))]
pub(super) async fn registry(
    daemon: Served,
    Extension(visitor): Extension<Visitor>,
    call: Asked<Call>,
) -> Response {
    // A host may act only in its own name: it can neither end leases of other hosts nor read their
    // keys.
    if let (Some(host), Some(named)) = (&visitor.host, call.speaks_for()) {
        if host != named {
            return refusal_with_hint(
                StatusCode::FORBIDDEN,
                &format!(
                    "the token belongs to host '{host}', but the request is for host '{named}'"
                ),
                "each host needs its own token: run 'memfold host add NAME' there, with the NAME of 'memfold serve --host' here",
            );
        }
    }
    if let (Some(_), Call::Publish { endpoint, .. }) = (&visitor.host, &call.0) {
        if let Err(error) = endpoint.check_of_another_host() {
            return Json(Answer::Refused(error)).into_response();
        }
    }
    blocking(daemon, move |d| d.leases().call(&call))
        .await
        .into_response()
}

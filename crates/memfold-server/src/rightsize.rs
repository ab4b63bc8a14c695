//! API paths for right-sizing: how much memory each VM should have, and what the operator allows.

use axum::extract::Query;
use memfold_api::{ErrorBody, RightsizeQuery, RightsizeReport, RightsizeRequest, Sizing};
use memfold_daemon::RIGHTSIZE_EVENTS as EVENTS;

use super::answer::{Answered, Asked, Named, Served, blocking};

/// Returns how much memory each VM should have, and the last orders.
#[utoipa::path(get, path = "/v1/rightsize", params(RightsizeQuery), responses((status = 200, body = RightsizeReport)))]
pub(super) async fn rightsize(
    daemon: Served,
    Query(query): Query<RightsizeQuery>,
) -> Answered<RightsizeReport> {
    let events = query.events.map_or(EVENTS, |events| events as usize);
    blocking(daemon, move |d| Ok(d.rightsizing().report(events))).await
}

/// Changes whether the daemon changes the memory of VMs, until the daemon ends.
#[utoipa::path(put, path = "/v1/rightsize", request_body = RightsizeRequest, responses((status = 200, body = RightsizeReport)))]
pub(super) async fn set_rightsize(
    daemon: Served,
    request: Asked<RightsizeRequest>,
) -> Answered<RightsizeReport> {
    blocking(daemon, move |d| Ok(d.rightsizing().set_mode(request.mode))).await
}

/// Changes the limits of a VM's size, until the VM ends.
#[utoipa::path(put, path = "/v1/vms/{name}/sizing", request_body = Sizing, responses((status = 200, body = Sizing), (status = 400, body = ErrorBody)))]
pub(super) async fn set_sizing(
    daemon: Served,
    name: Named,
    request: Asked<Sizing>,
) -> Answered<Sizing> {
    blocking(daemon, move |d| d.rightsizing().set_sizing(&name, *request)).await
}

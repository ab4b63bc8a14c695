//! API paths for definitions of VMs: list, define, undefine, start.

use axum::extract::Query;
use memfold_api::{
    AutostartRequest, DefinitionInfo, ErrorBody, RunOptions, SetReport, SetRequest, VmInfo,
};
use memfold_vm::Definition;

use super::answer::{Answered, Asked, Named, Served, blocking};

/// Returns all defined VMs.
#[utoipa::path(get, path = "/v1/definitions", responses((status = 200, body = Vec<DefinitionInfo>)))]
pub(super) async fn definitions(daemon: Served) -> Answered<Vec<DefinitionInfo>> {
    blocking(daemon, |d| d.definitions().list()).await
}

/// Returns a defined VM.
#[utoipa::path(get, path = "/v1/definitions/{name}", responses((status = 200, body = DefinitionInfo), (status = 404, body = ErrorBody)))]
pub(super) async fn definition(daemon: Served, name: Named) -> Answered<DefinitionInfo> {
    blocking(daemon, move |d| d.definitions().get(&name)).await
}

/// Checks and stores the definition of a VM, and replaces an older one. A running VM of this name
/// is not changed.
#[utoipa::path(put, path = "/v1/definitions/{name}", request_body = Definition, responses((status = 200, body = DefinitionInfo), (status = 400, body = ErrorBody)))]
pub(super) async fn define(
    daemon: Served,
    name: Named,
    definition: Asked<Definition>,
) -> Answered<DefinitionInfo> {
    blocking(daemon, move |d| d.definitions().define(&name, definition.0)).await
}

/// Removes the definition of a VM. A running VM of this name is not changed.
#[utoipa::path(delete, path = "/v1/definitions/{name}", responses((status = 200), (status = 404, body = ErrorBody)))]
pub(super) async fn undefine(daemon: Served, name: Named) -> Answered<()> {
    blocking(daemon, move |d| d.definitions().undefine(&name)).await
}

/// Sets whether the daemon starts a VM after each boot of the host.
#[utoipa::path(put, path = "/v1/definitions/{name}/autostart", request_body = AutostartRequest, responses((status = 200, body = DefinitionInfo), (status = 404, body = ErrorBody)))]
pub(super) async fn autostart(
    daemon: Served,
    name: Named,
    request: Asked<AutostartRequest>,
) -> Answered<DefinitionInfo> {
    blocking(daemon, move |d| {
        d.definitions().set_autostart(&name, request.autostart)
    })
    .await
}

/// Starts a defined VM.
#[utoipa::path(post, path = "/v1/definitions/{name}/start", params(RunOptions), responses((status = 200, body = VmInfo), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn start(
    daemon: Served,
    name: Named,
    Query(options): Query<RunOptions>,
) -> Answered<VmInfo> {
    blocking(daemon, move |d| {
        d.definitions().start(&name, options.despite_brake)
    })
    .await
}

/// Changes settings of a VM: of the running VM if that is possible, and in the VM's definition.
#[utoipa::path(post, path = "/v1/vms/{name}/settings", request_body = SetRequest, responses((status = 200, body = SetReport), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn set(
    daemon: Served,
    name: Named,
    request: Asked<SetRequest>,
) -> Answered<SetReport> {
    blocking(daemon, move |d| d.definitions().set(&name, &request)).await
}

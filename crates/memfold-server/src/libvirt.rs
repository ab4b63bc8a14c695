//! API paths for libvirt domains: list, enable, disable and adopt domains.

use memfold_api::{ErrorBody, LibvirtEnableRequest, LibvirtRequest, VmInfo};
use memfold_libvirt::{Change, DomainStatus};

use super::answer::{Answered, Asked, Served, blocking};

/// Returns the domains of libvirt: whether they are enabled, their trust domain, and their state.
/// Null: libvirt is not installed, or this daemon does not use it.
#[utoipa::path(get, path = "/v1/libvirt", responses((status = 200, body = Option<Vec<DomainStatus>>), (status = 400, body = ErrorBody)))]
pub(super) async fn domains(daemon: Served) -> Answered<Option<Vec<DomainStatus>>> {
    blocking(daemon, |d| d.libvirt().list()).await
}

/// Adopts a running libvirt domain now. (The daemon also adopts enabled domains by itself.)
#[utoipa::path(post, path = "/v1/libvirt/attach", request_body = LibvirtRequest, responses((status = 200, body = VmInfo)))]
pub(super) async fn attach_libvirt(
    daemon: Served,
    request: Asked<LibvirtRequest>,
) -> Answered<VmInfo> {
    blocking(daemon, move |d| d.libvirt().attach(&request.domain)).await
}

/// Changes a domain's XML, so that the domain starts with memfold from now on.
#[utoipa::path(post, path = "/v1/libvirt/enable", request_body = LibvirtEnableRequest, responses((status = 200, body = Change), (status = 400, body = ErrorBody)))]
pub(super) async fn enable(
    daemon: Served,
    request: Asked<LibvirtEnableRequest>,
) -> Answered<Change> {
    blocking(daemon, move |d| {
        d.libvirt()
            .enable(&request.domain, request.trust_domain.as_deref())
    })
    .await
}

/// Restores a domain's XML to its state before the domain was enabled.
#[utoipa::path(post, path = "/v1/libvirt/disable", request_body = LibvirtRequest, responses((status = 200, body = Change), (status = 400, body = ErrorBody)))]
pub(super) async fn disable(daemon: Served, request: Asked<LibvirtRequest>) -> Answered<Change> {
    blocking(daemon, move |d| d.libvirt().disable(&request.domain)).await
}

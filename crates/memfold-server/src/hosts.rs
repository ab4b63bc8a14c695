//! API paths for hosts that may call this daemon's lease registry over TCP: add, list and remove
//! hosts.

use std::sync::Arc;

use axum::Json;
use axum::extract::Extension;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use memfold_api::{ErrorBody, HostRequest, HostToken};
use memfold_lend::registry::check_name;
use tokio::task::block_in_place;

use super::access::Access;
use super::answer::{Asked, Named, failed, refusal, refusal_with_hint};

/// Action that fails if the list cannot be written.
const WRITE: &str = "write the list of hosts";

/// Returns the names of the hosts that have a token.
#[utoipa::path(get, path = "/v1/hosts", responses((status = 200, body = Vec<String>)))]
pub(super) async fn hosts(Extension(access): Extension<Arc<Access>>) -> Json<Vec<String>> {
    Json(access.hosts().names())
}

/// Makes a token for a host. An earlier token of the host becomes invalid.
#[utoipa::path(post, path = "/v1/hosts", request_body = HostRequest, responses((status = 200, body = HostToken), (status = 409, body = ErrorBody)))]
pub(super) async fn add(
    Extension(access): Extension<Arc<Access>>,
    request: Asked<HostRequest>,
) -> Response {
    if let Err(error) = check_name("host", &request.host) {
        return refusal(StatusCode::BAD_REQUEST, &error.to_string());
    }
    if access.urls.is_empty() {
        return refusal_with_hint(
            StatusCode::CONFLICT,
            "other hosts cannot reach this daemon",
            "start the daemon with an address: memfold serve --listen ADDRESS:PORT --tls-cert FILE --tls-key FILE",
        );
    }
    let urls = access.urls.iter();
    let urls = urls.map(|url| url.trim_end_matches('/').to_owned());
    // This writes to a disk, which may take time.
    match block_in_place(|| access.hosts().add(&request.host)) {
        Ok(token) => Json(HostToken {
            host: request.0.host,
            token,
            urls: urls.collect(),
        })
        .into_response(),
        Err(error) => failed(WRITE, &error),
    }
}

/// Removes a host's token, which is refused from now on. Returns whether the host had a token.
#[utoipa::path(delete, path = "/v1/hosts/{name}", responses((status = 200, body = bool)))]
pub(super) async fn remove(Extension(access): Extension<Arc<Access>>, name: Named) -> Response {
    match block_in_place(|| access.hosts().remove(&name)) {
        Ok(was) => Json(was).into_response(),
        Err(error) => failed(WRITE, &error),
    }
}

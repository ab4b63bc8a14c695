//! API paths for logging in and out, and for reading the audit log.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::{Extension, Query};
use axum::http::header::SET_COOKIE;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use memfold_api::{CodeRequest, ErrorBody, LoginCode, LoginRequest, Role, SessionInfo};
use serde::Deserialize;

use super::access::Access;
use super::access::{AuditEntry, CODE_LIFE, NewSession, SESSION_LIFE, Visitor};
use super::answer::{Asked, failed, refusal, refusal_with_hint};

/// Largest number of audit log entries in one response.
const MOST_ENTRIES: usize = 1000;

/// Returns role and name of the sender.
#[utoipa::path(get, path = "/v1/session", responses((status = 200, body = SessionInfo), (status = 401, body = ErrorBody)))]
pub(super) async fn session(Extension(visitor): Extension<Visitor>) -> Json<SessionInfo> {
    Json(SessionInfo {
        role: visitor.role,
        who: visitor.who,
        via: visitor.via.to_owned(),
    })
}

/// Begins a session. The response sets the session's cookie.
#[utoipa::path(post, path = "/v1/session", request_body = LoginRequest, responses((status = 200, body = Role), (status = 401, body = ErrorBody)))]
pub(super) async fn log_in(
    Extension(access): Extension<Arc<Access>>,
    headers: HeaderMap,
    request: Asked<LoginRequest>,
) -> Response {
    let begun = access.keys().log_in(&request.secret, Instant::now());
    match begun {
        Ok(Some(begun)) => {
            let set = access.set_cookie(&headers, &begun.cookie, SESSION_LIFE);
            let mut response = with_cookie(Json(begun.role).into_response(), &set);
            let noted = NewSession(begun.label, begun.role);
            response.extensions_mut().insert(noted);
            response
        }
        Ok(None) => refusal_with_hint(
            StatusCode::UNAUTHORIZED,
            "neither a token nor a valid login code",
            "a code is valid once, within two minutes; 'memfold dashboard' prints a new one",
        ),
        Err(error) => failed("begin a session", &error),
    }
}

/// Ends the session of the request's cookie.
#[utoipa::path(delete, path = "/v1/session", responses((status = 200)))]
pub(super) async fn log_out(
    Extension(access): Extension<Arc<Access>>,
    Extension(visitor): Extension<Visitor>,
    headers: HeaderMap,
) -> Response {
    if let Some(cookie) = visitor.cookie {
        access.keys().log_out(&cookie);
    }
    let forget = access.set_cookie(&headers, "", Duration::ZERO);
    with_cookie(Json(()).into_response(), &forget)
}

fn with_cookie(mut response: Response, cookie: &str) -> Response {
    if let Ok(value) = HeaderValue::from_str(cookie) {
        response.headers_mut().insert(SET_COOKIE, value);
    }
    response
}

/// Makes a code for one login of a browser.
#[utoipa::path(post, path = "/v1/session/codes", request_body = CodeRequest, responses((status = 200, body = LoginCode), (status = 409, body = ErrorBody)))]
pub(super) async fn new_code(
    Extension(access): Extension<Arc<Access>>,
    Extension(visitor): Extension<Visitor>,
    request: Asked<CodeRequest>,
) -> Response {
    if request.role == Role::Host {
        return refusal_with_hint(
            StatusCode::BAD_REQUEST,
            "a host's token cannot log in",
            "a host uses its own token: memfold host add NAME",
        );
    }
    if !visitor.role.may(request.role) {
        let who = &visitor.who;
        let text = format!("{who} may only read, and so cannot grant the role to operate");
        return refusal(StatusCode::FORBIDDEN, &text);
    }
    if access.urls.is_empty() {
        return refusal_with_hint(
            StatusCode::CONFLICT,
            "this daemon does not serve browsers",
            "start the daemon with an address: memfold serve --listen 127.0.0.1:8420",
        );
    }
    let mut keys = access.keys();
    match keys.new_code(request.role, &visitor.who, Instant::now()) {
        Err(error) => failed("create a login code", &error),
        Ok(code) => {
            let urls = access.urls.iter();
            Json(LoginCode {
                urls: urls.map(|url| format!("{url}#login={code}")).collect(),
                role: request.role,
                valid_s: CODE_LIFE.as_secs(),
            })
            .into_response()
        }
    }
}

/// Query of a request for the audit log: the number of entries.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct AuditQuery {
    count: Option<usize>,
}

/// Returns entries of the audit log, newest first; `?count=N`, 200 by default.
#[utoipa::path(get, path = "/v1/audit", params(("count" = Option<usize>, Query)), responses((status = 200, body = Vec<AuditEntry>)))]
pub(super) async fn audit(
    Extension(access): Extension<Arc<Access>>,
    Query(query): Query<AuditQuery>,
) -> Response {
    let count = query.count.unwrap_or(200).min(MOST_ENTRIES);
    match tokio::task::block_in_place(|| access.audit.last(count)) {
        Ok(entries) => Json(entries).into_response(),
        Err(error) => failed("read the audit log", &error),
    }
}

//! Checks every request to the daemon's API before it is executed: where the request comes from,
//! who sent it, and whether the sender's role permits it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, COOKIE, REFERRER_POLICY, RETRY_AFTER,
    WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use memfold_api::{REGISTRY_PATH, Role};
use tokio::sync::OwnedSemaphorePermit;

use super::audit::AuditedRequest;
use super::counts::Why;
use super::origin::{OWN_HEADER, host_is_ours, is_same_origin};
use super::peer::Peer;
use super::state::{Access, OF_ONE_HOST};
use crate::answer::{Told, refusal, refusal_with_hint};
use crate::limits::{MAX_BODY, MOST_FINGERPRINTS};
use crate::paths::{AUDIT_PATH, CODES_PATH, PLACE_PATH, SESSION_PATH};
use crate::web;

/// Longest body of a login request, in bytes: a token or a code, with the JSON around it.
const MOST_OF_A_LOGIN: usize = 4 << 10;
/// Time limit for receiving a request's body.
const BODY_TIME: Duration = Duration::from_secs(30);

/// Content security policy of the dashboard: scripts, styles and data only from this daemon; no
/// inline scripts, no framing, no form targets.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Sender of a request that was admitted.
#[derive(Clone, Debug)]
pub(crate) struct Visitor {
    /// Role of the request's sender.
    pub role: Role,
    /// Name of the request's sender for the audit log.
    pub who: String,
    /// Cookie of the sender's session; `None` if the request had no session.
    pub cookie: Option<String>,
    /// Where the request was received: `socket` (Unix socket) or `tcp`.
    pub via: &'static str,
    /// Name of the host whose token the request had; `None` for other requests.
    pub host: Option<String>,
}

/// Admits or refuses a request. Logs every request that may change something, and every refusal.
pub(crate) async fn guard(
    State(access): State<Arc<Access>>,
    mut request: Request,
    next: Next,
) -> Response {
    let began = Instant::now();
    let Some(peer) = request.extensions_mut().remove::<Peer>() else {
        return refusal(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the connection has no peer: this is a bug of memfold",
        );
    };
    let path = request.uri().path().to_owned();
    let method = request.method().clone();
    let admitted = admit(&access, &peer, &request);
    let who = match &admitted {
        Ok(Some(visitor)) => visitor.who.clone(),
        _ => login_name(&peer),
    };
    let done = match admitted {
        Err(refused) => Err(refused),
        Ok(visitor) if is_change(&method) => {
            change(&access, &peer, visitor, request, next, began).await
        }
        Ok(visitor) => carry_out(&access, &peer, visitor, request, next, |_, _| {}).await,
    };
    let mut response = done.unwrap_or_else(|refused| {
        access.refused.add(Why::of(refused.status()));
        let asked = AuditedRequest::refused(&method, &path);
        let took = began.elapsed();
        access.audit.note((&who, None), &asked, &refused, took);
        *refused
    });
    response.extensions_mut().remove::<Told>();
    with_headers(response, &path)
}

/// Executes a request that may change something: reads its body first, and logs the result.
///
/// # Errors
///
/// The response that refuses the request before it is executed; the caller logs it.
async fn change(
    access: &Arc<Access>,
    peer: &Peer,
    visitor: Option<Visitor>,
    request: Request,
    next: Next,
    began: Instant,
) -> Result<Response, Box<Response>> {
    let (who, role) = match &visitor {
        Some(visitor) => (visitor.who.clone(), Some(visitor.role)),
        None => (login_name(peer), None),
    };
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let query = request.uri().query().unwrap_or_default().to_owned();
    let most = match path.as_str() {
        PLACE_PATH => MOST_FINGERPRINTS,
        // The sender of a login is unknown, so the limit is small.
        SESSION_PATH => MOST_OF_A_LOGIN,
        _ => MAX_BODY,
    };
    let (request, body) = whole(request, most).await?;
    let note = move |access: &Access, response: &Response| {
        // A handler may also refuse a wrong token or a missing right; such a refusal is counted
        // here.
        let status = response.status();
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            access.refused.add(Why::of(status));
        }
        let (audit, took) = (&access.audit, began.elapsed());
        if path == REGISTRY_PATH {
            // Hosts call the registry several times a second, and `memfold leases` shows the
            // results. So only attempts to act in another host's name are logged.
            if status == StatusCode::FORBIDDEN {
                let asked = AuditedRequest::refused(&method, &path);
                audit.note((&who, None), &asked, response, took);
            }
            return;
        }
        // Programs extend their VMs again and again.
        if path.starts_with("/v1/vms/") && path.ends_with("/extend") && status.is_success() {
            return;
        }
        let asked = AuditedRequest {
            method: &method,
            path: &path,
            query: &query,
            // A longer body contains fingerprints, of which no details are logged.
            body: if body.len() > MAX_BODY { &[] } else { &body },
        };
        audit.note((&who, role), &asked, response, took);
    };
    carry_out(access, peer, visitor, request, next, note).await
}

/// Executes a request if the limits permit it, and passes the response to `note`.
///
/// # Errors
///
/// The response that refuses the request because of the limits; the caller logs it.
async fn carry_out(
    access: &Arc<Access>,
    peer: &Peer,
    visitor: Option<Visitor>,
    mut request: Request,
    next: Next,
    note: impl FnOnce(&Access, &Response) + Send + 'static,
) -> Result<Response, Box<Response>> {
    let turn = turn(access, peer, visitor.as_ref())?;
    if let Some(visitor) = visitor {
        request.extensions_mut().insert(visitor);
    }
    let access = access.clone();
    let work = async move {
        let _turn = turn;
        let response = next.run(request).await;
        note(&access, &response);
        response
    };
    Ok(to_the_end(work).await)
}

/// Completes the work even if the client disconnects, so that the result is logged and the limits
/// count the work until its end.
async fn to_the_end(work: impl Future<Output = Response> + Send + 'static) -> Response {
    tokio::spawn(work).await.unwrap_or_else(|_| {
        refusal(
            StatusCode::INTERNAL_SERVER_ERROR,
            "a task of the daemon ended unexpectedly",
        )
    })
}

fn login_name(peer: &Peer) -> String {
    match peer {
        Peer::Unix { who, .. } => who.clone(),
        Peer::Tcp { address, .. } => address.ip().to_string(),
    }
}

/// Returns whether a request with this method may change something.
pub(crate) fn is_change(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Returns the role that a request needs; `None` if it needs none.
fn needed(method: &Method, path: &str) -> Option<Role> {
    if path == REGISTRY_PATH {
        return Some(Role::Host);
    }
    if path == SESSION_PATH {
        return (*method != Method::POST).then_some(Role::Read);
    }
    if !is_change(method) {
        if web::is_page(path) {
            return None;
        }
        // A guest may print secrets on its console.
        let secret = path == AUDIT_PATH || path.starts_with("/v1/vms/") && path.ends_with("/logs");
        return Some(if secret { Role::Operate } else { Role::Read });
    }
    // Every role may make a login code, because the handler grants at most the sender's own role.
    let own = path == CODES_PATH;
    Some(if own { Role::Read } else { Role::Operate })
}

/// Identifies the sender and checks its rights. Returns `None` if the request needs no login and
/// has none.
///
/// # Errors
///
/// The response that refuses the request.
fn admit(
    access: &Access,
    peer: &Peer,
    request: &Request,
) -> Result<Option<Visitor>, Box<Response>> {
    let (method, path) = (request.method(), request.uri().path());
    let needed = needed(method, path);
    let visitor = match peer {
        Peer::Unix { who, role } => {
            let Some(role) = role else {
                return Err(Box::new(refusal_with_hint(
                    StatusCode::FORBIDDEN,
                    &format!("{who} may not use this daemon"),
                    "run this as root, or join a group with access: memfold-read or memfold-operate, or the groups given to \
                     'memfold serve'",
                )));
            };
            // Browsers do not use Unix sockets. A header that only browsers send means here that a
            // proxy exposes the socket, which any web page could then use.
            let headers = request.headers();
            if headers.contains_key(axum::http::header::ORIGIN)
                || headers.contains_key("sec-fetch-site")
            {
                return Err(Box::new(refusal_with_hint(
                    StatusCode::FORBIDDEN,
                    "browsers are not served over the socket",
                    "start the daemon with --listen, and open the address that 'memfold dashboard' prints",
                )));
            }
            Some(Visitor {
                role: *role,
                who: who.clone(),
                cookie: None,
                via: "socket",
                host: None,
            })
        }
        Peer::Tcp { address, tls } => {
            let headers = request.headers();
            from_our_page(access, headers, method, *tls)?;
            let visitor = recognize(access, headers, &address.ip().to_string());
            if visitor.is_none() && needed.is_some() {
                let mut response = refusal_with_hint(
                    StatusCode::UNAUTHORIZED,
                    "this request needs a login",
                    "run 'memfold dashboard' on the host, and open the address that it prints",
                );
                let scheme = HeaderValue::from_static("Bearer");
                response.headers_mut().insert(WWW_AUTHENTICATE, scheme);
                return Err(Box::new(response));
            }
            if let Some(visitor) = &visitor {
                if is_change(method)
                    && visitor.cookie.is_some()
                    && !headers.contains_key(OWN_HEADER)
                {
                    return Err(Box::new(refusal(
                        StatusCode::FORBIDDEN,
                        "a change by a session needs the header 'x-memfold', which pages of other sites cannot send",
                    )));
                }
            }
            visitor
        }
    };
    match (&visitor, needed) {
        (Some(visitor), Some(needed)) if !visitor.role.may(needed) => {
            Err(Box::new(not_allowed(visitor, needed)))
        }
        _ => Ok(visitor),
    }
}

fn not_allowed(visitor: &Visitor, needed: Role) -> Response {
    let who = &visitor.who;
    let (why, hint) = match (visitor.role, needed) {
        (Role::Host, _) => (
            format!("{who} may use the registry of leases, and nothing else"),
            "use the read or the operate token, or 'memfold dashboard' on the host",
        ),
        (_, Role::Host) => (
            format!("{who} may read, but only hosts may use the registry"),
            "register the host with this daemon: memfold host add NAME",
        ),
        _ => (
            format!("{who} may only read, and this needs the role to operate"),
            "log in with the operate token, or as a member of the group that may operate",
        ),
    };
    refusal_with_hint(StatusCode::FORBIDDEN, &why, hint)
}

fn from_our_page(
    access: &Access,
    headers: &HeaderMap,
    method: &Method,
    tls: bool,
) -> Result<(), Box<Response>> {
    if !host_is_ours(headers, &access.names) {
        return Err(Box::new(refusal_with_hint(
            StatusCode::MISDIRECTED_REQUEST,
            "this daemon does not answer to that name",
            "use an address or 'localhost', or start the daemon with --allow-host NAME",
        )));
    }
    if is_change(method) && !is_same_origin(headers, tls, &access.public) {
        return Err(Box::new(refusal_with_hint(
            StatusCode::FORBIDDEN,
            "a page of another site sent this",
            "if that page is the dashboard behind a proxy, start the daemon with --public-url and the address that the browser shows",
        )));
    }
    Ok(())
}

/// Identifies the sender by the header `Authorization: Bearer TOKEN`, or by the session's cookie.
fn recognize(access: &Access, headers: &HeaderMap, from: &str) -> Option<Visitor> {
    let visitor = |role, who: &str, cookie, host| Visitor {
        role,
        who: format!("{who} from {from}"),
        cookie,
        via: "tcp",
        host,
    };
    if let Some(value) = headers.get(AUTHORIZATION) {
        let token = value.to_str().ok()?.strip_prefix("Bearer ")?;
        let role = access.keys().role_of_token(token);
        let host = access.hosts().with_token(token).map(str::to_owned);
        let (role, who) = match (role, &host) {
            (Some(role), _) => (role, format!("{} token", role.name())),
            (None, Some(host)) => (Role::Host, format!("host '{host}'")),
            (None, None) => return None,
        };
        return Some(visitor(role, &who, None, host));
    }
    let cookie = cookie(headers, &access.cookie_name)?;
    let (role, label) = access.keys().session(&cookie, Instant::now())?;
    Some(visitor(role, &label, Some(cookie), None))
}

fn cookie(headers: &HeaderMap, name: &str) -> Option<String> {
    headers
        .get_all(COOKIE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'))
        .find_map(|pair| {
            let (key, value) = pair.trim().split_once('=')?;
            (key == name).then(|| value.to_owned())
        })
}

/// Takes the permits for a request over TCP or of a reader. Requests of operators on the Unix
/// socket need no permit.
fn turn(
    access: &Access,
    peer: &Peer,
    visitor: Option<&Visitor>,
) -> Result<Vec<OwnedSemaphorePermit>, Box<Response>> {
    if matches!(
        peer,
        Peer::Unix {
            role: Some(Role::Operate),
            ..
        }
    ) {
        return Ok(Vec::new());
    }
    let mut taken = Vec::new();
    if let Some(host) = visitor.and_then(|visitor| visitor.host.as_deref()) {
        let own = access.turns_of(host).try_acquire_owned();
        taken.push(own.map_err(|_| {
            let refusal = refusal_with_hint(
                StatusCode::SERVICE_UNAVAILABLE,
                &format!("host '{host}' already has {OF_ONE_HOST} requests under way"),
                &format!("the registry's disk may be slow; if it is not, find out whether another program uses the host's token ('memfold host add {host}' replaces it)"),
            );
            Box::new(busy(refusal))
        })?);
    }
    let turns = if visitor.is_some_and(|visitor| visitor.role == Role::Host) {
        &access.host_turns
    } else {
        &access.turns
    };
    let turn = turns.clone().try_acquire_owned();
    let many = "too many requests at once";
    let refused = || Box::new(busy(refusal(StatusCode::SERVICE_UNAVAILABLE, many)));
    taken.push(turn.map_err(|_| refused())?);
    Ok(taken)
}

/// Adds to a refusal that the client may try again after a second.
fn busy(mut refusal: Response) -> Response {
    let headers = refusal.headers_mut();
    headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
    refusal
}

/// Reads a request's body into memory, with limits of length and time.
async fn whole(request: Request, most: usize) -> Result<(Request, Bytes), Box<Response>> {
    let too_long = || {
        let text = format!("the request's body is longer than {most} bytes");
        Box::new(refusal(StatusCode::PAYLOAD_TOO_LARGE, &text))
    };
    let (parts, body) = request.into_parts();
    let declared = parts.headers.get(axum::http::header::CONTENT_LENGTH);
    let declared = declared.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|length| length > most as u64) {
        return Err(too_long());
    }
    let read = tokio::time::timeout(BODY_TIME, axum::body::to_bytes(body, most)).await;
    match read {
        Ok(Ok(bytes)) => Ok((Request::from_parts(parts, Body::from(bytes.clone())), bytes)),
        // Without a declared length, the body was probably too long. Otherwise the client has
        // disconnected and receives no response.
        Ok(Err(_)) => Err(too_long()),
        Err(_) => Err(Box::new(refusal(
            StatusCode::REQUEST_TIMEOUT,
            "the request's body did not come in time",
        ))),
    }
}

fn with_headers(mut response: Response, path: &str) -> Response {
    const OPENER: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
    const RESOURCE: HeaderName = HeaderName::from_static("cross-origin-resource-policy");
    let headers = response.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(OPENER, HeaderValue::from_static("same-origin"));
    headers.insert(RESOURCE, HeaderValue::from_static("same-origin"));
    if !web::is_page(path) {
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::{Hosts, Keys};
    use axum::Router;
    use axum::middleware::from_fn_with_state;
    use hyper::service::Service as _;
    use hyper_util::service::TowerToHyperService;
    use tokio::sync::watch;

    #[test]
    fn requests_that_are_too_long_or_too_many_are_audited_and_counted() {
        let records = tempfile::tempdir().unwrap();
        let hosts = Hosts::open(records.path().join("hosts.json")).unwrap();
        let (_daemon, ending) = watch::channel(false);
        let directory = records.path().to_owned();
        let access = Access::new(Keys::default(), hosts, directory, None, ending);
        let routes: Router = Router::new().fallback(|| async {});
        let routes = routes.layer(from_fn_with_state(access.clone(), guard));
        let server = TowerToHyperService::new(routes);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let ask = |role: Role, method: Method, length: usize| {
            let request = axum::http::Request::builder()
                .method(method)
                .uri("/v1/fold")
                .header(axum::http::header::CONTENT_LENGTH, length.to_string())
                .extension(Peer::Unix {
                    who: role.name().to_owned(),
                    role: Some(role),
                });
            let request = request.body(Body::empty()).unwrap();
            runtime.block_on(server.call(request)).unwrap().status()
        };
        assert_eq!(
            ask(Role::Operate, Method::PUT, MAX_BODY + 1),
            StatusCode::PAYLOAD_TOO_LARGE
        );
        assert_eq!(ask(Role::Read, Method::GET, 0), StatusCode::OK);
        let take = || access.turns.clone().try_acquire_owned().ok();
        let taken: Vec<_> = std::iter::from_fn(take).collect();
        assert_eq!(
            ask(Role::Read, Method::GET, 0),
            StatusCode::SERVICE_UNAVAILABLE
        );
        drop(taken);
        let log = access.audit.last(10).unwrap();
        let noted: Vec<(&str, u16)> = log.iter().map(|e| (&*e.who, e.status)).collect();
        assert_eq!(noted, [("read", 503), ("operate", 413)]);
        assert_eq!(access.refused()[3], ("other", 2));
    }

    #[test]
    fn one_host_cannot_occupy_all_requests_of_hosts() {
        let records = tempfile::tempdir().unwrap();
        let hosts = Hosts::open(records.path().join("hosts.json")).unwrap();
        let (_daemon, ending) = watch::channel(false);
        let directory = records.path().to_owned();
        let access = Access::new(Keys::default(), hosts, directory, None, ending);
        let peer = Peer::Tcp {
            address: ([192, 0, 2, 1], 1).into(),
            tls: true,
        };
        let take = |host: &str| {
            let visitor = Visitor {
                role: Role::Host,
                who: host.to_owned(),
                cookie: None,
                via: "tcp",
                host: Some(host.to_owned()),
            };
            turn(&access, &peer, Some(&visitor)).map_err(|refused| refused.status())
        };
        let taken: Vec<_> = (0..OF_ONE_HOST).map(|_| take("a").unwrap()).collect();
        assert_eq!(take("a").unwrap_err(), StatusCode::SERVICE_UNAVAILABLE);
        let _other = take("b").unwrap();
        drop(taken);
        take("a").unwrap();
    }

    #[test]
    fn every_http_request_that_changes_something_needs_the_role_operate() {
        for path in ["/v1/vms", "/v1/fold", "/v1/new-one", "/openapi.json", "/x"] {
            for method in [Method::POST, Method::PUT, Method::DELETE, Method::PATCH] {
                assert_eq!(
                    needed(&method, path),
                    Some(Role::Operate),
                    "{method} {path}"
                );
            }
            assert_eq!(needed(&Method::GET, path), Some(Role::Read), "{path}");
        }
        for secret in ["/v1/audit", "/v1/vms/web/logs"] {
            assert_eq!(needed(&Method::GET, secret), Some(Role::Operate));
        }
    }

    #[test]
    fn the_role_host_may_use_only_the_lease_registry_and_the_role_read_may_not_use_it() {
        for method in [Method::GET, Method::POST, Method::PUT] {
            assert_eq!(needed(&method, "/v1/registry"), Some(Role::Host));
        }
        assert!(Role::Host.may(Role::Host) && Role::Operate.may(Role::Host));
        assert!(!Role::Read.may(Role::Host));
        assert!(!Role::Host.may(Role::Read) && !Role::Host.may(Role::Operate));
        assert!(!Role::Read.may(Role::Operate) && Role::Operate.may(Role::Read));
    }

    #[test]
    fn only_the_start_page_of_the_dashboard_and_the_login_need_no_role() {
        assert_eq!(needed(&Method::GET, "/"), None);
        assert_eq!(needed(&Method::POST, "/"), Some(Role::Operate));
        assert_eq!(needed(&Method::POST, "/v1/session"), None);
        assert_eq!(needed(&Method::GET, "/v1/session"), Some(Role::Read));
        assert_eq!(needed(&Method::POST, "/v1/session/codes"), Some(Role::Read));
    }

    #[test]
    fn a_cookie_is_found_by_its_exact_name() {
        let mut headers = HeaderMap::new();
        let value = HeaderValue::from_static("x-memfold=1; memfold=2; memfolds=3");
        headers.append(COOKIE, value);
        assert_eq!(cookie(&headers, "memfold").as_deref(), Some("2"));
        assert_eq!(cookie(&headers, "fold"), None);
    }
}

//! The table of all API paths, from which the router and the API's description (`OpenAPI`) are
//! made.

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, Extension, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use memfold_api::REGISTRY_PATH;
use memfold_daemon::{Daemon, DaemonError};
use utoipa::OpenApi;

use super::access::Access;
use super::access::{guard, is_change};
use super::answer::{Failure, refusal};
use super::exec_stream::StreamCounts;
use super::limits::{MAX_BODY, MOST_FINGERPRINTS};
use super::paths::{AUDIT_PATH, CODES_PATH, PLACE_PATH, SESSION_PATH};
use super::{
    definitions, event_stream, exec_stream, hosts, lending, libvirt, live, metrics, planning,
    reports, rightsize, segments, session, snapshots, vms, web,
};

/// Makes the description of the API and its router from a table of the handlers, one a line:
/// method, path, handler.
macro_rules! api {
    ($($method:ident $path:tt $module:ident::$handler:ident;)*) => {
        /// Source of the API's description (`OpenAPI`).
        #[derive(OpenApi)]
        #[openapi(
            info(
                title = "memfold",
                description = "The memfold daemon, over a Unix socket, and over TCP where that is asked for"
            ),
            paths($($module::$handler,)* planning::place),
            // Data of server-sent events, which no path names as its answer.
            components(schemas(memfold_api::EventGap))
        )]
        struct Description;

        fn described() -> Router<Arc<Daemon>> {
            let longer = DefaultBodyLimit::max(MOST_FINGERPRINTS);
            Router::new()
                .route(PLACE_PATH, post(planning::place).layer(longer))
                $(.route($path, $method($module::$handler)))*
        }
    };
}

api! {
    get "/v1/version" reports::version;
    get "/v1/vms" vms::list;
    post "/v1/vms" vms::run;
    post "/v1/attach" vms::attach;
    post "/v1/vms/{name}/stop" vms::stop;
    post "/v1/vms/{name}/pause" vms::pause;
    post "/v1/vms/{name}/resume" vms::resume;
    post "/v1/vms/{name}/extend" vms::extend;
    post "/v1/vms/{name}/reboot" vms::reboot;
    post "/v1/vms/{name}/exec" vms::exec;
    post "/v1/vms/{name}/exec/stream" exec_stream::exec_stream;
    get "/v1/vms/{name}/logs" vms::logs;
    post "/v1/vms/{name}/console" vms::console;
    get "/v1/definitions" definitions::definitions;
    get "/v1/definitions/{name}" definitions::definition;
    put "/v1/definitions/{name}" definitions::define;
    delete "/v1/definitions/{name}" definitions::undefine;
    put "/v1/definitions/{name}/autostart" definitions::autostart;
    post "/v1/definitions/{name}/start" definitions::start;
    post "/v1/vms/{name}/settings" definitions::set;
    get "/v1/report" reports::report;
    get "/v1/fold" reports::fold;
    put "/v1/fold" reports::set_fold;
    get "/v1/debt" reports::debt;
    put "/v1/debt" reports::set_debt;
    get "/v1/rightsize" rightsize::rightsize;
    put "/v1/rightsize" rightsize::set_rightsize;
    put "/v1/vms/{name}/sizing" rightsize::set_sizing;
    get "/v1/ksm" reports::ksm;
    post "/v1/ksm/start" reports::start_ksm;
    post "/v1/ksm/stop" reports::stop_ksm;
    get "/v1/ksm/explain/{name}" reports::explain_ksm;
    get "/v1/estimate" reports::estimate_facts;
    get "/v1/snapshots" snapshots::snapshots;
    post "/v1/snapshots" snapshots::save_snapshot;
    get "/v1/snapshots/{name}" snapshots::snapshot;
    delete "/v1/snapshots/{name}" snapshots::remove_snapshot;
    post "/v1/snapshots/{name}/verify" snapshots::verify_snapshot;
    get "/v1/snapshots/{name}/progress" snapshots::snapshot_progress;
    post "/v1/snapshots/{name}/restore" snapshots::restore;
    post "/v1/vms/{name}/fork" snapshots::fork;
    post "/v1/snapshots/{name}/compact" snapshots::compact;
    post "/v1/snapshots/{name}/rekey" snapshots::rekey;
    post "/v1/snapshots/{name}/push" snapshots::push;
    post "/v1/snapshots/{name}/pull" snapshots::pull;
    post "/v1/remote-snapshots/list" snapshots::remote_snapshots;
    post "/v1/remote-snapshots/{name}/remove" snapshots::remove_remote_snapshot;
    get "/v1/segments" segments::segments;
    post "/v1/segments" segments::build_segment;
    post "/v1/segments/rank" segments::rank_segments;
    delete "/v1/segments/{name}" segments::remove_segment;
    post "/v1/segments/{name}/verify" segments::verify_segment;
    get "/v1/segments/{name}/progress" segments::segment_progress;
    post "/v1/vms/{name}/segments" segments::attach_segment;
    delete "/v1/vms/{name}/segments/{segment}" segments::detach_segment;
    get "/v1/lend" lending::lending;
    post "/v1/lend" lending::lend;
    delete "/v1/lend" lending::lend_no_more;
    post "/v1/vms/{name}/borrow" lending::borrow;
    post "/v1/vms/{name}/return" lending::give_back;
    post "/v1/volumes/{group}/{name}/borrow" lending::borrow_for_volume;
    post "/v1/volumes/{group}/{name}/return" lending::return_volume;
    get "/v1/leases" lending::leases;
    post "/v1/leases/{id}/return" lending::recall_lease;
    delete "/v1/lenders/{name}/distrust" lending::trust;
    post REGISTRY_PATH lending::registry;
    get "/v1/libvirt" libvirt::domains;
    post "/v1/libvirt/attach" libvirt::attach_libvirt;
    post "/v1/libvirt/enable" libvirt::enable;
    post "/v1/libvirt/disable" libvirt::disable;
    get "/v1/hosts" hosts::hosts;
    post "/v1/hosts" hosts::add;
    delete "/v1/hosts/{name}" hosts::remove;
    get "/metrics" metrics::metrics;
    get "/v1/live" live::live;
    get "/v1/history" live::history;
    get "/v1/history/vms" live::trends;
    get "/v1/vms/{name}/history" live::vm_history;
    get "/v1/events" live::events;
    get "/v1/events/stream" event_stream::event_stream;
    get "/v1/vms/{name}/memory-map" live::memory_map;
    get "/v1/sharing" live::sharing;
    get "/v1/doctor" live::doctor;
    post "/v1/estimate" live::estimate;
    get "/v1/vms/{name}/swap" live::swap_use;
    get "/v1/vms/{name}/swap/progress" lending::swap_progress;
    get "/v1/volumes/{group}/{name}/swap/progress" lending::volume_progress;
    get "/v1/advice" planning::advice;
    get "/v1/plan" planning::plan;
    get SESSION_PATH session::session;
    post SESSION_PATH session::log_in;
    delete SESSION_PATH session::log_out;
    post CODES_PATH session::new_code;
    get AUDIT_PATH session::audit;
}

/// Returns the API's description (`OpenAPI`) as JSON.
#[must_use]
pub fn openapi() -> serde_json::Value {
    serde_json::to_value(Description::openapi()).unwrap_or_default()
}

/// Returns whether a change through this path needs no early sample: it changes no memory of the
/// host (sessions, console), or may come several times a second (registry, exec, deadlines).
fn needs_no_sample(path: &str) -> bool {
    path == REGISTRY_PATH
        || path.starts_with(SESSION_PATH)
        || path.starts_with("/v1/vms/")
            && ["/extend", "/exec", "/exec/stream", "/console"]
                .iter()
                .any(|end| path.ends_with(end))
}

/// Lets the live view show a change soon: a sample may otherwise come minutes later.
async fn sample_after_change(
    State(daemon): State<Arc<Daemon>>,
    request: Request,
    next: Next,
) -> Response {
    let is_wanted = is_change(request.method()) && !needs_no_sample(request.uri().path());
    let response = next.run(request).await;
    if is_wanted && response.status().is_success() {
        daemon.sampling().note_change();
    }
    response
}

pub(super) fn router(daemon: Arc<Daemon>, access: Arc<Access>) -> Router {
    described()
        .merge(web::routes())
        .route("/openapi.json", get(|| async { Json(openapi()) }))
        .fallback(|| async { Failure(DaemonError::NoSuchPath) })
        .method_not_allowed_fallback(|| async {
            let error =
                "this path does not support the method; GET /openapi.json lists all methods";
            refusal(StatusCode::METHOD_NOT_ALLOWED, error)
        })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(Extension(access.clone()))
        .layer(Extension(Arc::<StreamCounts>::default()))
        .layer(from_fn_with_state(daemon.clone(), sample_after_change))
        .layer(from_fn_with_state(access, guard))
        .with_state(daemon)
}

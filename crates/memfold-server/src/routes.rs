//! All paths of the API, and its description.

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, Extension};
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::routing::get;
use axum::{Json, Router};
use memfold_daemon::{Daemon, DaemonError};
use utoipa::OpenApi;

use super::access::Access;
use super::access::guard;
use super::answer::{Failure, refusal};
use super::limits::MAX_BODY;
use super::{
    hosts, lending, libvirt, live, metrics, planning, reports, segments, session, snapshots, vms,
    web,
};

/// Source of the API's description (`OpenAPI`).
#[derive(OpenApi)]
#[openapi(
    info(
        title = "memfold",
        description = "The memfold daemon, over a Unix socket, and over TCP where that is asked for"
    ),
    paths(
        reports::version,
        vms::list,
        vms::run,
        vms::attach,
        vms::stop,
        vms::resume,
        vms::reboot,
        vms::exec,
        reports::report,
        reports::fold,
        reports::set_fold,
        reports::debt,
        reports::set_debt,
        reports::ksm,
        reports::start_ksm,
        reports::stop_ksm,
        reports::explain_ksm,
        reports::estimate_facts,
        snapshots::snapshots,
        snapshots::save_snapshot,
        snapshots::snapshot,
        snapshots::remove_snapshot,
        snapshots::verify_snapshot,
        snapshots::snapshot_progress,
        snapshots::restore,
        snapshots::push,
        snapshots::pull,
        snapshots::remote_snapshots,
        snapshots::remove_remote_snapshot,
        segments::segments,
        segments::build_segment,
        segments::rank_segments,
        segments::remove_segment,
        segments::verify_segment,
        segments::segment_progress,
        segments::attach_segment,
        segments::detach_segment,
        lending::lending,
        lending::lend,
        lending::lend_no_more,
        lending::borrow,
        lending::give_back,
        lending::borrow_for_volume,
        lending::return_volume,
        lending::leases,
        lending::recall_lease,
        lending::trust,
        lending::registry,
        libvirt::domains,
        libvirt::attach_libvirt,
        libvirt::enable,
        libvirt::disable,
        hosts::hosts,
        hosts::add,
        hosts::remove,
        metrics::metrics,
        live::live,
        live::history,
        live::trends,
        live::vm_history,
        live::events,
        live::memory_map,
        live::sharing,
        live::doctor,
        live::estimate,
        live::swap_use,
        planning::plan,
        planning::place,
        session::session,
        session::log_in,
        session::log_out,
        session::new_code,
        session::audit
    )
)]
struct Description;

/// Returns the API's description (`OpenAPI`) as JSON.
#[must_use]
pub fn openapi() -> serde_json::Value {
    serde_json::to_value(Description::openapi()).unwrap_or_default()
}

pub(super) fn router(daemon: Arc<Daemon>, access: Arc<Access>) -> Router {
    Router::new()
        .merge(vms::routes())
        .merge(reports::routes())
        .merge(snapshots::routes())
        .merge(segments::routes())
        .merge(lending::routes())
        .merge(hosts::routes())
        .merge(libvirt::routes())
        .merge(planning::routes())
        .route("/metrics", get(metrics::metrics))
        .merge(live::routes())
        .merge(session::routes())
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
        .layer(from_fn_with_state(access, guard))
        .with_state(daemon)
}

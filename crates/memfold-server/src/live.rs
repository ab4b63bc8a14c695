//! API paths for the dashboard: live samples of memory use, their history, maps of VMs' memory, the
//! checks of `memfold doctor`, and estimates of possible savings.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, Query, State};
use axum::http::StatusCode;
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use memfold_api::ErrorBody;
use memfold_daemon::{EstimateOrder, Live, SwapUse};
use memfold_host::Report;
use memfold_ledger::estimate::EstimateReport;
use memfold_ledger::history::{Event, KEEP_COARSE_S, KEEP_FINE_S, Series, Trends};
use memfold_ledger::memory_map::MemoryMap;
use memfold_ledger::sharing::Sharing;
use serde::Deserialize;

use super::access::Access;
use super::access::Visitor;
use super::answer::{Answered, Asked, Named, Served, blocking, refusal_with_hint};

/// Time between keep-alive messages of an idle stream, which detect a client that no longer reads.
pub(super) const STILL_HERE: Duration = Duration::from_secs(15);
/// Longest duration of a stream of live samples. The browser then reconnects, and its rights are
/// checked again.
pub(super) const STREAM_LIFE: Duration = Duration::from_secs(600);
/// Time after which the browser reconnects to the stream.
const ASK_AGAIN: Duration = Duration::from_millis(300);
/// Largest number of points of a series in the history.
const MOST_POINTS: i64 = 2000;
/// Largest number of points of each VM's trend.
const MOST_TREND_POINTS: i64 = 100;
/// Largest number of events in one response.
pub(super) const MOST_EVENTS: i64 = 1000;
/// Most pairs of VMs in one answer.
const MOST_PAIRS: usize = 1_000_000;

/// Time range and resolution of a history request.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Span {
    /// Length of the range back from now, in seconds; default 24 h, at most 90 d.
    seconds: Option<i64>,
    /// Number of points; default 500, at most 2,000.
    points: Option<i64>,
}

impl Span {
    fn bounded(self) -> (i64, i64) {
        let seconds = self.seconds.unwrap_or(24 * 3600).clamp(1, KEEP_COARSE_S);
        (seconds, self.points.unwrap_or(500).clamp(1, MOST_POINTS))
    }
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Cells {
    cells: Option<u64>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Pairs {
    pairs: Option<usize>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Count {
    count: Option<i64>,
}

/// Sends live samples as server-sent events `sample`. Each event is complete by itself; slow
/// clients miss some events.
#[utoipa::path(get, path = "/v1/live", responses((status = 200, content_type = "text/event-stream", body = Live), (status = 503, body = ErrorBody)))]
pub(super) async fn live(
    State(daemon): Served,
    Extension(access): Extension<Arc<Access>>,
    Extension(visitor): Extension<Visitor>,
) -> Response {
    let Some(place) = access.stream_of(visitor.role) else {
        return refusal_with_hint(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many dashboards are open",
            "close one",
        );
    };
    let mut samples = daemon.sampling().samples();
    // The last sample is sent at once.
    samples.mark_changed();
    let ending = access.ending.clone();
    let until = tokio::time::Instant::now() + STREAM_LIFE;
    let messages = stream::unfold(
        (samples, ending, place),
        move |(mut samples, mut ending, place)| async move {
            loop {
                tokio::select! {
                    changed = samples.changed() => changed.ok()?,
                    // This also ends the stream when the sender is dropped.
                    _ = ending.wait_for(|ends| *ends) => return None,
                    () = tokio::time::sleep_until(until) => return None,
                }
                let text = samples.borrow_and_update().clone();
                if !text.is_empty() {
                    let message = Message::default()
                        .event("sample")
                        .retry(ASK_AGAIN)
                        .data(&*text);
                    return Some((Ok::<_, Infallible>(message), (samples, ending, place)));
                }
            }
        },
    );
    Sse::new(messages)
        .keep_alive(KeepAlive::new().interval(STILL_HERE))
        .into_response()
}

/// Returns figures of the host over time.
#[utoipa::path(get, path = "/v1/history", params(("seconds" = Option<i64>, Query), ("points" = Option<i64>, Query)), responses((status = 200, body = Series), (status = 404, body = ErrorBody)))]
pub(super) async fn history(daemon: Served, Query(span): Query<Span>) -> Answered<Series> {
    let (seconds, points) = span.bounded();
    blocking(daemon, move |d| {
        d.sampling().history_of(None, seconds, points)
    })
    .await
}

/// Returns figures of a VM over time; no points if the VM was never seen.
#[utoipa::path(get, path = "/v1/vms/{name}/history", params(("seconds" = Option<i64>, Query), ("points" = Option<i64>, Query)), responses((status = 200, body = Series), (status = 404, body = ErrorBody)))]
pub(super) async fn vm_history(
    daemon: Served,
    name: Named,
    Query(span): Query<Span>,
) -> Answered<Series> {
    let (seconds, points) = span.bounded();
    blocking(daemon, move |d| {
        d.sampling().history_of(Some(&name), seconds, points)
    })
    .await
}

/// Returns the PSS of each VM over time; at most 24 h and 100 points.
#[utoipa::path(get, path = "/v1/history/vms", params(("seconds" = Option<i64>, Query), ("points" = Option<i64>, Query)), responses((status = 200, body = Trends), (status = 404, body = ErrorBody)))]
pub(super) async fn trends(daemon: Served, Query(span): Query<Span>) -> Answered<Trends> {
    let (seconds, points) = span.bounded();
    let (seconds, points) = (seconds.min(KEEP_FINE_S), points.min(MOST_TREND_POINTS));
    blocking(daemon, move |d| d.sampling().trends(seconds, points)).await
}

/// Returns the last events, newest first; 200 by default, at most 1,000.
#[utoipa::path(get, path = "/v1/events", params(("count" = Option<i64>, Query)), responses((status = 200, body = Vec<Event>)))]
pub(super) async fn events(daemon: Served, Query(query): Query<Count>) -> Answered<Vec<Event>> {
    let count = query.count.unwrap_or(200).clamp(0, MOST_EVENTS);
    blocking(daemon, move |d| d.sampling().events(count)).await
}

/// Returns a VM's RAM as a map: pages by state, in about `cells` cells (1,024 by default, at most
/// 8,192).
#[utoipa::path(get, path = "/v1/vms/{name}/memory-map", params(("cells" = Option<u64>, Query)), responses((status = 200, body = MemoryMap), (status = 404, body = ErrorBody)))]
pub(super) async fn memory_map(
    daemon: Served,
    name: Named,
    Query(query): Query<Cells>,
) -> Answered<MemoryMap> {
    let cells = query.cells.unwrap_or(1024);
    blocking(daemon, move |d| d.views().memory_map(&name, cells)).await
}

/// Returns how many pages VMs share, for the `pairs` pairs of VMs that share most (1,000 by
/// default, at most 1,000,000), the largest first.
#[utoipa::path(get, path = "/v1/sharing", params(("pairs" = Option<usize>, Query)), responses((status = 200, body = Sharing)))]
pub(super) async fn sharing(daemon: Served, Query(query): Query<Pairs>) -> Answered<Sharing> {
    let most = query.pairs.unwrap_or(1000).min(MOST_PAIRS);
    blocking(daemon, move |d| d.views().sharing(most)).await
}

/// Returns how many bytes of a VM's swap disk are in use, as the guest reports. The guest is asked
/// at most every five seconds.
#[utoipa::path(get, path = "/v1/vms/{name}/swap", responses((status = 200, body = SwapUse), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub(super) async fn swap_use(daemon: Served, name: Named) -> Answered<SwapUse> {
    blocking(daemon, move |d| d.views().swap_use(&name)).await
}

/// Returns the checks of this host, at most a minute old, and the present state of the brake.
#[utoipa::path(get, path = "/v1/doctor", responses((status = 200, body = Object)))]
pub(super) async fn doctor(daemon: Served) -> Answered<Report> {
    blocking(daemon, |d| d.views().doctor()).await
}

/// Estimates possible savings by reading memory, within the requested time.
#[utoipa::path(post, path = "/v1/estimate", request_body = EstimateOrder, responses((status = 200, body = EstimateReport), (status = 409, body = ErrorBody)))]
pub(super) async fn estimate(
    daemon: Served,
    order: Asked<EstimateOrder>,
) -> Answered<EstimateReport> {
    blocking(daemon, move |d| d.views().estimate(&order)).await
}

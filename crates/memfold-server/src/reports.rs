//! API paths for the ledger's report, the limits of folding, the copy-on-write debt (memory that
//! guests can claim by writing to shared pages), and KSM.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use memfold_api::{
    DebtRequest, ErrorBody, FoldRequest, FullReport, KsmStartRequest, KsmStopRequest, VersionInfo,
};
use memfold_fold::EngineStats;
use memfold_ksm::{Explanation, Overview};
use memfold_ledger::DebtReport;
use memfold_ledger::estimate::VmFacts;

use super::answer::{Answered, Asked, Named, Served, blocking};

/// Returns version, PID and state directory of the daemon.
#[utoipa::path(get, path = "/v1/version", responses((status = 200, body = VersionInfo)))]
pub(super) async fn version(State(daemon): Served) -> Json<VersionInfo> {
    Json(daemon.version())
}

/// Returns the ledger and the figures of folding: the use of memory, and the savings.
#[utoipa::path(get, path = "/v1/report", responses((status = 200, body = FullReport)))]
pub(super) async fn report(daemon: Served) -> Answered<Arc<FullReport>> {
    blocking(daemon, |d| d.reports().joint_report()).await
}

/// Returns the figures of folding.
#[utoipa::path(get, path = "/v1/fold", responses((status = 200, body = EngineStats)))]
pub(super) async fn fold(daemon: Served) -> Answered<EngineStats> {
    blocking(daemon, |d| d.folding().stats()).await
}

/// Pauses folding, resumes it, or changes its limits, until the daemon ends.
#[utoipa::path(put, path = "/v1/fold", request_body = FoldRequest, responses((status = 200, body = EngineStats)))]
pub(super) async fn set_fold(daemon: Served, request: Asked<FoldRequest>) -> Answered<EngineStats> {
    blocking(daemon, move |d| d.folding().set(&request)).await
}

/// Returns the memory that guests can claim by writing to shared pages, the memory available for
/// it, and the state of the brake.
#[utoipa::path(get, path = "/v1/debt", responses((status = 200, body = DebtReport)))]
pub(super) async fn debt(daemon: Served) -> Answered<DebtReport> {
    blocking(daemon, |d| d.brake().debt()).await
}

/// Changes the brake's limits until the daemon ends.
#[utoipa::path(put, path = "/v1/debt", request_body = DebtRequest, responses((status = 200, body = DebtReport), (status = 400, body = ErrorBody)))]
pub(super) async fn set_debt(daemon: Served, request: Asked<DebtRequest>) -> Answered<DebtReport> {
    blocking(daemon, move |d| d.brake().set_debt(&request)).await
}

/// Returns the state of KSM on this host, and of the daemon's steering of KSM.
#[utoipa::path(get, path = "/v1/ksm", responses((status = 200, body = Overview)))]
pub(super) async fn ksm(daemon: Served) -> Answered<Overview> {
    blocking(daemon, |d| d.ksm().overview()).await
}

/// Starts to steer KSM with a CPU budget and a scan time, or changes them.
#[utoipa::path(post, path = "/v1/ksm/start", request_body = KsmStartRequest, responses((status = 200, body = Overview), (status = 409, body = ErrorBody)))]
pub(super) async fn start_ksm(
    daemon: Served,
    request: Asked<KsmStartRequest>,
) -> Answered<Overview> {
    blocking(daemon, move |d| d.ksm().start(&request)).await
}

/// Ends the steering of KSM, and restores KSM's earlier settings.
#[utoipa::path(post, path = "/v1/ksm/stop", request_body = KsmStopRequest, responses((status = 200, body = Overview), (status = 409, body = ErrorBody)))]
pub(super) async fn stop_ksm(daemon: Served, request: Asked<KsmStopRequest>) -> Answered<Overview> {
    blocking(daemon, move |d| d.ksm().stop(&request)).await
}

/// Explains why a VM's memory merges, or why it does not.
#[utoipa::path(get, path = "/v1/ksm/explain/{name}", responses((status = 200, body = Explanation), (status = 404, body = ErrorBody)))]
pub(super) async fn explain_ksm(daemon: Served, name: Named) -> Answered<Explanation> {
    blocking(daemon, move |d| d.views().explain_ksm(&name)).await
}

/// Returns facts about the VMs for an estimate, for a client that reads the VMs' memory itself.
#[utoipa::path(get, path = "/v1/estimate", responses((status = 200, body = VmFacts)))]
pub(super) async fn estimate_facts(daemon: Served) -> Answered<VmFacts> {
    blocking(daemon, |d| d.views().estimate_facts()).await
}

//! The server: routes to the daemon's methods.

use std::fs::Permissions;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, Extension, FromRequest, Path as UrlPath, Query, State};
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use hyper_util::server::graceful::GracefulShutdown;
use memfold_api::{
    AttachRequest, AttachSegmentRequest, AttachedSegment, BuildRequest, BuildResult, DebtRequest,
    ErrorBody, ExecRequest, ExecResult, FoldRequest, FullReport, KsmStartRequest, KsmStopRequest,
    RankRequest, RebootRequest, RestoreRequest, RunOptions, SaveRequest, StopReport, StopRequest,
    VerifyReport, VersionInfo, VmInfo,
};
use memfold_daemon::{Daemon, DaemonError, chain};
use memfold_fold::EngineStats;
use memfold_ksm::{Explanation, KsmError, Overview};
use memfold_ledger::DebtReport;
use memfold_ledger::estimate::VmFacts;
use memfold_lend::RegistryError;
use memfold_lend::graph::GraphError;
use memfold_lend::lvm::LvmError;
use memfold_segment::{Ranked, SegmentError, SegmentInfo};
use memfold_snapshot::{Manifest, SnapshotError, SnapshotInfo, Step};
use memfold_vm::directory::MAX_SOCKET_PATH;
use memfold_vm::{LaunchError, VmSpec};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::info;
use utoipa::OpenApi;

use super::access::{Access, Doors, Hosts, Keys, Told, accept_tcp, accept_unix, guard};
use super::{hosts, lending, libvirt, live, metrics, planning, session, web};

/// Largest request body in bytes.
pub(super) const MAX_BODY: usize = 1 << 20;

/// How long the daemon's end waits for answers that are under way.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// Why the server could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Another daemon answers on the socket.
    #[error("another memfold daemon serves {0}; stop it, or choose another --socket")]
    Taken(PathBuf),
    /// The kernel takes no such path.
    #[error(
        "cannot listen on {}: it has {} bytes, and a socket's path has {MAX_SOCKET_PATH} at most; choose a shorter --socket",
        .0.display(), .0.as_os_str().len()
    )]
    TooLong(PathBuf),
    /// The socket could not be made.
    #[error("cannot listen on {path}")]
    Listen {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The TCP address can't be served.
    #[error("cannot listen on {address}")]
    ListenTcp {
        /// The address.
        address: SocketAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Nobody is accepted any more.
    #[error("the server accepts nobody any more; the daemon ends, to be started anew")]
    Ended,
    /// The tokens can't be read or made.
    #[error("cannot use the tokens")]
    Tokens(#[source] io::Error),
}

/// The interface's description.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "memfold",
        description = "The memfold daemon, over a Unix socket, and over TCP where that is asked for"
    ),
    paths(
        version,
        list,
        run,
        attach,
        stop,
        resume,
        reboot,
        exec,
        report,
        fold,
        set_fold,
        debt,
        set_debt,
        ksm,
        start_ksm,
        stop_ksm,
        explain_ksm,
        estimate_facts,
        snapshots,
        save_snapshot,
        snapshot,
        remove_snapshot,
        verify_snapshot,
        snapshot_progress,
        restore,
        segments,
        build_segment,
        rank_segments,
        remove_segment,
        verify_segment,
        segment_progress,
        attach_segment,
        detach_segment,
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

/// The interface's description as JSON.
#[must_use]
pub fn openapi() -> serde_json::Value {
    serde_json::to_value(Description::openapi()).unwrap_or_default()
}

/// Serves until `end` is ready. The socket is for root alone, unless groups are let in, and is removed at the end.
pub async fn serve(
    daemon: Arc<Daemon>,
    doors: &Doors,
    end: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let socket = doors.socket.as_path();
    let listener = listen_unix(doors)?;
    let (ended, ending) = watch::channel(false);
    let mut tcp = doors.tcp.clone();
    let (mut keys, mut tcp_listener) = (Keys::default(), None);
    if let Some(door) = &mut tcp {
        let address = door.address();
        keys = Keys::with_tokens(&doors.tokens).map_err(ServeError::Tokens)?;
        let listened = door.listen().await;
        let listened = listened.map_err(|source| ServeError::ListenTcp { address, source })?;
        info!(address = %door.address(), tls = door.has_tls(), "serving browsers");
        tcp_listener = Some(listened);
    }
    let hosts = Hosts::open(doors.records.join("hosts.json")).map_err(ServeError::Tokens)?;
    let access = Access::new(keys, hosts, doors.records.clone(), tcp.as_ref(), ending);
    let router = router(daemon.clone(), access.clone());
    let graceful = Arc::new(GracefulShutdown::new());
    let mut accepting = JoinSet::new();
    accepting.spawn(accept_unix(
        listener,
        doors.groups,
        router.clone(),
        graceful.clone(),
    ));
    if let (Some(listener), Some(door)) = (tcp_listener, tcp) {
        let serving = accept_tcp(listener, door, access, router, graceful.clone());
        accepting.spawn(serving);
    }
    let mut served = Ok(());
    tokio::select! {
        () = end => {}
        // They end only by a panic. A daemon that nobody can ask anything is none.
        _ = accepting.join_next() => served = Err(ServeError::Ended),
    }
    // Gone already if somebody cleaned up.
    let _ = std::fs::remove_file(socket);
    accepting.shutdown().await;
    // Streams end by themselves now, and whoever has asked for something gets the answer.
    let _ = ended.send(true);
    let views = daemon.clone();
    tokio::task::spawn_blocking(move || views.end_views());
    if let Some(graceful) = Arc::into_inner(graceful) {
        // Whoever doesn't read doesn't keep the daemon from ending.
        let _ = tokio::time::timeout(LAST_ANSWERS, graceful.shutdown()).await;
    }
    served
}

fn listen_unix(doors: &Doors) -> Result<UnixListener, ServeError> {
    let socket = doors.socket.as_path();
    let listen = |source| ServeError::Listen {
        path: socket.into(),
        source,
    };
    if socket.as_os_str().len() > MAX_SOCKET_PATH {
        return Err(ServeError::TooLong(socket.into()));
    }
    if std::os::unix::net::UnixStream::connect(socket).is_ok() {
        return Err(ServeError::Taken(socket.into()));
    }
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(listen(error)),
        _ => {}
    }
    if let Some(directory) = socket.parent() {
        std::fs::create_dir_all(directory).map_err(listen)?;
    }
    let listener = UnixListener::bind(socket).map_err(listen)?;
    // Whoever connects is asked of the kernel who they are; a mode can let only one group in, and there are two.
    let mode = if doors.groups.any() { 0o666 } else { 0o600 };
    std::fs::set_permissions(socket, Permissions::from_mode(mode)).map_err(listen)?;
    Ok(listener)
}

fn router(daemon: Arc<Daemon>, access: Arc<Access>) -> Router {
    Router::new()
        .route("/v1/version", get(version))
        .route("/v1/vms", get(list).post(run))
        .route("/v1/attach", post(attach))
        .route("/v1/vms/{name}/stop", post(stop))
        .route("/v1/vms/{name}/resume", post(resume))
        .route("/v1/vms/{name}/reboot", post(reboot))
        .route("/v1/vms/{name}/exec", post(exec))
        .route("/v1/report", get(report))
        .route("/v1/fold", get(fold).put(set_fold))
        .route("/v1/debt", get(debt).put(set_debt))
        .route("/v1/ksm", get(ksm))
        .route("/v1/ksm/start", post(start_ksm))
        .route("/v1/ksm/stop", post(stop_ksm))
        .route("/v1/ksm/explain/{name}", get(explain_ksm))
        .route("/v1/estimate", get(estimate_facts).post(live::estimate))
        .route("/v1/snapshots", get(snapshots).post(save_snapshot))
        .route(
            "/v1/snapshots/{name}",
            get(snapshot).delete(remove_snapshot),
        )
        .route("/v1/snapshots/{name}/verify", post(verify_snapshot))
        .route("/v1/snapshots/{name}/progress", get(snapshot_progress))
        .route("/v1/snapshots/{name}/restore", post(restore))
        .route("/v1/segments", get(segments).post(build_segment))
        .route("/v1/segments/rank", post(rank_segments))
        .route("/v1/segments/{name}", delete(remove_segment))
        .route("/v1/segments/{name}/verify", post(verify_segment))
        .route("/v1/segments/{name}/progress", get(segment_progress))
        .route("/v1/vms/{name}/segments", post(attach_segment))
        .route("/v1/vms/{name}/segments/{segment}", delete(detach_segment))
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
            let error = "this path has no such method; GET /openapi.json lists them";
            refusal(StatusCode::METHOD_NOT_ALLOWED, error)
        })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(Extension(access.clone()))
        .layer(from_fn_with_state(access, guard))
        .with_state(daemon)
}

/// A request's JSON body; refusals are [`ErrorBody`]s like all others.
#[derive(FromRequest)]
#[from_request(via(Json), rejection(BadBody))]
pub(super) struct Asked<T>(pub(super) T);

pub(super) struct BadBody(JsonRejection);

impl From<JsonRejection> for BadBody {
    fn from(rejection: JsonRejection) -> Self {
        Self(rejection)
    }
}

impl IntoResponse for BadBody {
    fn into_response(self) -> Response {
        // 413, 415, or 400: whether JSON itself or what it holds is wrong makes no difference to who sent it.
        let status = match self.0.status() {
            StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
            status => status,
        };
        let text = match status {
            StatusCode::PAYLOAD_TOO_LARGE => {
                format!("the request's body is longer than {MAX_BODY} bytes")
            }
            _ => self.0.body_text(),
        };
        refusal(status, &text)
    }
}

pub(super) fn refusal(status: StatusCode, error: &str) -> Response {
    refused(status, error, None, false)
}

pub(super) fn refusal_with_hint(status: StatusCode, error: &str, hint: &str) -> Response {
    refused(status, error, Some(hint.to_owned()), false)
}

fn refused(
    status: StatusCode,
    error: &str,
    hint: Option<String>,
    impossible_here: bool,
) -> Response {
    let body = ErrorBody {
        error: error.to_owned(),
        hint,
        impossible_here,
    };
    let mut response = (status, Json(body)).into_response();
    response.extensions_mut().insert(Told(error.to_owned()));
    response
}

pub(super) struct Failure(DaemonError);

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = match &self.0 {
            DaemonError::NoSuchVm(_)
            | DaemonError::NoSuchPath
            | DaemonError::NoHistory
            | DaemonError::Lvm(LvmError::NoVolume(_))
            | DaemonError::Snapshot(SnapshotError::Unknown(_))
            | DaemonError::Segment(SegmentError::Unknown(_)) => StatusCode::NOT_FOUND,
            DaemonError::NameTaken(_)
            | DaemonError::Lending { .. }
            | DaemonError::Lvm(LvmError::Unfit { .. })
            | DaemonError::Busy { .. }
            | DaemonError::StandsStill { .. }
            | DaemonError::Registry(
                RegistryError::NothingToSpare { .. }
                | RegistryError::State { .. }
                | RegistryError::Superseded { .. },
            )
            | DaemonError::Merging { .. }
            | DaemonError::Braked { .. }
            | DaemonError::Ksm(KsmError::Busy(_))
            | DaemonError::Launch(LaunchError::NameTaken { .. } | LaunchError::Forward { .. })
            | DaemonError::Snapshot(
                SnapshotError::Taken(_)
                | SnapshotError::Twin { .. }
                | SnapshotError::InUse { .. }
                | SnapshotError::BuiltOn { .. },
            )
            | DaemonError::Segment(SegmentError::InUse { .. } | SegmentError::Written { .. }) => {
                StatusCode::CONFLICT
            }
            DaemonError::BadRequest(_)
            | DaemonError::Launch(LaunchError::Spec(_))
            | DaemonError::Graph(GraphError::NoSwapDisk(_))
            | DaemonError::Registry(RegistryError::Value { .. })
            | DaemonError::Snapshot(SnapshotError::Name(_) | SnapshotError::Impossible(_))
            | DaemonError::Segment(
                SegmentError::Name(_)
                | SegmentError::Source { .. }
                | SegmentError::Foreign { .. }
                | SegmentError::Impossible(_),
            ) => StatusCode::BAD_REQUEST,
            error if error.impossible_here() => StatusCode::NOT_IMPLEMENTED,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let (hint, impossible) = (self.0.hint(), self.0.impossible_here());
        refused(status, &chain(&self.0), hint, impossible)
    }
}

/// Runs a blocking method of the daemon off the async threads.
pub(super) async fn blocking<T: Send + 'static>(
    daemon: Arc<Daemon>,
    work: impl FnOnce(&Arc<Daemon>) -> Result<T, DaemonError> + Send + 'static,
) -> Result<Json<T>, Failure> {
    // Right after its start the daemon may not know yet what runs.
    let work = move || {
        daemon.settle_first();
        work(&daemon)
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map(Json).map_err(Failure),
        Err(_) => Err(Failure(DaemonError::Internal(
            "a task of the daemon ended unexpectedly",
        ))),
    }
}

/// The daemon's version, and what it was built from.
#[utoipa::path(get, path = "/v1/version", responses((status = 200, body = VersionInfo)))]
async fn version(State(daemon): State<Arc<Daemon>>) -> Json<VersionInfo> {
    Json(daemon.version())
}

/// All VMs that the daemon knows.
#[utoipa::path(get, path = "/v1/vms", responses((status = 200, body = Vec<VmInfo>)))]
async fn list(State(daemon): State<Arc<Daemon>>) -> Result<Json<Vec<VmInfo>>, Failure> {
    blocking(daemon, |d| Ok(d.list())).await
}

/// Starts a VM; the body is the description of `vm run --file`, as JSON.
#[utoipa::path(post, path = "/v1/vms", params(RunOptions), request_body = Object, responses((status = 200, body = VmInfo), (status = 409, body = ErrorBody)))]
async fn run(
    State(daemon): State<Arc<Daemon>>,
    Query(options): Query<RunOptions>,
    Asked(spec): Asked<VmSpec>,
) -> Result<Json<VmInfo>, Failure> {
    blocking(daemon, move |d| {
        if options.despite_brake {
            d.run_vm_despite_brake(spec)
        } else {
            d.run_vm(spec)
        }
    })
    .await
}

/// Takes on a VM that runs.
#[utoipa::path(post, path = "/v1/attach", request_body = AttachRequest, responses((status = 200, body = VmInfo)))]
async fn attach(
    State(daemon): State<Arc<Daemon>>,
    Asked(request): Asked<AttachRequest>,
) -> Result<Json<VmInfo>, Failure> {
    blocking(daemon, move |d| d.attach(&request)).await
}

/// Ends a VM: its guest is asked to, again and again, and after the time given it is switched off.
#[utoipa::path(post, path = "/v1/vms/{name}/stop", request_body = StopRequest, responses((status = 200, body = StopReport), (status = 404, body = ErrorBody)))]
async fn stop(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
    Asked(request): Asked<StopRequest>,
) -> Result<Json<StopReport>, Failure> {
    blocking(daemon, move |d| {
        let stopped = d.stop_vm(&name, seconds(request.timeout_s)?)?;
        let how = serde_json::to_value(stopped.kind).unwrap_or_default();
        Ok(StopReport {
            name,
            how: how.as_str().unwrap_or_default().to_owned(),
            overdue: stopped.overdue,
            took_s: stopped.took.as_secs_f64(),
            why: stopped.why,
        })
    })
    .await
}

/// Lets a VM go on that stands still: after a pause, or once there is room for its disk again.
#[utoipa::path(post, path = "/v1/vms/{name}/resume", responses((status = 200, body = VmInfo), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn resume(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
) -> Result<Json<VmInfo>, Failure> {
    blocking(daemon, move |d| d.resume_vm(&name)).await
}

/// Has a guest reboot, or takes it back to the snapshot of its boot.
#[utoipa::path(post, path = "/v1/vms/{name}/reboot", request_body = RebootRequest, responses((status = 200, body = VmInfo), (status = 404, body = ErrorBody)))]
async fn reboot(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
    Asked(request): Asked<RebootRequest>,
) -> Result<Json<VmInfo>, Failure> {
    blocking(daemon, move |d| {
        d.reboot(&name, &request, seconds(request.timeout_s)?)
    })
    .await
}

/// Runs a command in a guest, by its agent.
#[utoipa::path(post, path = "/v1/vms/{name}/exec", request_body = ExecRequest, responses((status = 200, body = ExecResult)))]
async fn exec(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
    Asked(request): Asked<ExecRequest>,
) -> Result<Json<ExecResult>, Failure> {
    blocking(daemon, move |d| {
        let result = d.exec(&name, &request.script, seconds(request.timeout_s)?)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(ExecResult {
            stdout: text(&result.stdout),
            stderr: text(&result.stderr),
            code: result.code,
        })
    })
    .await
}

/// The ledger: where every byte is and what is saved, and what folding did.
#[utoipa::path(get, path = "/v1/report", responses((status = 200, body = FullReport)))]
async fn report(State(daemon): State<Arc<Daemon>>) -> Result<Json<Arc<FullReport>>, Failure> {
    blocking(daemon, Daemon::joint_report).await
}

/// What folding has done.
#[utoipa::path(get, path = "/v1/fold", responses((status = 200, body = EngineStats)))]
async fn fold(State(daemon): State<Arc<Daemon>>) -> Result<Json<EngineStats>, Failure> {
    blocking(daemon, |d| d.fold_stats()).await
}

/// Pauses folding, lets it go on, or changes its limits, until the daemon ends.
#[utoipa::path(put, path = "/v1/fold", request_body = FoldRequest, responses((status = 200, body = EngineStats)))]
async fn set_fold(
    State(daemon): State<Arc<Daemon>>,
    Asked(request): Asked<FoldRequest>,
) -> Result<Json<EngineStats>, Failure> {
    blocking(daemon, move |d| d.set_fold(&request)).await
}

/// What guests could call in by writing, what there is for it, and what the brake does.
#[utoipa::path(get, path = "/v1/debt", responses((status = 200, body = DebtReport)))]
async fn debt(State(daemon): State<Arc<Daemon>>) -> Result<Json<DebtReport>, Failure> {
    blocking(daemon, Daemon::debt).await
}

/// Changes the brake's limits, until the daemon ends.
#[utoipa::path(put, path = "/v1/debt", request_body = DebtRequest, responses((status = 200, body = DebtReport), (status = 400, body = ErrorBody)))]
async fn set_debt(
    State(daemon): State<Arc<Daemon>>,
    Asked(request): Asked<DebtRequest>,
) -> Result<Json<DebtReport>, Failure> {
    blocking(daemon, move |d| d.set_debt(&request)).await
}

/// KSM on this host, and how the daemon steers it.
#[utoipa::path(get, path = "/v1/ksm", responses((status = 200, body = Overview)))]
async fn ksm(State(daemon): State<Arc<Daemon>>) -> Result<Json<Overview>, Failure> {
    blocking(daemon, |d| d.ksm()).await
}

/// Steers KSM from now on.
#[utoipa::path(post, path = "/v1/ksm/start", request_body = KsmStartRequest, responses((status = 200, body = Overview), (status = 409, body = ErrorBody)))]
async fn start_ksm(
    State(daemon): State<Arc<Daemon>>,
    Asked(request): Asked<KsmStartRequest>,
) -> Result<Json<Overview>, Failure> {
    blocking(daemon, move |d| d.start_ksm(&request)).await
}

/// Steers KSM no more; its settings are as before.
#[utoipa::path(post, path = "/v1/ksm/stop", request_body = KsmStopRequest, responses((status = 200, body = Overview), (status = 409, body = ErrorBody)))]
async fn stop_ksm(
    State(daemon): State<Arc<Daemon>>,
    Asked(request): Asked<KsmStopRequest>,
) -> Result<Json<Overview>, Failure> {
    blocking(daemon, move |d| d.stop_ksm(&request)).await
}

/// Why a VM's memory merges, or doesn't.
#[utoipa::path(get, path = "/v1/ksm/explain/{name}", responses((status = 200, body = Explanation), (status = 404, body = ErrorBody)))]
async fn explain_ksm(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
) -> Result<Json<Explanation>, Failure> {
    blocking(daemon, move |d| d.explain_ksm(&name)).await
}

/// What the daemon knows for an estimate: whoever asks looks at memory by itself.
#[utoipa::path(get, path = "/v1/estimate", responses((status = 200, body = VmFacts)))]
async fn estimate_facts(State(daemon): State<Arc<Daemon>>) -> Result<Json<VmFacts>, Failure> {
    blocking(daemon, |d| d.estimate_facts()).await
}

/// All snapshots.
#[utoipa::path(get, path = "/v1/snapshots", responses((status = 200, body = Vec<SnapshotInfo>)))]
async fn snapshots(State(daemon): State<Arc<Daemon>>) -> Result<Json<Vec<SnapshotInfo>>, Failure> {
    blocking(daemon, |d| d.snapshots()).await
}

/// Saves a VM, which goes on; the manifest of the snapshot.
#[utoipa::path(post, path = "/v1/snapshots", request_body = SaveRequest, responses((status = 200, body = Object), (status = 409, body = ErrorBody)))]
async fn save_snapshot(
    State(daemon): State<Arc<Daemon>>,
    Asked(request): Asked<SaveRequest>,
) -> Result<Json<Manifest>, Failure> {
    blocking(daemon, move |d| d.save_snapshot(&request)).await
}

/// A snapshot's manifest.
#[utoipa::path(get, path = "/v1/snapshots/{name}", responses((status = 200, body = Object), (status = 404, body = ErrorBody)))]
async fn snapshot(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
) -> Result<Json<Manifest>, Failure> {
    blocking(daemon, move |d| d.snapshot(&name)).await
}

/// Removes a snapshot that nobody uses.
#[utoipa::path(delete, path = "/v1/snapshots/{name}", responses((status = 200), (status = 409, body = ErrorBody)))]
async fn remove_snapshot(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
) -> Result<Json<()>, Failure> {
    blocking(daemon, move |d| d.remove_snapshot(&name)).await
}

/// Reads a snapshot and compares it with its checksums.
#[utoipa::path(post, path = "/v1/snapshots/{name}/verify", responses((status = 200, body = VerifyReport)))]
async fn verify_snapshot(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
) -> Result<Json<VerifyReport>, Failure> {
    blocking(daemon, move |d| d.verify_snapshot(&name)).await
}

/// How far what is done with a snapshot has come; null: nothing is.
#[utoipa::path(get, path = "/v1/snapshots/{name}/progress", responses((status = 200, body = Option<Step>)))]
async fn snapshot_progress(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
) -> Result<Json<Option<Step>>, Failure> {
    blocking(daemon, move |d| Ok(d.snapshot_progress(&name))).await
}

/// Starts a VM from a snapshot.
#[utoipa::path(post, path = "/v1/snapshots/{name}/restore", request_body = RestoreRequest, responses((status = 200, body = VmInfo)))]
async fn restore(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
    Asked(request): Asked<RestoreRequest>,
) -> Result<Json<VmInfo>, Failure> {
    blocking(daemon, move |d| d.restore(&name, &request)).await
}

/// All segments.
#[utoipa::path(get, path = "/v1/segments", responses((status = 200, body = Vec<SegmentInfo>)))]
async fn segments(State(daemon): State<Arc<Daemon>>) -> Result<Json<Vec<SegmentInfo>>, Failure> {
    blocking(daemon, |d| d.list_segments()).await
}

/// Builds a segment, or its next generation.
#[utoipa::path(post, path = "/v1/segments", request_body = BuildRequest, responses((status = 200, body = BuildResult), (status = 400, body = ErrorBody)))]
async fn build_segment(
    State(daemon): State<Arc<Daemon>>,
    Asked(request): Asked<BuildRequest>,
) -> Result<Json<BuildResult>, Failure> {
    blocking(daemon, move |d| d.build_segment(&request)).await
}

/// Files by what they would bring in a segment, best first.
#[utoipa::path(post, path = "/v1/segments/rank", request_body = RankRequest, responses((status = 200, body = Vec<Ranked>)))]
async fn rank_segments(
    State(daemon): State<Arc<Daemon>>,
    Asked(request): Asked<RankRequest>,
) -> Result<Json<Vec<Ranked>>, Failure> {
    blocking(daemon, move |d| d.rank_files(&request)).await
}

/// Which generations were removed.
#[utoipa::path(delete, path = "/v1/segments/{name}", responses((status = 200, body = Vec<String>), (status = 409, body = ErrorBody)))]
async fn remove_segment(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
) -> Result<Json<Vec<String>>, Failure> {
    blocking(daemon, move |d| d.remove_segment(&name)).await
}

/// What is wrong with a segment; null: nothing.
#[utoipa::path(post, path = "/v1/segments/{name}/verify", responses((status = 200, body = Option<String>)))]
async fn verify_segment(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
) -> Result<Json<Option<String>>, Failure> {
    blocking(daemon, move |d| d.verify_segment(&name)).await
}

/// How far a build has come; null: none is under way.
#[utoipa::path(get, path = "/v1/segments/{name}/progress", responses((status = 200, body = Option<Step>)))]
async fn segment_progress(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
) -> Result<Json<Option<Step>>, Failure> {
    blocking(daemon, move |d| Ok(d.segment_progress(&name))).await
}

/// Maps a segment into a running VM.
#[utoipa::path(post, path = "/v1/vms/{name}/segments", request_body = AttachSegmentRequest, responses((status = 200, body = AttachedSegment), (status = 400, body = ErrorBody)))]
async fn attach_segment(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
    Asked(request): Asked<AttachSegmentRequest>,
) -> Result<Json<AttachedSegment>, Failure> {
    blocking(daemon, move |d| d.attach_segment(&name, &request)).await
}

/// Takes a segment off a VM.
#[utoipa::path(delete, path = "/v1/vms/{name}/segments/{segment}", responses((status = 200, body = AttachedSegment), (status = 400, body = ErrorBody)))]
async fn detach_segment(
    State(daemon): State<Arc<Daemon>>,
    UrlPath((name, segment)): UrlPath<(String, String)>,
) -> Result<Json<AttachedSegment>, Failure> {
    blocking(daemon, move |d| d.detach_segment(&name, &segment)).await
}

fn seconds(value: f64) -> Result<std::time::Duration, DaemonError> {
    std::time::Duration::try_from_secs_f64(value).map_err(|_| {
        DaemonError::BadRequest(format!("timeout_s is {value}; give seconds, 0 or more"))
    })
}

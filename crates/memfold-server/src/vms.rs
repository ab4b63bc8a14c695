//! API paths for VMs: list, start, attach, stop, resume and reboot VMs, and run commands in guests.

use std::io;
use std::time::Duration;

use axum::Json;
use axum::extract::{Query, Request};
use axum::http::StatusCode;
use axum::http::header::{CONNECTION, UPGRADE};
use axum::response::{IntoResponse, Response};
use memfold_api::{
    AttachRequest, CONSOLE_PROTOCOL, ErrorBody, ExecRequest, ExecResult, RebootRequest, RunOptions,
    StopReport, StopRequest, VmInfo, VmLogs,
};
use memfold_daemon::{Console, DaemonError};
use memfold_vm::VmSpec;
use tokio::sync::Semaphore;
use tracing::debug;

use super::access::Upgrade;
use super::answer::{Answered, Asked, Named, Served, blocking, refusal};

/// Returns all VMs that the daemon knows.
#[utoipa::path(get, path = "/v1/vms", responses((status = 200, body = Vec<VmInfo>)))]
pub(super) async fn list(daemon: Served) -> Answered<Vec<VmInfo>> {
    blocking(daemon, |d| Ok(d.vms().list())).await
}

/// Starts a VM. The body is a VM description as for `vm run --file`, but in JSON.
#[utoipa::path(post, path = "/v1/vms", params(RunOptions), request_body = Object, responses((status = 200, body = VmInfo), (status = 409, body = ErrorBody)))]
pub(super) async fn run(
    daemon: Served,
    Query(options): Query<RunOptions>,
    spec: Asked<VmSpec>,
) -> Answered<VmInfo> {
    blocking(daemon, move |d| {
        if options.despite_brake {
            d.boots().run_despite_brake(spec.0)
        } else {
            d.boots().run(spec.0)
        }
    })
    .await
}

/// Attaches to a running QEMU that memfold did not start.
#[utoipa::path(post, path = "/v1/attach", request_body = AttachRequest, responses((status = 200, body = VmInfo)))]
pub(super) async fn attach(daemon: Served, request: Asked<AttachRequest>) -> Answered<VmInfo> {
    blocking(daemon, move |d| d.vms().attach(&request)).await
}

/// Stops a VM: the guest is asked repeatedly to shut down, and the VM is switched off after the
/// given time.
#[utoipa::path(post, path = "/v1/vms/{name}/stop", request_body = StopRequest, responses((status = 200, body = StopReport), (status = 404, body = ErrorBody)))]
pub(super) async fn stop(
    daemon: Served,
    name: Named,
    request: Asked<StopRequest>,
) -> Answered<StopReport> {
    blocking(daemon, move |d| {
        let timeout = seconds(request.timeout_s)?;
        d.definitions().no_longer_waits(&name);
        let stopped = d.vms().stop(&name, timeout)?;
        let how = serde_json::to_value(stopped.kind).unwrap_or_default();
        Ok(StopReport {
            name: name.0,
            how: how.as_str().unwrap_or_default().to_owned(),
            overdue: stopped.overdue,
            took_s: stopped.took.as_secs_f64(),
            why: stopped.why,
        })
    })
    .await
}

/// Pauses a VM: the guest stands still until the VM is resumed.
#[utoipa::path(post, path = "/v1/vms/{name}/pause", responses((status = 200, body = VmInfo), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn pause(daemon: Served, name: Named) -> Answered<VmInfo> {
    blocking(daemon, move |d| d.vms().pause(&name)).await
}

/// Begins a VM's time to live again. Requests that succeed are not in the audit log.
#[utoipa::path(post, path = "/v1/vms/{name}/extend", responses((status = 200, body = VmInfo), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn extend(daemon: Served, name: Named) -> Answered<VmInfo> {
    blocking(daemon, move |d| d.vms().extend(&name)).await
}

/// Resumes a stopped VM: after a pause, or after its full disk has free space again.
#[utoipa::path(post, path = "/v1/vms/{name}/resume", responses((status = 200, body = VmInfo), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn resume(daemon: Served, name: Named) -> Answered<VmInfo> {
    blocking(daemon, move |d| d.vms().resume(&name)).await
}

/// Reboots a guest, or restores the VM from its boot snapshot.
#[utoipa::path(post, path = "/v1/vms/{name}/reboot", request_body = RebootRequest, responses((status = 200, body = VmInfo), (status = 404, body = ErrorBody)))]
pub(super) async fn reboot(
    daemon: Served,
    name: Named,
    request: Asked<RebootRequest>,
) -> Answered<VmInfo> {
    blocking(daemon, move |d| {
        d.boots()
            .reboot(&name, &request, seconds(request.timeout_s)?)
    })
    .await
}

/// Commands in guests that wait for their ends at once; further ones wait until it is their turn.
/// Each occupies a thread, and other requests need threads, too: tokio starts 512 at most.
static COMMANDS: Semaphore = Semaphore::const_new(256);

/// Runs a command in a guest, through its agent.
#[utoipa::path(post, path = "/v1/vms/{name}/exec", request_body = ExecRequest, responses((status = 200, body = ExecResult)))]
pub(super) async fn exec(
    daemon: Served,
    name: Named,
    request: Asked<ExecRequest>,
) -> Answered<ExecResult> {
    // Fails only if the semaphore is closed, which it never is.
    let turn = COMMANDS.acquire().await;
    blocking(daemon, move |d| {
        let _turn = turn;
        let result = d
            .vms()
            .exec(&name, &request.script, seconds(request.timeout_s)?)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(ExecResult {
            stdout: text(&result.stdout),
            stderr: text(&result.stderr),
            code: result.code,
        })
    })
    .await
}

/// Returns the newest parts of the logs of a VM.
#[utoipa::path(get, path = "/v1/vms/{name}/logs", responses((status = 200, body = VmLogs), (status = 404, body = ErrorBody)))]
pub(super) async fn logs(daemon: Served, name: Named) -> Answered<VmLogs> {
    blocking(daemon, move |d| d.vms().logs(&name)).await
}

/// Connects to the serial console of a VM. The request has the headers `connection: upgrade` and
/// `upgrade: memfold-console`; after the response with status 101, the connection carries the
/// console's bytes.
#[utoipa::path(post, path = "/v1/vms/{name}/console", responses((status = 101), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn console(daemon: Served, name: Named, mut request: Request) -> Response {
    let asked = request.headers().get(UPGRADE);
    if asked.is_none_or(|protocol| protocol != CONSOLE_PROTOCOL) {
        let why = "the console needs the header 'upgrade: memfold-console'";
        return refusal(StatusCode::UPGRADE_REQUIRED, why);
    }
    let console = match blocking(daemon, move |d| d.vms().console(&name)).await {
        Ok(Json(console)) => console,
        Err(failure) => return failure.into_response(),
    };
    let upgrade = Upgrade::of(&mut request);
    tokio::spawn(async move {
        if let Err(error) = pass_bytes(upgrade, console).await {
            debug!(%error, "connection to a VM's console ended with an error");
        }
    });
    let headers = [(CONNECTION, "upgrade"), (UPGRADE, CONSOLE_PROTOCOL)];
    (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
}

/// Passes bytes between a client and a console, until one of them closes its connection.
async fn pass_bytes(upgrade: Upgrade, console: Console) -> io::Result<()> {
    let mut client = upgrade.connection().await?;
    let stream = console.stream.try_clone()?;
    stream.set_nonblocking(true)?;
    let mut guest = tokio::net::UnixStream::from_std(stream)?;
    tokio::io::copy_bidirectional(&mut client, &mut guest).await?;
    // The next client may use the console from here on.
    drop(console);
    Ok(())
}

fn seconds(value: f64) -> Result<Duration, DaemonError> {
    Duration::try_from_secs_f64(value).map_err(|_| {
        DaemonError::BadRequest(format!("timeout_s is {value}; give seconds, 0 or more"))
    })
}

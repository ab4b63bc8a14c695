//! Parses the JSON bodies of requests to the daemon's API, and makes responses from results and
//! errors.

use std::io;
use std::ops::Deref;
use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, Path as UrlPath, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use memfold_api::ErrorBody;
use memfold_daemon::{Daemon, DaemonError, chain};
use memfold_ksm::KsmError;
use memfold_ledger::estimate::EstimateError;
use memfold_lend::RegistryError;
use memfold_lend::graph::GraphError;
use memfold_lend::lvm::LvmError;
use memfold_segment::SegmentError;
use memfold_snapshot::SnapshotError;
use memfold_transfer::TransferError;
use memfold_vm::balloon::BalloonError;
use memfold_vm::{AgentError, LaunchError, MachineError, QmpError, RamError};

use super::limits::MAX_BODY;
use super::runtimes::on_worker;

/// Error message of a refused request, attached to the response for the audit log.
#[derive(Clone, Debug)]
pub(crate) struct Told(pub String);

/// The JSON body of a request. A body that cannot be parsed is refused with an [`ErrorBody`], like
/// all other errors.
#[derive(FromRequest)]
#[from_request(via(Json), rejection(BadBody))]
pub(crate) struct Asked<T>(pub(crate) T);

pub(crate) struct BadBody(JsonRejection);

impl<T> Deref for Asked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl From<JsonRejection> for BadBody {
    fn from(rejection: JsonRejection) -> Self {
        Self(rejection)
    }
}

impl IntoResponse for BadBody {
    fn into_response(self) -> Response {
        // The status is 413, 415 or 400. Invalid JSON and invalid fields have the same status,
        // because the difference does not matter to the client.
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

pub(crate) fn refusal(status: StatusCode, error: &str) -> Response {
    refused(status, error, None, false)
}

pub(crate) fn refusal_with_hint(status: StatusCode, error: &str, hint: &str) -> Response {
    refused(status, error, Some(hint.to_owned()), false)
}

/// Returns the response to a request that the daemon could not carry out.
pub(crate) fn failed(what: &str, error: &io::Error) -> Response {
    let text = format!("cannot {what}: {error}");
    refusal(StatusCode::INTERNAL_SERVER_ERROR, &text)
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

pub(crate) struct Failure(pub(crate) DaemonError);

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = match &self.0 {
            DaemonError::NoSuchVm(_)
            | DaemonError::NoSuchDefinition(_)
            | DaemonError::NoSuchPath
            | DaemonError::NoHistory
            | DaemonError::Estimate(EstimateError::NoSuchVm(_))
            | DaemonError::Lvm(LvmError::NoVolume(_))
            | DaemonError::Snapshot(SnapshotError::Unknown(_))
            | DaemonError::Transfer(TransferError::Unknown { .. })
            | DaemonError::Segment(SegmentError::Unknown(_)) => StatusCode::NOT_FOUND,
            DaemonError::NameTaken(_)
            | DaemonError::Refused { .. }
            | DaemonError::LenderFailed { .. }
            | DaemonError::Agent(
                AgentError::TooOld { .. } | AgentError::NotAllowed(_) | AgentError::TooManyStreams,
            )
            | DaemonError::Balloon(BalloonError::NoDriver)
            | DaemonError::Machine(MachineError::NotOurs { .. })
            | DaemonError::Lvm(LvmError::Unfit { .. })
            | DaemonError::Registry(
                RegistryError::NothingToSpare { .. }
                | RegistryError::State { .. }
                | RegistryError::Superseded { .. },
            )
            | DaemonError::Braked { .. }
            | DaemonError::Ksm(KsmError::Busy(_))
            | DaemonError::Launch(
                LaunchError::NameTaken { .. }
                | LaunchError::Forward { .. }
                | LaunchError::ChangedHeader(_),
            )
            | DaemonError::Snapshot(
                SnapshotError::Taken(_)
                | SnapshotError::Twin { .. }
                | SnapshotError::InUse { .. }
                | SnapshotError::Open { .. }
                | SnapshotError::Busy(_)
                | SnapshotError::Named { .. }
                | SnapshotError::BuiltOn { .. },
            )
            | DaemonError::Transfer(TransferError::Taken { .. })
            | DaemonError::Segment(
                SegmentError::InUse { .. } | SegmentError::Written { .. } | SegmentError::Busy(_),
            ) => StatusCode::CONFLICT,
            DaemonError::BadRequest(_)
            | DaemonError::Launch(LaunchError::Spec(_))
            | DaemonError::Graph(GraphError::NoSwapDisk(_))
            | DaemonError::Registry(RegistryError::Value { .. })
            | DaemonError::Snapshot(SnapshotError::Name(_) | SnapshotError::Impossible(_))
            | DaemonError::Transfer(
                TransferError::Address { .. }
                | TransferError::Arguments { .. }
                | TransferError::Key(_)
                | TransferError::Signature { .. }
                | TransferError::Space { .. }
                | TransferError::Unsigned { .. },
            )
            | DaemonError::Segment(
                SegmentError::Name(_)
                | SegmentError::Source { .. }
                | SegmentError::Foreign { .. }
                | SegmentError::Impossible(_),
            ) => StatusCode::BAD_REQUEST,
            // Clients may repeat a request after status 503, but this command was run.
            DaemonError::Agent(AgentError::Timeout { .. }) => StatusCode::GATEWAY_TIMEOUT,
            error if is_unanswered(error) => StatusCode::SERVICE_UNAVAILABLE,
            error if error.impossible_here() => StatusCode::NOT_IMPLEMENTED,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let (hint, impossible) = (self.0.hint(), self.0.impossible_here());
        refused(status, &chain(&self.0), hint, impossible)
    }
}

/// Returns whether a VM, its guest's agent or the registry of leases did not answer in time, so
/// that the same request may succeed later.
fn is_unanswered(error: &DaemonError) -> bool {
    let qmp = match error {
        DaemonError::Registry(RegistryError::Unusable { .. })
        | DaemonError::Agent(
            AgentError::NoSession(_)
            | AgentError::Lost
            | AgentError::TrimTimeout { .. }
            | AgentError::Write(_),
        ) => return true,
        DaemonError::Qmp(error)
        | DaemonError::Machine(MachineError::Qmp(error))
        | DaemonError::Ram(RamError::Qmp(error))
        | DaemonError::Balloon(BalloonError::Qmp(error))
        | DaemonError::Graph(GraphError::Qmp(error) | GraphError::Unknown(error))
        | DaemonError::Snapshot(
            SnapshotError::Qmp(error) | SnapshotError::Ram(RamError::Qmp(error)),
        ) => error,
        _ => return false,
    };
    matches!(qmp, QmpError::Timeout { .. } | QmpError::Busy { .. })
}

/// The daemon, as an argument of handlers.
pub(crate) type Served = State<Arc<Daemon>>;

/// Name in the path of a request.
pub(crate) type Named = UrlPath<String>;

/// Result of most request handlers.
pub(crate) type Answered<T> = Result<Json<T>, Failure>;

/// Runs a blocking method of the daemon outside the async threads, with the daemon's rights.
pub(crate) async fn blocking<T: Send + 'static>(
    State(daemon): Served,
    work: impl FnOnce(&Arc<Daemon>) -> Result<T, DaemonError> + Send + 'static,
) -> Answered<T> {
    // Right after its start, the daemon may not have adopted all running VMs yet.
    let work = move || {
        daemon.settle_first();
        work(&daemon)
    };
    match on_worker(work).await {
        Ok(result) => result.map(Json).map_err(Failure),
        Err(_) => Err(Failure(DaemonError::Internal(
            "a task of the daemon ended unexpectedly",
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(error: impl Into<DaemonError>) -> StatusCode {
        Failure(error.into()).into_response().status()
    }

    #[test]
    fn a_request_that_a_vm_or_the_registry_does_not_answer_fails_with_status_503() {
        let late = || QmpError::Timeout {
            command: "stop".into(),
            seconds: 10.0,
        };
        let busy = QmpError::Busy {
            path: "/qmp".into(),
            seconds: 1.0,
        };
        let away = RegistryError::Unusable {
            place: "a".into(),
            why: "no route".into(),
        };
        let all = [
            status(AgentError::NoSession("it boots".into())),
            status(AgentError::Lost),
            status(AgentError::TrimTimeout { seconds: 1.0 }),
            status(AgentError::Write(io::ErrorKind::BrokenPipe.into())),
            status(late()),
            status(busy),
            status(MachineError::Qmp(late())),
            status(RamError::Qmp(late())),
            status(BalloonError::Qmp(late())),
            status(GraphError::Unknown(late())),
            status(SnapshotError::Qmp(late())),
            status(away),
        ];
        let unanswered = |status: &StatusCode| *status == StatusCode::SERVICE_UNAVAILABLE;
        assert!(all.iter().all(unanswered), "{all:?}");
        let refused = QmpError::Refused {
            command: "stop".into(),
            class: "GenericError".into(),
            description: "no".into(),
        };
        assert_eq!(status(refused), StatusCode::INTERNAL_SERVER_ERROR);
    }

    #[test]
    fn a_command_in_a_guest_that_reaches_its_own_time_limit_fails_with_status_504() {
        let late = AgentError::Timeout { seconds: 1.0 };
        assert_eq!(status(late), StatusCode::GATEWAY_TIMEOUT);
    }

    #[test]
    fn a_request_that_the_present_state_forbids_fails_with_status_409() {
        let name = "web".to_owned();
        let all = [
            status(BalloonError::NoDriver),
            status(MachineError::NotOurs { name }),
            status(DaemonError::Refused {
                why: "a snapshot of VM 'web' is being made".into(),
                fix: "wait until it is complete".into(),
            }),
            status(SnapshotError::Busy("snapshot 'a' is being removed".into())),
            status(SegmentError::Busy("segment 'a' is being built".into())),
        ];
        assert_eq!(all, [StatusCode::CONFLICT; 5]);
        let impossible = status(SnapshotError::Impossible("the VM has a swap disk".into()));
        assert_eq!(impossible, StatusCode::BAD_REQUEST);
    }

    #[test]
    fn an_estimate_of_a_vm_that_does_not_run_fails_with_status_404() {
        let ghost = EstimateError::NoSuchVm("ghost".into());
        assert_eq!(status(ghost), StatusCode::NOT_FOUND);
    }
}

//! Lending over the interface: what goes over it, the handlers, and the registry of another daemon.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path as UrlPath, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::client::Client;
use super::server::{Asked, Failure, blocking};
use super::types::ErrorBody;
use crate::daemon::Daemon;
use crate::lend::blast::Blast;
use crate::lend::calls::{Answer, Call, CallRegistry};
use crate::lend::{Durability, Lease, LenderStatus, LenderView, Registry};

/// How long another daemon's registry may take for an answer.
const REGISTRY_TIMEOUT: Duration = Duration::from_secs(3);

/// `POST /v1/lend`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LendRequest {
    /// Most bytes to lend.
    pub max_bytes: u64,
    /// Address on which exports listen, with TLS and a key each; null: on Unix sockets, for borrowers on this host.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub listen: Option<IpAddr>,
}

/// `POST /v1/vms/{name}/borrow`
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BorrowRequest {
    /// Bytes to borrow: at least as many as the VM's swap disk has, which is also what an absent value means.
    #[serde(default)]
    pub bytes: Option<u64>,
    /// What keeps the bytes if a lender dies.
    #[serde(default)]
    pub durability: Durability,
}

/// Where a VM's swap disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SwapPlace {
    /// On lent RAM.
    Lent,
    /// On lent RAM, with fewer copies than were asked for.
    Degraded,
    /// On this host's disk, though lent RAM was asked for: its lender has died or wanted it back.
    OnCopy,
    /// On this host's disk.
    OnDisk,
    /// Lost with its lender.
    Lost,
}

/// What a VM has borrowed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Borrowed {
    /// The VM.
    pub vm: String,
    /// Where its swap disk is.
    pub place: SwapPlace,
    /// Bytes of the disk.
    pub bytes: u64,
    /// What keeps the bytes if a lender dies; null: nothing is lent.
    pub durability: Option<Durability>,
    /// Hosts that lend it.
    pub lenders: Vec<String>,
    /// Whether that was changed now.
    pub changed: bool,
    /// How long that took.
    pub took_ms: u64,
}

/// `GET /v1/leases`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseReport {
    /// Name of this host.
    pub host: String,
    /// Where the registry is.
    pub registry: String,
    /// What this host lends; null: it doesn't.
    #[schema(value_type = Option<Object>)]
    pub lending: Option<LenderStatus>,
    /// VMs of this host that borrow.
    pub borrowed: Vec<Borrowed>,
    /// All lenders that the registry knows.
    #[schema(value_type = Vec<Object>)]
    pub lenders: Vec<LenderView>,
    /// All leases.
    #[schema(value_type = Vec<Object>)]
    pub leases: Vec<Lease>,
    /// The blast radius: what the death of each lender would do.
    #[schema(value_type = Vec<Object>)]
    pub blast: Vec<Blast>,
}

pub(super) fn routes() -> Router<Arc<Daemon>> {
    Router::new()
        .route("/v1/lend", get(lending).post(lend).delete(lend_no_more))
        .route("/v1/vms/{name}/borrow", post(borrow))
        .route("/v1/vms/{name}/return", post(give_back))
        .route("/v1/leases", get(leases))
        .route("/v1/registry", post(registry))
}

/// What this host lends; null: it doesn't.
#[utoipa::path(get, path = "/v1/lend", responses((status = 200, body = Option<Object>)))]
pub(super) async fn lending(
    State(daemon): State<Arc<Daemon>>,
) -> Result<Json<Option<LenderStatus>>, Failure> {
    blocking(daemon, |d| Ok(d.lender_status())).await
}

/// Lends RAM of this host, or changes how much.
#[utoipa::path(post, path = "/v1/lend", request_body = LendRequest, responses((status = 200, body = Object), (status = 501, body = ErrorBody)))]
pub(super) async fn lend(
    State(daemon): State<Arc<Daemon>>,
    Asked(request): Asked<LendRequest>,
) -> Result<Json<LenderStatus>, Failure> {
    blocking(daemon, move |d| d.lend(&request)).await
}

/// Takes everything back, and lends no more.
#[utoipa::path(delete, path = "/v1/lend", responses((status = 200, body = Option<Object>)))]
pub(super) async fn lend_no_more(
    State(daemon): State<Arc<Daemon>>,
) -> Result<Json<Option<LenderStatus>>, Failure> {
    blocking(daemon, |d| Ok(d.lend_no_more())).await
}

/// Switches a VM's swap disk to lent RAM.
#[utoipa::path(post, path = "/v1/vms/{name}/borrow", request_body = BorrowRequest, responses((status = 200, body = Borrowed), (status = 409, body = ErrorBody)))]
pub(super) async fn borrow(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
    Asked(request): Asked<BorrowRequest>,
) -> Result<Json<Borrowed>, Failure> {
    blocking(daemon, move |d| d.borrow_memory(&name, &request)).await
}

/// Switches it back to this host's disk.
#[utoipa::path(post, path = "/v1/vms/{name}/return", responses((status = 200, body = Borrowed), (status = 404, body = ErrorBody)))]
pub(super) async fn give_back(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
) -> Result<Json<Borrowed>, Failure> {
    blocking(daemon, move |d| d.return_memory(&name)).await
}

/// Who lends what to whom.
#[utoipa::path(get, path = "/v1/leases", responses((status = 200, body = LeaseReport)))]
pub(super) async fn leases(
    State(daemon): State<Arc<Daemon>>,
) -> Result<Json<LeaseReport>, Failure> {
    blocking(daemon, |d| d.leases()).await
}

/// The registry that this daemon serves, for other daemons.
#[utoipa::path(post, path = "/v1/registry", request_body = Object, responses((status = 200, body = Object), (status = 400, body = ErrorBody)))]
pub(super) async fn registry(
    State(daemon): State<Arc<Daemon>>,
    Asked(call): Asked<Call>,
) -> Result<Json<Answer>, Failure> {
    blocking(daemon, move |d| d.registry_call(&call)).await
}

/// The registry that the daemon at `socket` serves.
pub fn remote_registry(socket: &Path) -> Arc<dyn Registry> {
    let place = socket.display().to_string();
    let socket = socket.to_owned();
    let transport = move |call: &Call| {
        let client = Client::new(&socket).map_err(|error| error.to_string())?;
        client
            .within(REGISTRY_TIMEOUT)
            .post("/v1/registry", call)
            .map_err(|error| crate::daemon::chain(&error))
    };
    Arc::new(CallRegistry::new(place, transport))
}

//! Lending over the interface: what goes over it, the handlers, and the registry of another daemon.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, Path as UrlPath, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::access::Visitor;
use super::client::Client;
use super::server::{Asked, Failure, blocking, refusal_with_hint};
use super::types::ErrorBody;
use crate::daemon::{Daemon, DaemonError};
use crate::lend::blast::Blast;
use crate::lend::calls::{Answer, Call, CallRegistry};
use crate::lend::distrust::Distrusted;
use crate::lend::export::{Listen, TcpListen};
use crate::lend::https::{Https, Post};
use crate::lend::lvm::Volume;
use crate::lend::place::read_token;
use crate::lend::waits::Waits;
use crate::lend::{
    Durability, EtcdRegistry, Lease, LeaseId, LenderStatus, LenderView, Registry, RegistryAt,
    Transport,
};

/// Where the registry that this daemon serves is asked.
pub(super) const REGISTRY_PATH: &str = "/v1/registry";

/// How long another daemon's registry may take for an answer.
const REGISTRY_TIMEOUT: Duration = Duration::from_secs(3);

/// `POST /v1/lend`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LendRequest {
    /// Most bytes to lend.
    pub max_bytes: u64,
    /// Address on which exports listen, with TLS and a key each; null: on Unix sockets, for borrowers on this host.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub listen: Option<IpAddr>,
    /// What borrowers are told instead of that address, where a forwarder is between; null: that address.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub announce: Option<IpAddr>,
    /// First and last port for exports; null: any that is free.
    #[serde(default)]
    #[schema(value_type = Option<Vec<u16>>)]
    pub ports: Option<(u16, u16)>,
    /// What exports speak. By iSCSI a null `listen` means this host's own 127.0.0.1.
    #[serde(default)]
    pub transport: Transport,
    /// Agrees that what VMs have swapped out is sent in clear text (iSCSI to other hosts).
    #[serde(default)]
    pub cleartext: bool,
}

impl LendRequest {
    /// Where exports listen.
    ///
    /// # Errors
    /// Why that can't be: borrowers could not reach them, or it contradicts itself.
    pub fn listens(&self) -> Result<Listen, &'static str> {
        let is_iscsi = self.transport == Transport::Iscsi;
        if self.cleartext && !is_iscsi {
            return Err("NBD is encrypted over TCP; --cleartext is for --transport iscsi");
        }
        let own = is_iscsi.then_some(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let Some(ip) = self.listen.or(own) else {
            if self.announce.is_some() || self.ports.is_some() {
                return Err(
                    "exports on Unix sockets have no address and no ports; give --listen ADDRESS",
                );
            }
            return Ok(Listen::Unix);
        };
        if self.announce.unwrap_or(ip).is_unspecified() {
            return Err(
                "borrowers can't connect to that address; give one that they reach as --announce ADDRESS, or listen on that",
            );
        }
        if self
            .ports
            .is_some_and(|(first, last)| first == 0 || first > last)
        {
            return Err("ports go from a first one to a last one, and not from 0");
        }
        let stays = |ip: IpAddr| ip.is_loopback();
        if is_iscsi && !self.cleartext && !(stays(ip) && self.announce.is_none_or(stays)) {
            return Err(
                "iSCSI encrypts nothing: whoever is on the way to the borrower reads what its VMs have swapped out, and can change it. Lend by NBD (--transport nbd), or give --cleartext if you trust that network",
            );
        }
        let tcp = TcpListen {
            ip,
            announce: self.announce,
            ports: self.ports,
        };
        Ok(if is_iscsi {
            Listen::Iscsi(tcp)
        } else {
            Listen::Tcp(tcp)
        })
    }
}

/// `POST /v1/vms/{name}/borrow`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BorrowRequest {
    /// Bytes to borrow: at least as many as the VM's swap disk has, which is also what an absent value means.
    #[serde(default)]
    pub bytes: Option<u64>,
    /// What keeps the bytes if a lender dies.
    #[serde(default)]
    pub durability: Durability,
    /// Over how many lenders the disk is laid out, 1 to 8; absent: as few as have room for it, and one unless there is a copy on disk.
    #[serde(default)]
    pub stripes: Option<u8>,
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
    /// The VM; or `VG/LV`, a swap volume of the host.
    pub vm: String,
    /// Where its swap disk is.
    pub place: SwapPlace,
    /// Bytes of the disk.
    pub bytes: u64,
    /// What keeps the bytes if a lender dies; null: nothing is lent.
    pub durability: Option<Durability>,
    /// Hosts that lend it.
    pub lenders: Vec<String>,
    /// Over how many lenders each copy is laid out; null: nothing is lent.
    #[serde(default)]
    pub stripes: Option<u8>,
    /// How long its guest has waited for it since it borrowed first; null: not known, or nothing is lent.
    #[serde(default)]
    pub waits: Option<Waits>,
    /// Whether that was changed now.
    pub changed: bool,
    /// How long that took.
    pub took_ms: u64,
}

impl Borrowed {
    /// Where it is, in words.
    #[must_use]
    pub fn where_it_is(&self) -> String {
        match self.place {
            SwapPlace::Lent => format!(
                "{} of {}{} ({})",
                ByteSize(self.bytes),
                self.lenders.join(" and "),
                match self.stripes {
                    Some(2..) => ", in stripes",
                    _ => "",
                },
                match self.durability {
                    Some(Durability::Disk) => "with a copy on this host's disk",
                    Some(Durability::Replica) => "one a copy of the other",
                    _ => "without a copy: programs of the guest die with the lender",
                }
            ),
            SwapPlace::Degraded => format!("{}, with one copy only", self.lenders.join(" and ")),
            SwapPlace::OnCopy => "this host's disk: its lender is gone".into(),
            SwapPlace::OnDisk => "this host's disk".into(),
            SwapPlace::Lost => "nowhere: lost with its lender".into(),
        }
    }
}

/// `GET /v1/leases`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseReport {
    /// Name of this host.
    pub host: String,
    /// Where the registry is.
    pub registry: String,
    /// Why the registry can't be used now: what lenders and leases there are, and so the blast radius, is not known. Null: it answers.
    #[serde(default)]
    pub registry_away: Option<String>,
    /// What this host lends; null: it doesn't.
    #[schema(value_type = Option<Object>)]
    pub lending: Option<LenderStatus>,
    /// How that was asked for: what to say again, to change how much. Null: it doesn't lend, or takes everything back.
    #[serde(default)]
    pub lends_as: Option<LendRequest>,
    /// VMs and volumes of this host that borrow.
    pub borrowed: Vec<Borrowed>,
    /// VMs of this host on their own disk, for which lent RAM was asked: they borrow again when a lender has room.
    #[serde(default)]
    pub again: Vec<String>,
    /// All lenders that the registry knows.
    #[schema(value_type = Vec<Object>)]
    pub lenders: Vec<LenderView>,
    /// All leases.
    #[schema(value_type = Vec<Object>)]
    pub leases: Vec<Lease>,
    /// The blast radius: what the death of each lender would do.
    #[schema(value_type = Vec<Object>)]
    pub blast: Vec<Blast>,
    /// Lenders that served wrong bytes to VMs of this host, of which nothing is borrowed now.
    #[schema(value_type = Vec<Object>)]
    pub distrusted: Vec<Distrusted>,
    /// Wrong bytes that lenders have served to VMs of this host since its daemon began. No VM was given any.
    pub lies: u64,
}

pub(super) fn routes() -> Router<Arc<Daemon>> {
    Router::new()
        .route("/v1/lend", get(lending).post(lend).delete(lend_no_more))
        .route("/v1/vms/{name}/borrow", post(borrow))
        .route("/v1/vms/{name}/return", post(give_back))
        .route("/v1/volumes/{group}/{name}/borrow", post(borrow_for_volume))
        .route("/v1/volumes/{group}/{name}/return", post(return_volume))
        .route("/v1/leases", get(leases))
        .route("/v1/leases/{id}/return", post(recall_lease))
        .route("/v1/lenders/{name}/distrust", delete(trust))
        .route(REGISTRY_PATH, post(registry))
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

/// Puts a swap volume of this host's LVM on lent RAM.
#[utoipa::path(post, path = "/v1/volumes/{group}/{name}/borrow", request_body = BorrowRequest, responses((status = 200, body = Borrowed), (status = 409, body = ErrorBody)))]
pub(super) async fn borrow_for_volume(
    State(daemon): State<Arc<Daemon>>,
    UrlPath((group, name)): UrlPath<(String, String)>,
    Asked(request): Asked<BorrowRequest>,
) -> Result<Json<Borrowed>, Failure> {
    blocking(daemon, move |d| {
        d.borrow_for_volume(&volume(&group, &name)?, &request)
    })
    .await
}

/// Takes it off.
#[utoipa::path(post, path = "/v1/volumes/{group}/{name}/return", responses((status = 200, body = Borrowed), (status = 409, body = ErrorBody)))]
pub(super) async fn return_volume(
    State(daemon): State<Arc<Daemon>>,
    UrlPath((group, name)): UrlPath<(String, String)>,
) -> Result<Json<Borrowed>, Failure> {
    blocking(daemon, move |d| d.return_volume(&volume(&group, &name)?)).await
}

fn volume(group: &str, name: &str) -> Result<Volume, DaemonError> {
    let parsed = format!("{group}/{name}").parse();
    parsed.map_err(DaemonError::BadRequest)
}

/// Who lends what to whom.
#[utoipa::path(get, path = "/v1/leases", responses((status = 200, body = LeaseReport)))]
pub(super) async fn leases(
    State(daemon): State<Arc<Daemon>>,
) -> Result<Json<LeaseReport>, Failure> {
    blocking(daemon, |d| d.leases()).await
}

/// Asks for one lease of this host back, by its number: its borrower has 10 s, and where the lent bytes are the only ones a second more for
/// each 20 MiB. Gives the lease as it was.
#[utoipa::path(post, path = "/v1/leases/{id}/return", responses((status = 200, body = Object), (status = 409, body = ErrorBody)))]
pub(super) async fn recall_lease(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(id): UrlPath<u64>,
) -> Result<Json<Lease>, Failure> {
    blocking(daemon, move |d| d.recall_lease(LeaseId(id))).await
}

/// Believes a lender again that served wrong bytes; whether it wasn't believed.
#[utoipa::path(delete, path = "/v1/lenders/{name}/distrust", responses((status = 200, body = bool)))]
pub(super) async fn trust(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(name): UrlPath<String>,
) -> Result<Json<bool>, Failure> {
    blocking(daemon, move |d| Ok(d.trust_lender(&name))).await
}

/// The registry that this daemon serves, for other daemons.
#[utoipa::path(post, path = "/v1/registry", request_body = Object, responses((status = 200, body = Object), (status = 400, body = ErrorBody)))]
pub(super) async fn registry(
    State(daemon): State<Arc<Daemon>>,
    Extension(visitor): Extension<Visitor>,
    Asked(call): Asked<Call>,
) -> Response {
    // A host speaks for itself alone: it ends no lease of others, and gets no key of theirs.
    if let (Some(host), Some(named)) = (&visitor.host, call.speaks_for()) {
        if host != named {
            return refusal_with_hint(
                StatusCode::FORBIDDEN,
                &format!("the token is host '{host}'s, and this was asked for host '{named}'"),
                "each host needs a token of its own: 'memfold host add NAME' there, with the NAME of 'memfold serve --host' here",
            );
        }
    }
    if let (Some(_), Call::Publish { endpoint, .. }) = (&visitor.host, &call) {
        if let Err(error) = endpoint.check_of_another_host() {
            return Json(Answer::Refused(error)).into_response();
        }
    }
    blocking(daemon, move |d| d.registry_call(&call))
        .await
        .into_response()
}

/// The registry that another program serves.
pub fn registry_at(at: &RegistryAt) -> Arc<dyn Registry> {
    let place = at.to_string();
    match at {
        RegistryAt::Socket(socket) => {
            let socket = socket.clone();
            let transport = move |call: &Call| {
                let client = Client::new(&socket).map_err(|error| error.to_string())?;
                client
                    .within(REGISTRY_TIMEOUT)
                    .post(REGISTRY_PATH, call)
                    .map_err(|error| crate::daemon::chain(&error))
            };
            Arc::new(CallRegistry::new(place, transport))
        }
        RegistryAt::Daemon { member, tls, token } => {
            let http = Https::new(vec![member.clone()], Some(tls.clone()));
            let token = token.clone();
            let transport = move |call: &Call| ask_daemon(&http, &token, call);
            Arc::new(CallRegistry::new(place, transport))
        }
        RegistryAt::Etcd { members, tls } => {
            Arc::new(EtcdRegistry::new(place, members.clone(), tls.clone()))
        }
    }
}

fn ask_daemon(http: &Https, token: &Path, call: &Call) -> Result<Answer, String> {
    let token = read_token(token).map_err(|error| error.to_string())?;
    let body = serde_json::to_vec(call).map_err(|error| error.to_string())?;
    let post = Post {
        path: REGISTRY_PATH,
        token: Some(&token),
        body: &body,
        patience: REGISTRY_TIMEOUT,
    };
    let (status, body) = http.post(&post).map_err(|error| error.to_string())?;
    if status == StatusCode::OK {
        return serde_json::from_slice(&body).map_err(|error| {
            format!("its answer makes no sense ({error}); is it of another version?")
        });
    }
    let refused: Option<ErrorBody> = serde_json::from_slice(&body).ok();
    Err(refused.map_or_else(
        || format!("it answered {status}"),
        |refused| match refused.hint {
            Some(hint) => format!("{} ({hint})", refused.error),
            None => refused.error,
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iscsi_leaves_this_host_only_if_that_is_agreed_to() {
        let request = |words: &str| -> LendRequest {
            serde_json::from_str(&format!(r#"{{"max_bytes": 1, {words}}}"#)).unwrap()
        };
        let iscsi = r#""transport": "iscsi""#;
        let own = request(iscsi).listens().unwrap();
        assert_eq!(own.to_string(), "127.0.0.1, by iSCSI, not encrypted");
        for (words, agreed) in [
            (r#""listen": "127.0.0.1""#, true),
            (r#""listen": "::1""#, true),
            (r#""listen": "10.0.0.1""#, false),
            (r#""listen": "127.0.0.1", "announce": "10.0.0.1""#, false),
        ] {
            let words = format!("{iscsi}, {words}");
            let said = request(&words).listens();
            assert_eq!(said.is_ok(), agreed, "{words}: {said:?}");
            let words = format!(r#"{words}, "cleartext": true"#);
            request(&words).listens().unwrap();
        }
        request(r#""listen": "10.0.0.1", "cleartext": true"#)
            .listens()
            .unwrap_err();
    }
}

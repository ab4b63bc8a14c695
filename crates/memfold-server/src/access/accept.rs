//! Accepts connections to the API on the Unix socket and on TCP, and limits their numbers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use memfold_api::Role;
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};

use super::counts::Why;
use super::door::TcpDoor;
use super::peer::{Groups, Peer};
use super::state::Access;
use super::unread::{Unread, UnreadLimit};
use crate::runtimes::on_worker;

/// Largest number of TCP connections; further connections are closed at once.
const TCP_CONNECTIONS: usize = 256;

/// Largest number of TCP connections from one address (IPv6: from one /64 network), so that one
/// host cannot use up the connections of the others.
const OF_ONE_ADDRESS: usize = 64;

/// Largest number of Unix connections of users who may operate; further connections are closed at
/// once.
const OPERATORS: usize = 1024;

/// Largest number of Unix connections of users who may only read. Readers have a limit of their
/// own, so that they cannot use up the operators' connections.
const READERS: usize = 128;

/// Largest number of Unix connections of users without access. The server accepts such connections
/// only to refuse each request with a reason.
const STRANGERS: usize = 16;

/// Time limit for receiving a request's head, and for the TLS handshake.
const HEAD_TIME: Duration = Duration::from_secs(10);

/// Largest size of a request's head, and of the read buffer, in bytes.
const HEAD_BYTES: usize = 32 << 10;

/// Accepts connections on the Unix socket until this future is dropped. `ending` changes when the
/// daemon ends; each connection holds a copy until its last response is sent.
pub(crate) async fn accept_unix(
    listener: UnixListener,
    groups: Groups,
    router: Router,
    ending: watch::Receiver<bool>,
) {
    let [operators, readers, strangers] =
        [OPERATORS, READERS, STRANGERS].map(|most| Arc::new(Semaphore::new(most)));
    loop {
        let Some((stream, _)) = accepted(listener.accept().await).await else {
            continue;
        };
        match Peer::of(&stream, groups) {
            Ok(peer) => {
                let slots = match peer.known_role() {
                    Some(Role::Operate) => &operators,
                    Some(Role::Read | Role::Host) => &readers,
                    None => &strangers,
                };
                let Ok(slot) = slots.clone().try_acquire_owned() else {
                    continue;
                };
                let stream = unread(stream, slot);
                let limit = stream.limit.clone();
                let (router, ending) = (router.clone(), ending.clone());
                tokio::spawn(serve(stream, peer, Some(limit), router, ending));
            }
            // The kernel does not name the peer, so the connection is closed.
            Err(error) => {
                debug!(%error, "cannot identify the peer of a connection, so the connection was closed");
            }
        }
    }
}

/// Time for which a peer may leave sent data unread.
const UNREAD_TIME: Duration = Duration::from_secs(60);

/// Accepts TCP connections until this future is dropped.
pub(crate) async fn accept_tcp(
    listener: TcpListener,
    door: TcpDoor,
    access: Arc<Access>,
    router: Router,
    ending: watch::Receiver<bool>,
) {
    let places = Arc::new(Places::default());
    loop {
        let Some((stream, address)) = accepted(listener.accept().await).await else {
            continue;
        };
        let Some(place) = Place::take(&places, address.ip()) else {
            access.refused.add(Why::Other);
            continue;
        };
        // This timeout also ends a connection whose receive window stays closed
        // (`TCP_USER_TIMEOUT`, tcp(7)).
        let most_ms = u32::try_from(UNREAD_TIME.as_millis()).unwrap_or(u32::MAX);
        // Keepalive ends a connection that carries no data and whose client is gone, such as that
        // of a console.
        let limited = sockopt::set_tcp_user_timeout(&stream, most_ms)
            .and_then(|()| sockopt::set_tcp_keepidle(&stream, UNREAD_TIME))
            .and_then(|()| sockopt::set_tcp_keepintvl(&stream, HEAD_TIME))
            .and_then(|()| sockopt::set_socket_keepalive(&stream, true));
        if limited.is_err() {
            continue;
        }
        let (router, ending) = (router.clone(), ending.clone());
        let (access, tls) = (access.clone(), door.tls.clone());
        tokio::spawn(async move {
            let peer = Peer::Tcp {
                address,
                tls: tls.is_some(),
            };
            match tls {
                None => serve(unread(stream, place), peer, None, router, ending).await,
                Some(tls) => {
                    // The files of the certificate may belong to another user.
                    let Ok(config) = on_worker(move || tls.config()).await else {
                        return;
                    };
                    let acceptor = TlsAcceptor::from(config);
                    let hello = tokio::time::timeout(HEAD_TIME, acceptor.accept(stream));
                    let why = match hello.await {
                        Ok(Ok(stream)) => {
                            let stream = unread(stream, place);
                            return serve(stream, peer, None, router, ending).await;
                        }
                        Ok(Err(error)) => error.to_string(),
                        Err(_) => "the client sent nothing in time".to_owned(),
                    };
                    access.refused.add(Why::Tls);
                    access.audit.failed_hello(address.ip(), &why);
                }
            }
        });
    }
}

/// Number of TCP connections by the peer's address (IPv6: by /64 network).
type Places = Mutex<HashMap<IpAddr, usize>>;

/// One TCP connection, which is counted until this value is dropped.
struct Place {
    all: Arc<Places>,
    of: IpAddr,
}

impl Place {
    fn take(all: &Arc<Places>, address: IpAddr) -> Option<Self> {
        let of = match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
            address @ IpAddr::V4(_) => address,
        };
        let mut places = all.lock().unwrap_or_else(PoisonError::into_inner);
        let taken: usize = places.values().sum();
        let count = places.get(&of).copied().unwrap_or(0);
        if taken >= TCP_CONNECTIONS || count >= OF_ONE_ADDRESS {
            return None;
        }
        places.insert(of, count + 1);
        Some(Self {
            all: all.clone(),
            of,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut count) = places.entry(self.of) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// Returns the accepted connection; pauses after a failed `accept`. If file descriptors are
/// lacking, an immediate retry would only use CPU.
async fn accepted<T>(result: io::Result<T>) -> Option<T> {
    if let Err(error) = &result {
        warn!(%error, "cannot accept a connection; retrying in 0.2 s");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    result.ok()
}

/// `place`: counts the connection until this value is dropped.
fn unread<S>(stream: S, place: impl Send + Sync + 'static) -> Unread<S> {
    Unread::new(stream, UNREAD_TIME, place)
}

/// Serves the requests of one connection. `limit`: the connection's time limit, which the handler
/// of an upgrade may lift; `None`: the limit stays.
async fn serve<S>(
    stream: S,
    peer: Peer,
    limit: Option<UnreadLimit>,
    router: Router,
    mut ending: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let inner = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer.clone());
        if let Some(limit) = &limit {
            request.extensions_mut().insert(limit.clone());
        }
        inner.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        _ = ending.changed() => {
            // The response in progress, if any, is the last one of this connection.
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        debug!(%error, "HTTP connection ended with an error");
    }
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::access::Upgrade;

    #[test]
    fn clients_of_one_ip_address_get_at_most_a_quarter_of_the_tcp_connections() {
        let all = Arc::new(Places::default());
        let take = |address: &str| Place::take(&all, address.parse().unwrap());
        let taken: Vec<Place> = (0..).map_while(|_| take("192.0.2.1")).collect();
        assert_eq!(taken.len(), OF_ONE_ADDRESS);
        assert!(take("::ffff:192.0.2.1").is_none(), "the same one");
        let network: Vec<Place> = (1..)
            .map_while(|n| take(&format!("2001:db8::{n}:1")))
            .collect();
        assert_eq!(network.len(), OF_ONE_ADDRESS);
        assert!(take("2001:db8:0:1::1").is_some(), "another network");
        drop(taken);
        assert!(take("192.0.2.1").is_some());
        let many: Vec<Place> = (0..=255_u8)
            .map_while(|n| take(&format!("198.51.100.{n}")))
            .collect();
        assert_eq!(many.len(), TCP_CONNECTIONS - OF_ONE_ADDRESS);
        drop((network, many));
        assert!(all.lock().unwrap().is_empty());
    }

    /// Request that the handler below answers with an upgrade.
    const UPGRADE: &str = "POST / HTTP/1.1\r\nhost: memfold\r\nconnection: upgrade\r\n\
                           upgrade: test\r\ncontent-length: 0\r\n\r\n";

    /// Number of bytes that the handler below sends over an upgraded connection.
    const SENT: usize = 2 << 20;

    async fn upgraded(mut request: axum::extract::Request) -> StatusCode {
        let upgrade = Upgrade::of(&mut request);
        tokio::spawn(async move {
            let mut client = upgrade.connection().await.unwrap();
            // This fails if the time limit ends the connection.
            let _ = client.write_all(&vec![7; SENT]).await;
        });
        StatusCode::SWITCHING_PROTOCOLS
    }

    #[test]
    fn a_unix_client_may_leave_the_output_of_a_streamed_command_unread_and_a_tcp_client_not() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let read = |is_unix: bool| {
            runtime.block_on(async {
                let (ours, mut theirs) = tokio::net::UnixStream::pair().unwrap();
                let peer = Peer::of(&ours, Groups::default()).unwrap();
                let stream = Unread::new(ours, Duration::from_millis(100), ());
                let limit = is_unix.then(|| stream.limit.clone());
                let router = Router::new().route("/", axum::routing::post(upgraded));
                let (_ending, of_connection) = watch::channel(false);
                tokio::spawn(serve(stream, peer, limit, router, of_connection));
                theirs.write_all(UPGRADE.as_bytes()).await.unwrap();
                let mut first = [0; 12];
                theirs.read_exact(&mut first).await.unwrap();
                assert_eq!(&first, b"HTTP/1.1 101");
                tokio::time::sleep(Duration::from_secs(1)).await;
                let mut rest = Vec::new();
                theirs.read_to_end(&mut rest).await.unwrap();
                rest.into_iter().filter(|byte| *byte == 7).count()
            })
        };
        assert_eq!(read(true), SENT);
        assert!(read(false) < SENT);
    }

    #[test]
    fn a_connection_counts_until_it_ends_also_after_an_upgrade() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let (ours, mut theirs) = tokio::net::UnixStream::pair().unwrap();
            let peer = Peer::of(&ours, Groups::default()).unwrap();
            let places = Arc::new(Semaphore::new(1));
            let stream = unread(ours, places.clone().try_acquire_owned().unwrap());
            let router = Router::new().route("/", axum::routing::post(upgraded));
            let (_ending, of_connection) = watch::channel(false);
            let http = tokio::spawn(serve(stream, peer, None, router, of_connection));
            theirs.write_all(UPGRADE.as_bytes()).await.unwrap();
            let mut first = [0; 12];
            theirs.read_exact(&mut first).await.unwrap();
            assert_eq!(&first, b"HTTP/1.1 101");
            // From here on, only the handler of the upgrade has the connection.
            http.await.unwrap();
            assert_eq!(places.available_permits(), 0);
            drop(theirs);
            let ended = tokio::time::timeout(Duration::from_secs(50), places.acquire()).await;
            assert!(ended.is_ok(), "the connection still counts");
        });
    }
}

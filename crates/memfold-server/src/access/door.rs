//! The doors: Unix socket and TCP, with or without TLS.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio::time::Sleep;
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};

use super::origin::PublicUrl;
use super::tls::Tls;
use super::{Access, Groups, Peer, Role, TlsFiles, Why};

/// TCP connections at once; more are closed at once.
const TCP_CONNECTIONS: usize = 256;
/// Of them, of one address (IPv6: of one network of 64 bits), so that who has one can't take the places of other hosts.
const OF_ONE_ADDRESS: usize = 64;
/// Unix connections at once of those who may operate; beyond, they are closed at once.
const OPERATORS: usize = 1024;
/// The same of those who may read, who so can't take the places of those.
const READERS: usize = 128;
/// The same of those who may nothing, and are told so: they keep nobody out but each other.
const STRANGERS: usize = 16;
/// How long a request's head, and TLS's first words, may take.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// Most bytes of a head, and of what is read ahead.
const HEAD_BYTES: usize = 32 << 10;

/// Where and how to serve.
#[derive(Clone, Debug)]
pub struct Doors {
    /// The Unix socket.
    pub socket: PathBuf,
    /// Who may use it beside root.
    pub groups: Groups,
    /// TCP; `None`: nowhere.
    pub tcp: Option<TcpDoor>,
    /// Directory of the tokens for TCP.
    pub tokens: PathBuf,
    /// Directory of history and audit log.
    pub records: PathBuf,
}

/// A TCP door that was checked.
#[derive(Clone, Debug)]
pub struct TcpDoor {
    pub(super) address: SocketAddr,
    pub(super) names: Vec<String>,
    pub(super) public: Vec<PublicUrl>,
    pub(super) tls: Option<Arc<Tls>>,
}

/// Why a TCP door can't be.
#[derive(Debug, thiserror::Error)]
pub enum TcpDoorError {
    /// Others could listen.
    #[error(
        "{0} can be reached from other hosts: that needs TLS. Give --tls-cert and --tls-key, or listen on 127.0.0.1 and forward the port by ssh, \
         or put a proxy with TLS before it (--public-url)"
    )]
    Plain(SocketAddr),
    /// A file can't be used.
    #[error("cannot use {path} for TLS: {why}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// Key and certificate don't fit.
    #[error("the TLS certificate and key can't be used")]
    Tls(#[from] tokio_rustls::rustls::Error),
}

impl TcpDoor {
    /// At `address`, for browsers that call it by `names` too, or find it behind a reverse proxy at one of `public`.
    ///
    /// # Errors
    /// If it can be reached from other hosts and has no TLS, or a file of TLS can't be used.
    pub fn new(
        address: SocketAddr,
        names: Vec<String>,
        public: Vec<PublicUrl>,
        tls: Option<&TlsFiles>,
    ) -> Result<Self, TcpDoorError> {
        if tls.is_none() && !address.ip().is_loopback() {
            return Err(TcpDoorError::Plain(address));
        }
        let tls = tls.map(Tls::open).transpose()?.map(Arc::new);
        Ok(Self {
            address,
            names,
            public,
            tls,
        })
    }

    /// Names by which browsers may call the daemon, beside addresses and `localhost`.
    pub(super) fn known_names(&self) -> Vec<String> {
        let public = self.public.iter().map(|url| url.name().to_owned());
        self.names.iter().cloned().chain(public).collect()
    }

    /// What a browser may be given.
    pub(super) fn urls(&self) -> Vec<String> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let port = self.address.port();
        let own = match self.address.ip() {
            ip if ip.is_unspecified() => SocketAddr::new(IpAddr::from([127, 0, 0, 1]), port),
            _ => self.address,
        };
        let names = self.names.iter().map(|name| format!("{name}:{port}"));
        let direct = names
            .chain([own.to_string()])
            .map(|host| format!("{scheme}://{host}/"));
        self.public
            .iter()
            .map(PublicUrl::url)
            .chain(direct)
            .collect()
    }

    /// Cookies of one address are sent to all its ports, so the port is in the name. `__Host-` binds one to this very host, over TLS.
    pub(super) fn cookie_name(&self) -> String {
        let prefix = if self.tls.is_some() { "__Host-" } else { "" };
        format!("{prefix}memfold-{}", self.address.port())
    }

    /// Opens it. With port 0 the kernel chooses one.
    pub(crate) async fn listen(&mut self) -> io::Result<TcpListener> {
        let listener = TcpListener::bind(self.address).await?;
        self.address = listener.local_addr()?;
        Ok(listener)
    }

    /// Whether it has TLS.
    pub(crate) const fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Where it is.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Takes what comes over the Unix socket, until it is dropped.
pub(crate) async fn accept_unix(
    listener: UnixListener,
    groups: Groups,
    router: Router,
    graceful: Arc<GracefulShutdown>,
) {
    let [operators, readers, strangers] =
        [OPERATORS, READERS, STRANGERS].map(|most| Arc::new(Semaphore::new(most)));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                pause_after(&error).await;
                continue;
            }
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
                let connection = serve(stream, peer, router.clone(), graceful.watcher());
                tokio::spawn(async move {
                    connection.await;
                    drop(slot);
                });
            }
            // Who it is can't be said: it gets nothing.
            Err(error) => debug!(%error, "a peer without name"),
        }
    }
}

/// How long a peer may leave unread what is sent to it.
const UNREAD_TIME: Duration = Duration::from_secs(60);

/// Takes what comes over TCP, until it is dropped.
pub(crate) async fn accept_tcp(
    listener: TcpListener,
    door: TcpDoor,
    access: Arc<Access>,
    router: Router,
    graceful: Arc<GracefulShutdown>,
) {
    let places = Arc::new(Places::default());
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                pause_after(&error).await;
                continue;
            }
        };
        let Some(place) = Place::take(&places, address.ip()) else {
            access.refused.add(Why::Other);
            continue;
        };
        // Also with a window that stays closed (`TCP_USER_TIMEOUT`, tcp(7)).
        let unread = u32::try_from(UNREAD_TIME.as_millis()).unwrap_or(u32::MAX);
        if rustix::net::sockopt::set_tcp_user_timeout(&stream, unread).is_err() {
            continue;
        }
        let (router, watcher) = (router.clone(), graceful.watcher());
        let acceptor = door.tls.as_ref();
        let acceptor = acceptor.map(|tls| TlsAcceptor::from(tls.config()));
        let access = access.clone();
        tokio::spawn(async move {
            let _place = place;
            let peer = Peer::Tcp {
                address,
                tls: acceptor.is_some(),
            };
            match acceptor {
                None => serve(stream, peer, router, watcher).await,
                Some(acceptor) => {
                    let hello = tokio::time::timeout(HEAD_TIME, acceptor.accept(stream));
                    let why = match hello.await {
                        Ok(Ok(stream)) => return serve(stream, peer, router, watcher).await,
                        Ok(Err(error)) => error.to_string(),
                        Err(_) => "it said nothing in time".to_owned(),
                    };
                    access.refused.add(Why::Tls);
                    access.audit.failed_hello(address.ip(), &why);
                }
            }
        });
    }
}

/// Connections there are, by where they come from.
type Places = Mutex<HashMap<IpAddr, usize>>;

/// One of them, until it is dropped.
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

/// A connection that fails when nothing of what it sends was taken for so long: else whoever reads nothing keeps what it has for ever.
struct Unread<S> {
    stream: S,
    most: Duration,
    /// Since when nothing is taken, as the time until then.
    left: Option<Pin<Box<Sleep>>>,
}

impl<S> Unread<S> {
    const fn new(stream: S, most: Duration) -> Self {
        Self {
            stream,
            most,
            left: None,
        }
    }

    fn bounded<T>(
        &mut self,
        context: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.left = None;
            return polled;
        }
        let most = self.most;
        let left = self
            .left
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(most)));
        left.as_mut().poll(context).map(|()| {
            Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "nobody reads what is sent",
            ))
        })
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Unread<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Unread<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.bounded(context, polled)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        this.bounded(context, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_flush(context);
        this.bounded(context, polled)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_shutdown(context);
        this.bounded(context, polled)
    }
}

/// When there are no descriptors left, accepting at once again would only burn CPU.
async fn pause_after(error: &io::Error) {
    warn!(%error, "a connection can't be accepted");
    tokio::time::sleep(Duration::from_millis(200)).await;
}

async fn serve<S>(stream: S, peer: Peer, router: Router, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let inner = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer.clone());
        inner.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(Unread::new(stream, UNREAD_TIME)), service);
    if let Err(error) = watcher.watch(connection).await {
        debug!(%error, "a connection broke off");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn door(address: &str, names: &[&str]) -> Result<TcpDoor, TcpDoorError> {
        let names = names.iter().map(|&name| name.to_owned()).collect();
        TcpDoor::new(address.parse().unwrap(), names, Vec::new(), None)
    }

    #[test]
    fn who_reads_nothing_is_given_up_and_who_reads_slowly_is_not() {
        use std::io::Read as _;

        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let send = |reads: bool| {
            let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            let reader = std::thread::spawn(move || {
                let mut some = vec![0; 64 << 10];
                while reads && theirs.read(&mut some).unwrap() > 0 {
                    std::thread::sleep(Duration::from_millis(20));
                }
                theirs
            });
            let sent = runtime.block_on(async {
                let ours = tokio::net::UnixStream::from_std(ours).unwrap();
                // Who reads may be kept waiting by this machine.
                let patience = Duration::from_millis(if reads { 20_000 } else { 200 });
                let mut ours = Unread::new(ours, patience);
                let bytes = vec![7; 64 << 10];
                let mut sent = 0;
                while sent < 2 << 20 {
                    let written = std::future::poll_fn(|context| {
                        Pin::new(&mut ours).poll_write(context, &bytes)
                    });
                    sent += written.await?;
                }
                Ok::<usize, io::Error>(sent)
            });
            reader.join().unwrap();
            sent
        };
        assert_eq!(send(false).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(send(true).unwrap() >= 2 << 20);
    }

    #[test]
    fn one_address_can_take_a_part_of_the_places_and_gives_them_back() {
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

    #[test]
    fn without_tls_only_this_host_is_served() {
        for address in ["127.0.0.1:1", "127.8.0.1:1", "[::1]:1"] {
            assert!(door(address, &[]).is_ok(), "{address}");
        }
        for address in ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "[::ffff:127.0.0.1]:1"] {
            let error = door(address, &[]).unwrap_err().to_string();
            assert!(error.contains("--tls-cert"), "{address}: {error}");
        }
    }

    #[test]
    fn files_that_are_no_certificates_are_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("empty"), "").unwrap();
        let files = |certificate: &str| TlsFiles {
            certificate: path(certificate),
            key: path("empty"),
        };
        for (name, why) in [("missing", "No such file"), ("empty", "no certificate")] {
            let address = "0.0.0.0:1".parse().unwrap();
            let error =
                TcpDoor::new(address, Vec::new(), Vec::new(), Some(&files(name))).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(name) && text.contains(why), "{text}");
        }
    }

    #[test]
    fn urls_name_the_host_as_browsers_reach_it() {
        let urls = door("127.0.0.1:8420", &["vm1"]).unwrap().urls();
        assert_eq!(urls, ["http://vm1:8420/", "http://127.0.0.1:8420/"]);
        assert_eq!(door("[::1]:7", &[]).unwrap().urls(), ["http://[::1]:7/"]);
        let name = door("127.0.0.1:8420", &[]).unwrap().cookie_name();
        assert_eq!(name, "memfold-8420");
    }
}

//! The doors: Unix socket and TCP, with or without TLS.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tracing::{debug, warn};

use super::{Access, Groups, Peer, Why};

/// TCP connections at once; more wait in the kernel's queue.
const TCP_CONNECTIONS: usize = 256;
/// Unix connections at once of those who may operate; beyond, they are closed at once.
const OPERATORS: usize = 1024;
/// The same of all others, who so can't take the places of those.
const OTHERS: usize = 128;
/// How long a request's head, and TLS's first words, may take.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// Most bytes of a head, and of what is read ahead.
const HEAD_BYTES: usize = 32 << 10;

/// Certificate and key.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The certificate and those that vouch for it, PEM.
    pub certificate: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
}

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
    pub(super) tls: Option<Arc<ServerConfig>>,
}

/// Why a TCP door can't be.
#[derive(Debug, thiserror::Error)]
pub enum TcpDoorError {
    /// Others could listen.
    #[error(
        "{0} can be reached from other hosts: that needs TLS. Give --tls-cert and --tls-key, or listen on 127.0.0.1 and forward the port by ssh"
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
    /// At `address`, for browsers that call it by `names` too.
    ///
    /// # Errors
    /// If it can be reached from other hosts and has no TLS, or a file of TLS can't be used.
    pub fn new(
        address: SocketAddr,
        names: Vec<String>,
        tls: Option<&TlsFiles>,
    ) -> Result<Self, TcpDoorError> {
        if tls.is_none() && !address.ip().is_loopback() {
            return Err(TcpDoorError::Plain(address));
        }
        let tls = tls.map(tls_config).transpose()?.map(Arc::new);
        Ok(Self {
            address,
            names,
            tls,
        })
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
        names
            .chain([own.to_string()])
            .map(|host| format!("{scheme}://{host}/"))
            .collect()
    }

    /// Cookies of one address are sent to all its ports, so the port is in the name. `__Host-` binds one to this very host, over TLS.
    pub(super) fn cookie_name(&self) -> String {
        let prefix = if self.tls.is_some() { "__Host-" } else { "" };
        format!("{prefix}memfold-{}", self.address.port())
    }

    /// Opens it. With port 0 the kernel chooses one.
    pub(in crate::api) async fn listen(&mut self) -> io::Result<TcpListener> {
        let listener = TcpListener::bind(self.address).await?;
        self.address = listener.local_addr()?;
        Ok(listener)
    }

    /// Whether it has TLS.
    pub(in crate::api) const fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Where it is.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

fn tls_config(files: &TlsFiles) -> Result<ServerConfig, TcpDoorError> {
    let failed = |path: &Path, why: String| TcpDoorError::File {
        path: path.into(),
        why,
    };
    let certificates = CertificateDer::pem_file_iter(&files.certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| failed(&files.certificate, error.to_string()))?;
    if certificates.is_empty() {
        let why = "it holds no certificate".to_owned();
        return Err(failed(&files.certificate, why));
    }
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|error| failed(&files.key, error.to_string()))?;
    Ok(ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(certificates, key)?)
}

/// Takes what comes over the Unix socket, until it is dropped.
pub(in crate::api) async fn accept_unix(
    listener: UnixListener,
    groups: Groups,
    router: Router,
    graceful: Arc<GracefulShutdown>,
) {
    let operators = Arc::new(Semaphore::new(OPERATORS));
    let others = Arc::new(Semaphore::new(OTHERS));
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
                let slots = if peer.may_operate() {
                    &operators
                } else {
                    &others
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
pub(in crate::api) async fn accept_tcp(
    listener: TcpListener,
    door: TcpDoor,
    access: Arc<Access>,
    router: Router,
    graceful: Arc<GracefulShutdown>,
) {
    let slots = Arc::new(Semaphore::new(TCP_CONNECTIONS));
    let acceptor = door.tls.map(TlsAcceptor::from);
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else {
            return;
        };
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                pause_after(&error).await;
                continue;
            }
        };
        // Also with a window that stays closed (`TCP_USER_TIMEOUT`, tcp(7)).
        let unread = u32::try_from(UNREAD_TIME.as_millis()).unwrap_or(u32::MAX);
        if rustix::net::sockopt::set_tcp_user_timeout(&stream, unread).is_err() {
            continue;
        }
        let (router, watcher, acceptor) = (router.clone(), graceful.watcher(), acceptor.clone());
        let access = access.clone();
        tokio::spawn(async move {
            let _slot = slot;
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
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = watcher.watch(connection).await {
        debug!(%error, "a connection broke off");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn door(address: &str, names: &[&str]) -> Result<TcpDoor, TcpDoorError> {
        let names = names.iter().map(|&name| name.to_owned()).collect();
        TcpDoor::new(address.parse().unwrap(), names, None)
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
            let error = TcpDoor::new(address, Vec::new(), Some(&files(name))).unwrap_err();
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

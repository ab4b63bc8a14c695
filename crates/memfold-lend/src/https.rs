//! An HTTP client for a lease registry on other hosts: another daemon, or the members of an etcd
//! cluster. Each request blocks until its answer arrives.
//!
//! The client keeps its connections and reuses them, each for one request at a time. A server
//! proves its identity by its certificate only. The client sends no request to a server whose
//! certificate is not signed by a configured CA, has another name, or has expired.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::place::Member;
use super::tls::TlsFiles;

/// Time limit for connecting, including the TLS handshake.
const CONNECT: Duration = Duration::from_millis(1500);

/// Idle time after which a connection is not reused: the server may be about to close it.
const IDLE: Duration = Duration::from_secs(5);

/// Age after which a connection is not reused: certificates and keys may have been replaced.
const OLD: Duration = Duration::from_secs(600);

/// Maximum number of idle connections that are kept.
const KEPT: usize = 8;

/// Maximum size of an answer in bytes.
const LONGEST_ANSWER: usize = 16 << 20;

/// Reason why a request to a registry's server got no answer.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The request was not sent to any server.
    #[error("cannot reach the lease registry's server {member}: {why}")]
    Unreached {
        /// Host and port of the server that was to be asked.
        member: Member,
        /// The step that failed, with the error of the kernel or of TLS.
        why: String,
    },
    /// The request was sent. The server may or may not have executed it.
    #[error("the lease registry's server {member} did not answer: {why}")]
    Unanswered {
        /// Host and port of the server that was asked.
        member: Member,
        /// Error of the connection, a fault in the answer, or the timeout.
        why: String,
    },
}

fn unreached(member: &Member, why: &impl ToString) -> HttpError {
    let (member, why) = (member.clone(), why.to_string());
    HttpError::Unreached { member, why }
}

fn unanswered(member: &Member, why: &impl ToString) -> HttpError {
    let (member, why) = (member.clone(), why.to_string());
    HttpError::Unanswered { member, why }
}

/// The runtime that drives a connection during a request. Its drop waits neither for other tasks,
/// because the thread may be inside another runtime, which must not block, nor for a name server
/// that gives no answer.
#[derive(Debug)]
struct Background(Option<Runtime>);

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl Background {
    /// Runs `work` within a time limit. Returns `None` at the limit.
    fn within<T>(&self, limit: Duration, work: impl Future<Output = T>) -> Option<T> {
        // The timer must be created inside the runtime that drives it.
        let timed = async { tokio::time::timeout(limit, work).await.ok() };
        self.0.as_ref()?.block_on(timed)
    }
}

/// A connection to a server.
#[derive(Debug)]
struct Connection {
    member: usize,
    sender: SendRequest<Full<Bytes>>,
    runtime: Background,
    begun: Instant,
    used: Instant,
}

/// HTTP client of servers that can replace each other: one daemon, or the members of an etcd
/// cluster.
#[derive(Debug)]
pub struct Https {
    members: Vec<Member>,
    tls: Option<TlsFiles>,
    /// Index of the member that gets the next request first.
    first: AtomicUsize,
    kept: Mutex<Vec<Connection>>,
}

/// A POST request to a registry's server.
#[derive(Clone, Copy, Debug)]
pub struct Post<'a> {
    /// Path of the request's URL.
    pub path: &'a str,
    /// Token for the header `Authorization: Bearer`; `None`: the request has no such header.
    pub token: Option<&'a str>,
    /// Body of the request, in JSON.
    pub body: &'a [u8],
    /// Time limit for the server's answer.
    pub patience: Duration,
}

impl Https {
    /// Creates a client of these servers. `tls`: certificates; `None`: connections without TLS.
    #[must_use]
    pub const fn new(members: Vec<Member>, tls: Option<TlsFiles>) -> Self {
        Self {
            members,
            tls,
            first: AtomicUsize::new(0),
            kept: Mutex::new(Vec::new()),
        }
    }

    /// Sends a request to one server. Sends it to another server only if the request cannot have
    /// reached the first one, because the request may change something.
    pub fn post(&self, post: &Post<'_>) -> Result<(StatusCode, Bytes), HttpError> {
        let count = self.members.len();
        let first = self.first.load(Ordering::Relaxed);
        let mut turn = 0;
        loop {
            let member = (first + turn) % count;
            let asked = self.ask(member, post);
            turn += 1;
            let next = match asked {
                Ok(_) => member,
                Err(HttpError::Unanswered { .. }) => member + 1,
                Err(HttpError::Unreached { .. }) if turn < count => continue,
                Err(HttpError::Unreached { .. }) => return asked,
            };
            self.first.store(next % count, Ordering::Relaxed);
            return asked;
        }
    }

    /// Makes the next request go to another server, because the present one answers but cannot do
    /// its work.
    pub fn pass_over(&self) {
        let next = self.first.load(Ordering::Relaxed) + 1;
        self.first
            .store(next % self.members.len(), Ordering::Relaxed);
    }

    fn take_kept(&self, member: usize) -> Option<Connection> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|c| c.used.elapsed() < IDLE && c.begun.elapsed() < OLD);
        let at = kept.iter().position(|c| c.member == member)?;
        Some(kept.swap_remove(at))
    }

    fn keep(&self, mut connection: Connection) {
        connection.used = Instant::now();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT {
            kept.push(connection);
        }
    }

    fn ask(&self, at: usize, post: &Post<'_>) -> Result<(StatusCode, Bytes), HttpError> {
        let member = &self.members[at];
        loop {
            let (mut connection, is_kept) = match self.take_kept(at) {
                Some(kept) => (kept, true),
                None => (self.connect(at)?, false),
            };
            let sending = send(&mut connection.sender, member, post);
            match connection.runtime.within(post.patience, sending) {
                Some(Ok(answer)) => {
                    self.keep(connection);
                    return Ok(answer);
                }
                // The server closed the connection while it was idle, so a new connection is tried.
                Some(Err(HttpError::Unreached { .. })) if is_kept => {}
                Some(Err(error)) => return Err(error),
                None => {
                    let patience = post.patience.as_secs_f32();
                    return Err(unanswered(member, &format!("not within {patience} s")));
                }
            }
        }
    }

    fn connect(&self, at: usize) -> Result<Connection, HttpError> {
        let member = &self.members[at];
        let unreached = |why: String| unreached(member, &why);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| unreached(error.to_string()))?;
        let runtime = Background(Some(runtime));
        let connected = runtime.within(CONNECT, connect(member, self.tls.as_ref()));
        let late = || Err(format!("not within {} s", CONNECT.as_secs_f32()));
        Ok(Connection {
            member: at,
            sender: connected.unwrap_or_else(late).map_err(unreached)?,
            runtime,
            begun: Instant::now(),
            used: Instant::now(),
        })
    }
}

async fn connect(
    member: &Member,
    tls: Option<&TlsFiles>,
) -> Result<SendRequest<Full<Bytes>>, String> {
    let told = |error: std::io::Error| error.to_string();
    let stream = TcpStream::connect((&*member.host, member.port))
        .await
        .map_err(told)?;
    stream.set_nodelay(true).map_err(told)?;
    let Some(tls) = tls else {
        return begin(TokioIo::new(stream)).await;
    };
    let config = tls
        .config()
        .map_err(|(path, why)| format!("{}: {why}", path.display()))?;
    let name = ServerName::try_from(member.host.clone()).map_err(|error| error.to_string())?;
    let stream = TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
        .map_err(told)?;
    begin(TokioIo::new(stream)).await
}

async fn begin<S>(stream: S) -> Result<SendRequest<Full<Bytes>>, String>
where
    S: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let (sender, connection) = handshake(stream).await.map_err(|error| error.to_string())?;
    // Errors of the connection also appear as errors of the request, so they are dropped here.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender)
}

/// Sends a request and returns the answer. The error is [`HttpError::Unreached`] if the request was
/// not sent.
async fn send(
    sender: &mut SendRequest<Full<Bytes>>,
    member: &Member,
    post: &Post<'_>,
) -> Result<(StatusCode, Bytes), HttpError> {
    let mut request = Request::post(post.path)
        .header("host", member.to_string())
        .header("content-type", "application/json");
    if let Some(token) = post.token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let body = Full::new(Bytes::copy_from_slice(post.body));
    let request = request
        .body(body)
        .map_err(|error| unreached(member, &error))?;
    // An error means that the connection was closed before the request was sent.
    let ready = sender.ready().await;
    ready.map_err(|error| unreached(member, &error))?;
    let sent = sender.send_request(request).await;
    let response = sent.map_err(|error| {
        let why = memfold_host::chain(&error);
        if error.is_canceled() {
            unreached(member, &why)
        } else {
            unanswered(member, &why)
        }
    })?;
    let status = response.status();
    let body = Limited::new(response.into_body(), LONGEST_ANSWER)
        .collect()
        .await;
    let body = body.map_err(|error| unanswered(member, &error))?;
    Ok((status, body.to_bytes()))
}

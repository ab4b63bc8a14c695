//! A blocking HTTP client of the daemon's API, which the command line uses.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of an HTTP response with a status of 400 or above.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// Message that names the condition that failed.
    pub error: String,
    /// Action that would change the failed condition; null: unknown.
    pub hint: Option<String>,
    /// Whether the request is impossible on this host. The command line then exits with code 3.
    #[serde(default)]
    pub impossible_here: bool,
}

/// Error of a request to the daemon.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum ClientError {
    #[error("{}", no_daemon(.path, .source))]
    NoDaemon {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{}", .body.error)]
    Refused {
        /// Status of the HTTP response.
        status: u16,
        body: ErrorBody,
    },
    #[error("the daemon closed the connection in the middle of its answer; see the daemon's log")]
    Http(#[from] hyper::Error),
    #[error("cannot read the daemon's answer; use a daemon and a client of the same version")]
    Answer(#[from] serde_json::Error),
    #[error("the daemon at {path} did not answer within {seconds} s")]
    Slow { path: PathBuf, seconds: u64 },
    #[error("cannot start the HTTP client")]
    Runtime(#[source] io::Error),
}

/// Says why the daemon's socket cannot be used, and what changes that. A daemon may well serve a
/// socket that this user may not open.
fn no_daemon(path: &Path, source: &io::Error) -> String {
    let path = path.display();
    if source.kind() == io::ErrorKind::PermissionDenied {
        return format!(
            "this user may not open the daemon's socket {path}; run the command as root, or let a group use the daemon (memfold serve --operate-group GROUP)"
        );
    }
    format!("no memfold daemon serves {path}; start the daemon with 'memfold serve'")
}

type Result<T> = std::result::Result<T, ClientError>;

/// A blocking HTTP client of the daemon's API.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    patience: Duration,
    runtime: tokio::runtime::Runtime,
}

impl Client {
    /// Returns a client of the daemon that listens on the Unix socket `socket`. The client opens a
    /// new connection for each request.
    pub fn new(socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(ClientError::Runtime)?;
        Ok(Self {
            socket: socket.into(),
            patience: Duration::MAX,
            runtime,
        })
    }

    /// Sets the time limit of each request. Without this call, requests have no time limit.
    #[must_use]
    pub fn within(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Sends `GET path`, and returns the parsed JSON of the answer.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.request(Method::GET, path, Bytes::new())
    }

    /// Sends `POST path` with `body` as JSON, and returns the parsed JSON of the answer.
    pub fn post<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T> {
        self.request(Method::POST, path, serde_json::to_vec(body)?.into())
    }

    /// Sends `PUT path` with `body` as JSON, and returns the parsed JSON of the answer.
    pub fn put<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T> {
        self.request(Method::PUT, path, serde_json::to_vec(body)?.into())
    }

    /// Sends `DELETE path`, and returns the parsed JSON of the answer.
    pub fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.request(Method::DELETE, path, Bytes::new())
    }

    /// Sends `POST path` with `body` as JSON and the header `upgrade: PROTOCOL`. Returns the
    /// connection, which carries other bytes than HTTP from then on, and the bytes of these that
    /// were received already.
    pub fn upgrade<B: Serialize>(
        &self,
        path: &str,
        protocol: &str,
        body: &B,
    ) -> Result<(UnixStream, Vec<u8>)> {
        let headers = [
            ("connection", "upgrade"),
            ("upgrade", protocol),
            ("content-type", "application/json"),
        ];
        let body = Bytes::from(serde_json::to_vec(body)?);
        self.block_on(async {
            let response = self.send(Method::POST, path, &headers, body).await?;
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                return Err(refusal(response).await?);
            }
            let upgraded = hyper::upgrade::on(response).await?;
            let parts = upgraded
                .downcast::<TokioIo<tokio::net::UnixStream>>()
                .map_err(|_| ClientError::Runtime(io::Error::other("not a Unix socket")))?;
            let stream = parts.io.into_inner().into_std();
            let stream = stream.and_then(|stream| {
                stream.set_nonblocking(false)?;
                Ok(stream)
            });
            Ok((
                stream.map_err(ClientError::Runtime)?,
                parts.read_buf.to_vec(),
            ))
        })
    }

    /// Sends `GET path` with the header `last-event-id`, if there is one, and returns the pieces of
    /// the answer as they come.
    pub fn stream(&self, path: &str, last_event_id: Option<&str>) -> Result<Pieces<'_>> {
        let header = last_event_id.map(|id| ("last-event-id", id));
        let headers: Vec<_> = header.into_iter().collect();
        self.block_on(async {
            let response = self.send(Method::GET, path, &headers, Bytes::new()).await?;
            if response.status() != StatusCode::OK {
                return Err(refusal(response).await?);
            }
            Ok(Pieces {
                client: self,
                body: response.into_body(),
            })
        })
    }

    fn request<T: DeserializeOwned>(&self, method: Method, path: &str, body: Bytes) -> Result<T> {
        let headers = [("content-type", "application/json")];
        self.block_on(async {
            let response = self.send(method, path, &headers, body).await?;
            if response.status() != StatusCode::OK {
                return Err(refusal(response).await?);
            }
            let body = response.into_body().collect().await?.to_bytes();
            Ok(serde_json::from_slice(&body)?)
        })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<Response<Incoming>> {
        let connected = tokio::net::UnixStream::connect(&self.socket).await;
        let no_daemon = |source| ClientError::NoDaemon {
            path: self.socket.clone(),
            source,
        };
        let stream = connected.map_err(no_daemon)?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        // An error of the connection also makes the request fail.
        tokio::spawn(async move { drop(connection.with_upgrades().await) });
        let request = Request::builder().method(method).uri(path);
        let request = request.header("host", "memfold");
        let request = headers.iter().fold(request, |request, (name, value)| {
            request.header(*name, *value)
        });
        let request = request
            .body(Full::new(body))
            .map_err(|e| ClientError::Runtime(io::Error::other(e)))?;
        Ok(sender.send_request(request).await?)
    }

    /// Waits for the result of a request, as long as the client may wait.
    fn block_on<T>(&self, asked: impl Future<Output = Result<T>>) -> Result<T> {
        // The timer must be created inside the runtime.
        let limited = async { tokio::time::timeout(self.patience, asked).await };
        self.runtime.block_on(limited).unwrap_or_else(|_| {
            Err(ClientError::Slow {
                path: self.socket.clone(),
                seconds: self.patience.as_secs(),
            })
        })
    }
}

/// The pieces of an answer that has no known end.
#[derive(Debug)]
pub struct Pieces<'a> {
    client: &'a Client,
    body: Incoming,
}

impl Pieces<'_> {
    /// Waits for the next piece; `None` at the end of the answer.
    pub fn next_piece(&mut self) -> Result<Option<Bytes>> {
        self.client.runtime.block_on(async {
            while let Some(frame) = self.body.frame().await {
                if let Ok(piece) = frame?.into_data() {
                    return Ok(Some(piece));
                }
            }
            Ok(None)
        })
    }
}

/// Reads the error of a response whose status is not the expected one.
async fn refusal(response: Response<Incoming>) -> Result<ClientError> {
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    let refused = serde_json::from_slice(&body).unwrap_or_else(|_| ErrorBody {
        error: format!(
            "the daemon answered {status}: {}",
            String::from_utf8_lossy(&body)
        ),
        hint: None,
        impossible_here: false,
    });
    Ok(ClientError::Refused {
        status: status.as_u16(),
        body: refused,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_this_user_may_not_open_is_not_called_a_missing_daemon() {
        let said = |kind: io::ErrorKind| {
            let error = ClientError::NoDaemon {
                path: "/run/s".into(),
                source: kind.into(),
            };
            error.to_string()
        };
        let forbidden = said(io::ErrorKind::PermissionDenied);
        assert!(
            forbidden.contains("may not open the daemon's socket /run/s; run the command as root"),
            "{forbidden}"
        );
        assert!(!forbidden.contains("start the daemon"), "{forbidden}");
        let missing = said(io::ErrorKind::NotFound);
        assert!(
            missing.contains("no memfold daemon serves /run/s; start the daemon"),
            "{missing}"
        );
    }
}

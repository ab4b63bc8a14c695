//! Takes a connection over from HTTP, for streamed commands and consoles.

use std::io;

use axum::extract::Request;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;

use super::unread::UnreadLimit;

/// The connection of a request, which carries other bytes than HTTP after the response with status
/// 101.
#[derive(Debug)]
pub(crate) struct Upgrade {
    connection: OnUpgrade,
    /// Time limit of the connection; `None`: the limit cannot be lifted.
    limit: Option<UnreadLimit>,
}

impl Upgrade {
    /// Prepares to take over the connection of a request.
    pub fn of(request: &mut Request) -> Self {
        Self {
            limit: request.extensions().get().cloned(),
            connection: hyper::upgrade::on(request),
        }
    }

    /// Waits until the response was sent, and returns the connection.
    ///
    /// A client of the Unix socket may leave data unread for any time from then on: the other side
    /// of the stream waits for it, as for a program that does not read its pipe. TCP connections
    /// keep the limit, because only the limit ends a connection whose client is gone.
    pub async fn connection(self) -> io::Result<TokioIo<Upgraded>> {
        let connection = self.connection.await.map_err(io::Error::other)?;
        if let Some(limit) = self.limit {
            limit.lift();
        }
        Ok(TokioIo::new(connection))
    }
}

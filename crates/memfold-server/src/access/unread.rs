//! Closes connections to the daemon's API whose peer does not read the responses. Otherwise such a
//! peer would keep its connection forever. On an upgraded connection of the Unix socket, which
//! carries a streamed command or a console, the daemon waits for its peer without a limit instead.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// The time limit of an [`Unread`], for the handler of a request that upgrades the connection.
#[derive(Clone, Debug, Default)]
pub(super) struct UnreadLimit {
    is_lifted: Arc<AtomicBool>,
}

impl UnreadLimit {
    /// Lets the peer leave data unread for any time from now on.
    pub fn lift(&self) {
        self.is_lifted.store(true, Ordering::Relaxed);
    }
}

/// A connection that fails when its peer has accepted no data for the time `most`. Without this
/// limit, such a peer would hold its connection forever.
pub(super) struct Unread<S> {
    pub(super) stream: S,
    pub(super) most: Duration,
    pub(super) limit: UnreadLimit,
    /// Timer that ends the connection; `None` while the peer accepts data.
    pub(super) left: Option<Pin<Box<Sleep>>>,
    /// The connection's place among those that may be open. An upgrade moves this value to the
    /// handler, so the connection counts until it ends.
    _place: Box<dyn Send + Sync>,
}

impl<S> Unread<S> {
    pub(super) fn new(stream: S, most: Duration, place: impl Send + Sync + 'static) -> Self {
        Self {
            stream,
            most,
            limit: UnreadLimit::default(),
            left: None,
            _place: Box::new(place),
        }
    }

    pub(super) fn bounded<T>(
        &mut self,
        context: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if polled.is_ready() || self.limit.is_lifted.load(Ordering::Relaxed) {
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
                "the client does not read the response",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_reads_no_answers_is_disconnected_and_a_slow_client_is_not() {
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
                // On a busy machine, a peer that reads may be delayed.
                let patience = Duration::from_millis(if reads { 20_000 } else { 200 });
                let mut ours = Unread::new(ours, patience, ());
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
}

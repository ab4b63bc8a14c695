//! Connects to Unix sockets of other processes with a time limit.
//!
//! A stopped process accepts no connections. Once the queue of its socket is full, `connect(2)`
//! waits forever unless the connecting socket has a send timeout (`SO_SNDTIMEO`; see
//! `unix_stream_connect` in the kernel's `net/unix/af_unix.c`).

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Connects to the Unix socket at `path` within the time `limit`. Later writes have no time limit
/// unless the caller sets one.
///
/// # Errors
///
/// `TimedOut` if the process at the other end accepts no connections.
pub fn connect(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let deadline = Instant::now() + limit;
    let address = SocketAddrUnix::new(path)?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    loop {
        // A timeout of zero would mean no limit.
        let left = deadline
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        set_socket_timeout(&socket, Timeout::Send, Some(left))?;
        match rustix::net::connect(&socket, &address) {
            Err(Errno::INTR) if Instant::now() < deadline => {}
            Err(Errno::INTR | Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            connected => break connected?,
        }
    }
    set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn connecting_to_a_socket_that_accepts_no_connection_fails_at_the_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let limit = Duration::from_millis(50);
        let mut queued = Vec::new();
        let error = loop {
            match connect(&path, limit) {
                Ok(stream) => queued.push(stream),
                Err(error) => break error,
            }
            assert!(queued.len() < 10, "the queue never fills");
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // This makes room in the socket's queue.
        listener.accept().unwrap();
        connect(&path, Duration::from_secs(5)).unwrap();
    }
}

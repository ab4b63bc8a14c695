//! The API's server: listens on the Unix socket and on TCP, and serves requests until the daemon
//! ends.

use std::fs::Permissions;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use memfold_daemon::Daemon;
use memfold_vm::directory::MAX_SOCKET_PATH;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::info;

use super::access::Access;
use super::access::{Doors, Hosts, Keys, accept_tcp, accept_unix};
use super::routes::router;
use super::runtimes::on_worker;

/// Time for which the daemon waits at its end for responses in progress.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// Why the API's server could not start, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Another daemon answers on this Unix socket.
    #[error("another memfold daemon serves {0}; stop it, or choose another --socket")]
    Taken(PathBuf),
    /// The path of the Unix socket is longer than the kernel allows.
    #[error(
        "cannot listen on {}: the path has {} bytes, at most {MAX_SOCKET_PATH} are allowed; choose a shorter --socket",
        .0.display(), .0.as_os_str().len()
    )]
    TooLong(PathBuf),
    /// A file that is not a socket is at the path of the Unix socket.
    #[error(
        "cannot listen on {0}: a file that is not a socket is there; move the file, or choose another --socket"
    )]
    NotASocket(PathBuf),
    /// The Unix socket could not be created.
    #[error("cannot listen on {path}")]
    Listen {
        /// Path of the Unix socket.
        path: PathBuf,
        /// Error that the system call returned.
        #[source]
        source: io::Error,
    },
    /// The TCP address cannot be used.
    #[error("cannot listen on {address}")]
    ListenTcp {
        /// TCP address at which the server was to listen.
        address: SocketAddr,
        /// Error that the system call returned.
        #[source]
        source: io::Error,
    },
    /// A task that accepts connections has ended.
    #[error(
        "the HTTP server stopped accepting connections; the daemon exits, and systemd restarts it"
    )]
    Ended,
    /// The files of the access tokens cannot be read or created.
    #[error("cannot read or create the files of the access tokens")]
    Tokens(#[source] io::Error),
}

/// Serves the API until the future `end` is ready, and then removes the Unix socket. Only root can
/// use the Unix socket, unless `doors` gives groups of users access.
///
/// # Errors
///
/// [`ServeError`] if an address cannot be opened, or if the server unexpectedly stops accepting
/// connections.
pub async fn serve(
    daemon: Arc<Daemon>,
    doors: &Doors,
    end: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let socket = doors.socket.as_path();
    let listener = listen_unix(doors)?;
    let (ended, ending) = watch::channel(false);
    let mut tcp = doors.tcp.clone();
    let (mut keys, mut tcp_listener) = (Keys::default(), None);
    if let Some(door) = &mut tcp {
        let address = door.address();
        keys = Keys::with_tokens(&doors.tokens).map_err(ServeError::Tokens)?;
        let listened = door.listen().await;
        let listened = listened.map_err(|source| ServeError::ListenTcp { address, source })?;
        info!(address = %door.address(), tls = door.has_tls(), "dashboard and HTTP API available on the TCP address");
        tcp_listener = Some(listened);
    }
    let hosts = Hosts::open(doors.records.join("hosts.json")).map_err(ServeError::Tokens)?;
    let access = Access::new(keys, hosts, doors.records.clone(), tcp.as_ref(), ending);
    let router = router(daemon.clone(), access.clone());
    let (connections, of_connection) = watch::channel(false);
    let mut accepting = JoinSet::new();
    accepting.spawn(accept_unix(
        listener,
        doors.groups,
        router.clone(),
        of_connection.clone(),
    ));
    if let (Some(listener), Some(door)) = (tcp_listener, tcp) {
        let serving = accept_tcp(listener, door, access, router, of_connection.clone());
        accepting.spawn(serving);
    }
    let mut served = Ok(());
    tokio::select! {
        () = end => {}
        // These tasks end only by a panic. The daemon then ends, too, because no client could reach
        // it.
        _ = accepting.join_next() => served = Err(ServeError::Ended),
    }
    // The socket may have been removed already.
    let _ = std::fs::remove_file(socket);
    accepting.shutdown().await;
    // The streams end, and requests in progress get their responses.
    let _ = ended.send(true);
    let views = daemon.clone();
    on_worker(move || views.views().end());
    drop(of_connection);
    let _ = connections.send(true);
    // The time limit ends this wait even if a client does not read its response.
    let _ = tokio::time::timeout(LAST_ANSWERS, connections.closed()).await;
    served
}

fn listen_unix(doors: &Doors) -> Result<UnixListener, ServeError> {
    let socket = doors.socket.as_path();
    let listen = |source| ServeError::Listen {
        path: socket.into(),
        source,
    };
    if socket.as_os_str().len() > MAX_SOCKET_PATH {
        return Err(ServeError::TooLong(socket.into()));
    }
    if std::os::unix::net::UnixStream::connect(socket).is_ok() {
        return Err(ServeError::Taken(socket.into()));
    }
    // Only the socket of a daemon that has ended is removed, never another file of the user.
    match std::fs::symlink_metadata(socket) {
        Ok(there) if !there.file_type().is_socket() => {
            return Err(ServeError::NotASocket(socket.into()));
        }
        Ok(_) => std::fs::remove_file(socket).map_err(listen)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(listen(error)),
    }
    if let Some(directory) = socket.parent() {
        std::fs::create_dir_all(directory).map_err(listen)?;
    }
    let listener = UnixListener::bind(socket).map_err(listen)?;
    // The kernel reports the peer of each connection. A file mode can admit only one group, but
    // there are two.
    let mode = if doors.groups.any() { 0o666 } else { 0o600 };
    std::fs::set_permissions(socket, Permissions::from_mode(mode)).map_err(listen)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::super::access::Groups;
    use super::*;

    #[test]
    fn a_file_at_the_path_of_the_socket_is_kept_and_an_unused_socket_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| Doors {
            socket: directory.path().join(name),
            groups: Groups::default(),
            tcp: None,
            tokens: directory.path().join("tokens"),
            records: directory.path().into(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let _inside = runtime.enter();
        std::fs::write(directory.path().join("notes"), "of the user").unwrap();
        std::os::unix::fs::symlink("notes", directory.path().join("link")).unwrap();
        for name in ["notes", "link"] {
            let error = listen_unix(&at(name)).unwrap_err();
            assert!(matches!(error, ServeError::NotASocket(_)), "{error}");
            let kept = std::fs::read_to_string(directory.path().join(name)).unwrap();
            assert_eq!(kept, "of the user");
        }
        // The socket stays when its listener is dropped.
        for _ in 0..2 {
            drop(listen_unix(&at("socket")).unwrap());
        }
        let _listener = listen_unix(&at("socket")).unwrap();
        let error = listen_unix(&at("socket")).unwrap_err();
        assert!(matches!(error, ServeError::Taken(_)), "{error}");
    }
}

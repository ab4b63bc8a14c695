//! Watches and ends a network connection of another process, such as QEMU's connection to a server
//! of lent RAM. The daemon does so through a second descriptor of the same socket
//! (`pidfd_getfd(2)`).
//!
//! QEMU's NBD client waits for an answer as long as the connection exists, and QEMU's main loop may
//! block meanwhile. With a descriptor of its own, the daemon sees the end of the connection at
//! once. The daemon can also end the connection, and has the kernel end it when the other host
//! stops answering (TCP keepalive). For this, the daemon needs an answer neither from QEMU nor from
//! the lender.

use std::ffi::OsStr;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use memfold_vm::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, getpeername, getsockname, shutdown, sockopt,
};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::endpoint::Address;
use super::lease::Durability;

/// How long a VM waits for a lender that does not answer, if another copy of its bytes exists. The
/// VM may block for all that time.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// How long a VM waits for a lender that does not answer, if the lender holds the only copy of its
/// bytes. A VM that blocks for a minute loses less than a VM whose swap disk is lost.
pub const LAST_PATIENCE: Duration = Duration::from_secs(60);

/// How long the daemon of a lender may be silent, if that lender holds the only complete copy of a
/// VM's bytes. Then the bytes are moved away from the lender, which may still serve them.
pub const MOVE_AFTER: Duration = Duration::from_secs(30);

/// Number of TCP keepalive probes without an answer after which the kernel ends the connection.
const KEEPALIVE_COUNT: u32 = 2;

/// A second file descriptor of a socket that another process has open.
#[derive(Debug)]
pub struct Wire(OwnedFd);

impl Wire {
    /// Returns the socket of `process` that is connected to `address`; `None` if `process` has no
    /// such socket.
    pub fn find(process: &Process, address: &Address) -> io::Result<Option<Self>> {
        Ok(Self::all(process, |socket| is_connected_to(socket, address))?.pop())
    }

    /// Returns the sockets of all connections that `process` has accepted at `portal` (IP address
    /// and TCP port).
    pub fn served_by(process: &Process, portal: SocketAddr) -> io::Result<Vec<Self>> {
        let is_there = |socket: &OwnedFd| {
            getpeername(socket).is_ok_and(|peer| peer.is_some())
                && getsockname(socket)
                    .is_ok_and(|own| SocketAddr::try_from(own).is_ok_and(|own| own == portal))
        };
        Self::all(process, is_there)
    }

    fn all(process: &Process, wanted: impl Fn(&OwnedFd) -> bool) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        let directory = format!("/proc/{}/fd", process.pid().as_raw_nonzero());
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            // The process may have closed the descriptor meanwhile.
            let is_socket = std::fs::read_link(entry.path())
                .is_ok_and(|to| to.as_os_str().as_bytes().starts_with(b"socket:"));
            let number = entry.file_name().to_str().and_then(|n| n.parse().ok());
            let Some(number) = number.filter(|_| is_socket) else {
                continue;
            };
            match pidfd_getfd(process.pidfd(), number, PidfdGetfdFlags::empty()) {
                Ok(socket) => found.extend(Some(socket).filter(&wanted).map(Self)),
                Err(Errno::BADF) => {} // closed meanwhile
                Err(error) => return Err(error.into()),
            }
        }
        Ok(found)
    }

    /// Makes the kernel end the connection when the other host does not answer for [`PATIENCE`].
    /// Has no effect on a Unix socket, whose other end is on this host.
    pub fn keep_alive(&self) -> io::Result<()> {
        match sockopt::socket_domain(&self.0)? {
            AddressFamily::UNIX => Ok(()),
            _ => keep_alive(&self.0, PATIENCE),
        }
    }

    /// Ends the connection. A process that waits for an answer on the connection gets an error at
    /// once.
    pub fn cut(&self) {
        // The call fails only if the connection has ended already.
        let _ = shutdown(&self.0, Shutdown::Both);
    }

    /// Returns an entry for `poll(2)` that becomes ready when the connection ends.
    #[must_use]
    pub fn poll_end(&self) -> PollFd<'_> {
        PollFd::new(&self.0, PollFlags::RDHUP)
    }

    /// Returns how long sent bytes may stay unacknowledged, in milliseconds.
    #[cfg(test)]
    pub(crate) fn user_timeout(&self) -> io::Result<u32> {
        Ok(sockopt::tcp_user_timeout(&self.0)?)
    }

    /// Returns whether the connection has ended.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        let mut fds = [self.poll_end()];
        let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        poll(&mut fds, Some(&Timespec::default())).is_ok() && fds[0].revents().intersects(ended)
    }
}

/// Returns how long a VM waits for a lender of its swap disk that does not answer, by the disk's
/// durability and the number of the disk's copy on lent RAM. If the borrower's own network is away,
/// both lenders of a replica are silent; the second one must then not be given up together with the
/// first. The daemon gives it up sooner if only this lender is silent.
#[must_use]
pub const fn patience(durability: Durability, copy: usize) -> Duration {
    match (durability, copy) {
        (Durability::Disk, _) | (Durability::Replica, 0) => PATIENCE,
        (Durability::Replica | Durability::None, _) => LAST_PATIENCE,
    }
}

/// Makes the kernel end a TCP connection when the other host does not answer for `patience`. A
/// listening socket passes the setting on to the connections that it accepts.
pub(super) fn keep_alive(socket: &impl AsFd, patience: Duration) -> io::Result<()> {
    // One third of `patience` passes before the first probe, and one third for each probe (tcp(7)).
    let third = patience / (KEEPALIVE_COUNT + 1);
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, third)?;
    sockopt::set_tcp_keepintvl(socket, third)?;
    sockopt::set_tcp_keepcnt(socket, KEEPALIVE_COUNT)?;
    // This option limits how long sent bytes may stay unacknowledged.
    let unacknowledged = u32::try_from(patience.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(socket, unacknowledged)?;
    Ok(())
}

fn is_connected_to(socket: &OwnedFd, address: &Address) -> bool {
    let Ok(Some(peer)) = getpeername(socket) else {
        return false;
    };
    match address {
        Address::Unix(path) => SocketAddrUnix::try_from(peer)
            .is_ok_and(|peer| peer.path_bytes().map(OsStr::from_bytes) == Some(path.as_os_str())),
        Address::Tcp { ip, port } => {
            SocketAddr::try_from(peer).is_ok_and(|peer| peer == SocketAddr::new(*ip, *port))
        }
    }
}

/// Calls `work`, which makes `process` connect to `address` and perhaps wait there for an answer.
/// Ends the connection after `patience`, so that `work` fails instead of blocking.
pub fn within<T>(
    process: &Process,
    address: &Address,
    patience: Duration,
    work: impl FnOnce() -> T,
) -> T {
    let (done, is_done) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut left = patience;
            while is_done.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
                if let Ok(Some(wire)) = Wire::find(process, address) {
                    wire.cut();
                }
                // `process` may not have connected yet.
                left = Duration::from_millis(200);
            }
        });
        let result = work();
        drop(done);
        result
    })
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::time::Instant;

    use super::*;
    use memfold_vm::Identity;

    fn myself() -> Process {
        Process::open(Identity::of(rustix::process::getpid()).unwrap()).unwrap()
    }

    fn tcp() -> (TcpListener, Address) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp {
            ip: [127, 0, 0, 1].into(),
            port: listener.local_addr().unwrap().port(),
        };
        (listener, address)
    }

    #[test]
    fn the_daemon_can_watch_and_shut_down_a_socket_connection_of_another_process() {
        let process = myself();
        let (listener, address) = tcp();
        assert!(Wire::find(&process, &address).unwrap().is_none());
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let wire = Wire::find(&process, &address).unwrap().unwrap();
        wire.keep_alive().unwrap();
        assert_eq!(sockopt::tcp_user_timeout(&client).unwrap(), 3000);
        keep_alive(&client, patience(Durability::None, 0)).unwrap();
        assert_eq!(sockopt::tcp_user_timeout(&client).unwrap(), 60_000);
        let idle = sockopt::tcp_keepidle(&client).unwrap();
        assert_eq!(idle, Duration::from_secs(20));
        assert!(!wire.is_cut());
        wire.cut();
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        assert!(wire.is_cut());
        drop((client, server));

        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let (server, _) = listener.accept().unwrap();
        let wire = Wire::find(&process, &Address::Unix(path)).unwrap().unwrap();
        wire.keep_alive().unwrap();
        assert!(!wire.is_cut());
        drop(server);
        assert!(wire.is_cut());
        drop(client);
    }

    #[test]
    fn at_the_deadline_the_connection_to_a_silent_peer_is_shut_down_so_that_a_read_ends() {
        let (listener, address) = tcp();
        let begun = Instant::now();
        let got = within(&myself(), &address, Duration::from_millis(300), || {
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            client.read(&mut [0]).unwrap()
        });
        assert_eq!(got, 0);
        assert!(begun.elapsed() < memfold_testkit::bound(Duration::from_secs(5)));
    }
}

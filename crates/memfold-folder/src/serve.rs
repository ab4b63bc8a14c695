//! Serves the Unix socket on which memfold's library in QEMU receives orders: from one daemon at a
//! time, until QEMU ends.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use memfold_sys::descriptor;
use memfold_wire::library::{Order, Reply, VERSION};
use memfold_wire::{Decoder, encode};
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::Folder;

/// Listens on a Unix socket at `path`, in place of a stale file there. Only the socket's owner may
/// connect.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // Linux creates the socket file with the mode of the socket (net/unix/af_unix.c,
    // unix_bind_bsd), so other users can never connect. The process's umask, which QEMU's threads
    // share, stays unchanged.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 8)?;
    Ok(UnixListener::from(socket))
}

/// Serves the daemon's connections one after another, without end. Nothing that a peer does ends
/// the loop.
pub fn serve(listener: &UnixListener, folder: &Folder) -> ! {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                // A panic ends only the connection; guards put every page back during the panic.
                let _ = catch_unwind(AssertUnwindSafe(|| connection(&stream, folder)));
                folder.disconnected();
            }
            // The process probably has no free descriptors; QEMU may close some.
            Err(_) => std::thread::sleep(Duration::from_secs(1)),
        }
    }
}

/// Executes the orders of one connection until the peer closes it or breaks the protocol.
pub fn connection(stream: &UnixStream, folder: &Folder) {
    let mut decoder = Decoder::new();
    let mut buffer = vec![0; 64 << 10];
    let mut pending: Option<OwnedFd> = None;
    let mut greeted = false;
    loop {
        match descriptor::receive(stream, &mut buffer) {
            Ok((0, _)) => return,
            Ok((n, came)) => {
                decoder.push(&buffer[..n]);
                pending = came.or(pending);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return,
        }
        loop {
            let order: Order = match decoder.next() {
                Ok(Some(order)) => order,
                Ok(None) => break,
                Err(_) => return,
            };
            if let Order::Hello { version } = order {
                greeted = version == VERSION;
            }
            let reply = if greeted || matches!(order, Order::Hello { .. }) {
                folder.execute(&order, pending.take())
            } else {
                Reply::Error {
                    reason: format!("Hello with protocol version {VERSION} must come first"),
                }
            };
            let Ok(frame) = encode(&reply) else { return };
            if send(stream, &frame).is_err() {
                return;
            }
        }
    }
}

fn send(stream: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::net::send(stream, bytes, SendFlags::NOSIGNAL) {
            Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

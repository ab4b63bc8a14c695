//! Serves the Unix socket on which memfold's library in QEMU receives orders: from one daemon at a
//! time, until QEMU ends.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
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

/// Pause before the resumption of a VM is tried again that QEMU has refused.
const RETRY: Duration = Duration::from_secs(1);

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
        match wait(listener, folder).and_then(|()| listener.accept()) {
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

/// Waits until a peer connects or sends. If the VM could not be resumed, tries it again meanwhile:
/// the daemon may have died, or hang.
fn wait(peer: impl AsFd, folder: &Folder) -> io::Result<()> {
    while folder.is_stuck() && !descriptor::wait_readable(&peer, RETRY)? {
        folder.go_on_if_stuck();
    }
    Ok(())
}

/// Executes the orders of one connection until the peer closes it or breaks the protocol.
pub fn connection(stream: &UnixStream, folder: &Folder) {
    let mut decoder = Decoder::new();
    let mut buffer = vec![0; 64 << 10];
    let mut pending: Option<OwnedFd> = None;
    let mut greeted = false;
    loop {
        if wait(stream, folder).is_err() {
            return;
        }
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

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};

    use serde_json::{Value, json};

    use super::*;
    use crate::Monitor;

    #[test]
    fn a_vm_that_qemu_did_not_resume_is_resumed_later_without_a_daemon() {
        let (ours, mut qemu) = UnixStream::pair().unwrap();
        let folder = Folder::new(None, Some(Monitor::stuck(ours).unwrap()));
        let asked = std::thread::spawn(move || {
            let lines = BufReader::new(qemu.try_clone().unwrap()).lines();
            let mut asked = Vec::new();
            for line in lines.map_while(Result::ok) {
                let command: Value = serde_json::from_str(&line).unwrap();
                let name = command["execute"].as_str().unwrap().to_owned();
                let mut answer = json!({ "id": command["id"], "return": { "status": "paused" } });
                // At first, QEMU refuses.
                if name == "cont" && !asked.contains(&name) {
                    answer = json!({ "id": command["id"], "error": { "desc": "not now" } });
                }
                asked.push(name);
                writeln!(qemu, "{answer}").unwrap();
            }
            asked
        });
        let (listener, _silent) = UnixStream::pair().unwrap();
        wait(&listener, &folder).unwrap();
        assert!(!folder.is_stuck());
        drop(folder);
        let asked = asked.join().unwrap();
        assert_eq!(asked.iter().filter(|name| *name == "cont").count(), 2);
    }
}

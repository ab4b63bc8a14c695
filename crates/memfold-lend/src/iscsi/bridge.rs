//! The bridge: a process on the borrowing host that makes one iSCSI disk of a lender usable as an
//! NBD disk. The bridge runs qemu-nbd, which connects to the lender with QEMU's `iscsi` driver, and
//! serves the disk by NBD on a Unix socket. The bridge kills qemu-nbd when the first iSCSI session
//! ends.
//!
//! The bridge works without a daemon. So if the lender dies while the borrowing host's daemon is
//! not running, QEMU gets an error at once, and the VM continues with the other copy of its swap
//! disk.

use std::io::{self, Read};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use memfold_host::private_memory;
use memfold_vm::{Identity, Process};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::process::Pid;

use super::{LUN, at, ends_with_us, initiator_name, process, target_name};
use crate::child::{self, Owned};
use crate::connection::Wire;
use crate::endpoint::{Address, Endpoint, Key};
use crate::files::{self, Removed};
use crate::lease::LeaseId;

/// Time limit for the bridge to become ready.
const READY: Duration = Duration::from_secs(10);

/// Time limit of the connection that tests whether another initiator could log in.
const PROBE: Duration = Duration::from_millis(300);

const LOOK: Duration = Duration::from_millis(20);

/// Number of bytes at the end of the bridge's output that an error message repeats.
const LOG_TAIL: usize = 1024;

/// Starts a bridge process that logs in to a lease. Returns the address on this host that serves
/// the lease by NBD, for one connection. The bridge's files are created in `directory`. The bridge
/// ends with its iSCSI session or its NBD client.
pub fn begin(directory: &Path, lease: LeaseId, endpoint: &Endpoint) -> io::Result<Endpoint> {
    let (Address::Tcp { ip, port }, Some(key)) = (&endpoint.address, &endpoint.key) else {
        return Err(io::Error::other("iSCSI needs an IP address and a key"));
    };
    let file = |end: &str| directory.join(format!("iscsi-{lease}.{end}"));
    let (socket, key_file, log_file) = (file("sock"), file("key"), file("log"));
    // When this function returns, the bridge has read the key file, and nobody needs the log.
    let _files = Removed(vec![key_file.clone(), log_file.clone()]);
    key.write(&key_file)?;
    let log = std::fs::File::create(&log_file)?;
    let mut command = process("bridge")?;
    // The bridge lives as long as the VM, so it must not end with the daemon or the daemon's
    // terminal.
    let spawned = memfold_sys::session::detach(&mut command)
        .args(["--portal", &SocketAddr::new(*ip, *port).to_string()])
        .arg("--key")
        .arg(&key_file)
        .arg("--socket")
        .arg(&socket)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn();
    let left = Removed(vec![socket.clone()]);
    let told = spawned.and_then(|mut child| {
        let told = wait_ready(&mut child);
        if told.is_err() {
            // The call fails if the bridge has ended. qemu-nbd ends with the bridge.
            let _ = child.kill();
        }
        // A killed bridge leaves its socket behind.
        child::reap(child, || drop(left)).and(told)
    });
    let said = std::fs::read(&log_file).unwrap_or_default();
    told.map_err(|error| {
        let said = String::from_utf8_lossy(&said[said.len().saturating_sub(LOG_TAIL)..]);
        io::Error::other(format!("{error}; it said: {}", said.trim()))
    })?;
    Ok(Endpoint::unix(socket))
}

/// Waits for the line on the bridge's standard output that reports that the bridge is ready.
fn wait_ready(child: &mut Child) -> io::Result<()> {
    let output = child.stdout.as_mut();
    let output = output.ok_or_else(|| io::Error::other("no pipe"))?;
    let limit = READY.as_secs();
    match child::first_line(output, READY) {
        Ok(said) if said.is_empty() => Err(io::Error::other(
            "no session with the lender (needs qemu-nbd of qemu-utils, and QEMU's iscsi driver: apt install qemu-block-extra)",
        )),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(io::Error::other(format!(
            "no session with the lender after {limit} s"
        ))),
        said => said.map(drop),
    }
}

/// Runs the bridge process until its iSCSI session or its NBD client ends. `portal`: address of the
/// lender's tgtd; `key_file`: file with the lease's key; `socket`: path of the NBD socket.
pub fn serve(portal: SocketAddr, key_file: &Path, socket: &Path) -> io::Result<()> {
    private_memory::protect_with_children().map_err(at("core dumps"))?;
    let key = Key::read(key_file).map_err(at("its key"))?;
    let secret = key_file.with_extension("secret");
    let _files = Removed(vec![secret.clone(), socket.to_owned()]);
    files::write_private(&secret, &key.hex)?;
    let mut server = Owned(start(portal, &key, &secret, socket)?);
    let process = Process::open(Identity::of(Pid::from_child(&server.0))?)?;
    let address = Address::Tcp {
        ip: portal.ip(),
        port: portal.port(),
    };
    let deadline = Instant::now() + READY;
    let wire = loop {
        if let Some(wire) = Wire::find(&process, &address)?.filter(|_| socket.exists()) {
            break wire;
        }
        if let Some(status) = server.0.try_wait()? {
            return Err(io::Error::other(format!("qemu-nbd has ended ({status})")));
        }
        if Instant::now() > deadline {
            return Err(io::Error::other("qemu-nbd is not ready"));
        }
        std::thread::sleep(LOOK);
    };
    wire.keep_alive()?;
    // The session exists. Wait until no other initiator can log in.
    wait_closed(portal, deadline, || wire.is_cut())?;
    std::fs::remove_file(&secret)?;
    println!("ready");
    // If the session or qemu-nbd has ended, both must end.
    let mut fds = [wire.poll_end(), PollFd::new(process.pidfd(), PollFlags::IN)];
    retry_on_intr(|| poll(&mut fds, None))?;
    Ok(())
}

/// Waits until no other initiator can log in beside a session.
pub(crate) fn wait_closed(
    portal: SocketAddr,
    deadline: Instant,
    has_ended: impl Fn() -> bool,
) -> io::Result<()> {
    while !is_closed(portal)? {
        if has_ended() {
            return Err(io::Error::other("the session ended right after it began"));
        }
        if Instant::now() > deadline {
            return Err(io::Error::other(
                "the lender accepts other initiators beside this session",
            ));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Returns whether the lender accepts no more connections, as is the case during a session
/// (`target`). A forwarder in between may accept a connection and then close it.
fn is_closed(portal: SocketAddr) -> io::Result<bool> {
    let Ok(mut stream) = TcpStream::connect_timeout(&portal, PROBE) else {
        return Ok(true);
    };
    stream.set_read_timeout(Some(PROBE))?;
    match stream.read_exact(&mut [0]) {
        Err(error) => Ok(!matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
        )),
        Ok(()) => Ok(true),
    }
}

/// Returns a path as a value in QEMU's options, in which a comma is written twice.
fn quoted(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

fn start(portal: SocketAddr, key: &Key, secret: &Path, socket: &Path) -> io::Result<Child> {
    let object = format!("secret,id=chap,format=raw,file={}", quoted(secret));
    let disk = format!(
        "driver=iscsi,transport=tcp,portal={portal},target={},lun={LUN},user={},password-secret=chap,initiator-name={}",
        target_name(key),
        key.identity,
        initiator_name(key)
    );
    ends_with_us("qemu-nbd")
        // qemu-nbd accepts one client, and ends when this client disconnects.
        .args(["--shared=1", "--export-name=", "--cache=writeback"])
        .arg(format!("--socket={}", socket.display()))
        .args(["--object", &object, "--image-opts", &disk])
        // Settings of libiscsi, valid from the first packet, so that an unreachable host causes an
        // error soon.
        .env("LIBISCSI_TCP_USER_TIMEOUT", "3000")
        .env("LIBISCSI_TCP_KEEPIDLE", "1")
        .env("LIBISCSI_TCP_KEEPINTVL", "1")
        .env("LIBISCSI_TCP_KEEPCNT", "2")
        .env("LIBISCSI_TCP_SYNCNT", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .map_err(at(
            "cannot start qemu-nbd; install it (apt install qemu-utils)",
        ))
}

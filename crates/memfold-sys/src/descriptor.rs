//! Sends and receives bytes and file descriptors over a Unix stream socket (`SCM_RIGHTS`), and
//! waits until a descriptor is readable.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Writes all of `bytes` to `socket`, and sends `descriptor`, if there is one, together with the
/// first byte.
pub fn send(
    socket: &UnixStream,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = descriptor.as_slice();
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other(
            "the message has no room for the descriptor",
        ));
    }
    // A call that a signal interrupts has sent nothing.
    let sent = rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(
            socket,
            &[IoSlice::new(bytes)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )
    })?;
    io::Write::write_all(&mut &*socket, &bytes[sent..])
}

/// Reads up to `buffer.len()` bytes from `socket`. Returns their number, 0 if the peer has closed
/// the connection, and the file descriptor that came with them, if there is one.
pub fn receive(socket: &UnixStream, buffer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(buffer)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut descriptor = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            // If several descriptors came, all but the last are closed here.
            descriptor = fds.last().or(descriptor);
        }
    }
    Ok((got.bytes, descriptor))
}

/// Waits until `descriptor` is readable: it has data or is at its end or, for a pidfd, its process
/// has ended. Returns false if `timeout` is over before.
pub fn wait_readable(descriptor: impl AsFd, timeout: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            found => return Ok(found? > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn a_file_descriptor_is_sent_and_received_over_a_unix_socket() {
        let (a, b) = UnixStream::pair().unwrap();
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = std::fs::File::from(fd);
        file.write_all(b"same file").unwrap();
        send(&a, b"hel", Some(file.as_fd())).unwrap();
        send(&a, b"lo", None).unwrap();
        let mut buffer = [0; 16];
        let (n, got) = receive(&b, &mut buffer).unwrap();
        // The kernel does not join what came with a descriptor and what came without.
        let (more, none) = receive(&b, &mut buffer[n..]).unwrap();
        assert_eq!((&buffer[..n + more], none.is_none()), (&b"hello"[..], true));
        assert!(!wait_readable(&b, Duration::from_millis(1)).unwrap());
        drop(a);
        assert!(wait_readable(&b, Duration::ZERO).unwrap());
        let mut got = std::fs::File::from(got.unwrap());
        got.rewind().unwrap();
        let mut text = String::new();
        got.read_to_string(&mut text).unwrap();
        assert_eq!(text, "same file");
    }
}

//! The connection of the relay (the process between QEMU and a lending host) to a lender: a Unix
//! socket, or TCP with TLS by a pre-shared key.
//!
//! OpenSSL does TLS in this process. Rustls supports no external pre-shared keys, only those of an
//! earlier session. A second nbdkit as a client (`nbdkit nbd`) would work, too, but costs one more
//! process, and two more wake-ups for each request and lender.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use memfold_host::socket;
use openssl::ssl::{Ssl, SslContext, SslMethod, SslMode, SslStream, SslVerifyMode, SslVersion};

use super::super::{connection, nbd};
use crate::endpoint::{Address, Endpoint, Key};

/// Time limit for a lender to accept the connection, and for each answer of the handshake.
const PATIENCE: Duration = Duration::from_secs(3);

/// Cipher suites of TLS 1.3 whose hash fits pre-shared keys of this size (SHA-256, RFC 8446,
/// 4.2.11).
const SUITES: &str = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";

/// The relay's connection to a lender.
#[derive(Debug)]
pub enum Stream {
    /// Unix socket of a lender on this host.
    Unix(UnixStream),
    /// TLS connection to a lender on another host.
    Tls(SslStream<TcpStream>),
}

impl Stream {
    /// Connects to a lender's export, which must have at least `bytes` bytes. From then on, the
    /// connection ends when the lender's host does not answer for `patience`.
    ///
    /// # Errors
    /// Fails if the export cannot be reached, does not have the key, or is too small.
    pub fn open(endpoint: &Endpoint, bytes: u64, patience: Duration) -> io::Result<Self> {
        let mut stream = match (&endpoint.address, &endpoint.key) {
            (Address::Unix(path), _) => {
                let mut stream = socket::connect(path, PATIENCE)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_write_timeout(Some(PATIENCE))?;
                nbd::greet(&mut stream)?;
                Self::Unix(stream)
            }
            (Address::Tcp { ip, port }, Some(key)) => {
                let address = SocketAddr::new(*ip, *port);
                let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
                connection::keep_alive(&stream, patience)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_write_timeout(Some(PATIENCE))?;
                nbd::greet(&mut stream)?;
                nbd::ask_tls(&mut stream)?;
                Self::Tls(tls(stream, key)?)
            }
            (Address::Tcp { .. }, None) => {
                return Err(io::Error::other("an export over TCP needs a key"));
            }
        };
        let has = nbd::go(&mut stream)?;
        if has < bytes {
            return Err(io::Error::other(format!(
                "the lender exports {has} bytes, but {bytes} were lent"
            )));
        }
        match &stream {
            Self::Unix(stream) => stream.set_nonblocking(true)?,
            Self::Tls(stream) => stream.get_ref().set_nonblocking(true)?,
        }
        Ok(stream)
    }

    /// Sets how long the lender's host may give no answer before the kernel ends the connection.
    /// Has no effect on a Unix socket.
    ///
    /// # Errors
    /// Fails if the kernel refuses the socket options.
    pub fn keep_alive(&self, patience: Duration) -> io::Result<()> {
        match self {
            Self::Unix(_) => Ok(()),
            Self::Tls(stream) => connection::keep_alive(stream.get_ref(), patience),
        }
    }

    /// Returns whether the connection may hold bytes that it has read from its socket and not
    /// returned yet. Polling the socket does not show such bytes.
    #[must_use]
    pub const fn reads_ahead(&self) -> bool {
        matches!(self, Self::Tls(_))
    }
}

/// Starts TLS 1.3 with this pre-shared key only. A server that shows a certificate instead is
/// refused, because no CA is trusted here.
fn tls(stream: TcpStream, key: &Key) -> io::Result<SslStream<TcpStream>> {
    let secret = secret(key)?;
    let identity = key.identity.clone();
    let mut context = SslContext::builder(SslMethod::tls_client())?;
    context.set_min_proto_version(Some(SslVersion::TLS1_3))?;
    context.set_ciphersuites(SUITES)?;
    context.set_verify(SslVerifyMode::PEER);
    context.set_mode(
        SslMode::ENABLE_PARTIAL_WRITE | SslMode::ACCEPT_MOVING_WRITE_BUFFER | SslMode::AUTO_RETRY,
    );
    // With read-ahead, a TLS record needs one system call instead of two.
    context.set_read_ahead(true);
    context.set_psk_client_callback(move |_, _, name, into| {
        // The identity in `name` ends with a zero byte.
        let room = name.len() > identity.len() && into.len() >= secret.len();
        if room {
            name[..identity.len()].copy_from_slice(identity.as_bytes());
            name[identity.len()] = 0;
            into[..secret.len()].copy_from_slice(&secret);
        }
        Ok(if room { secret.len() } else { 0 })
    });
    let ssl = Ssl::new(&context.build())?;
    let stream = ssl
        .connect(stream)
        .map_err(|error| io::Error::other(format!("TLS: {error}")))?;
    if !stream.ssl().session_reused() {
        return Err(io::Error::other(
            "TLS: the lender did not use the lease's key",
        ));
    }
    Ok(stream)
}

/// Returns the key's 32 bytes, which are written in hexadecimal digits as a hash is.
fn secret(key: &Key) -> io::Result<[u8; 32]> {
    let secret = blake3::Hash::from_hex(&key.hex);
    let secret = secret.map_err(|_| io::Error::other("the lease's key is not valid"))?;
    Ok(secret.into())
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(into),
            Self::Tls(stream) => stream.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(data),
            Self::Tls(stream) => stream.write(data),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tls(stream) => stream.get_ref().as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tls_key_of_32_bytes_is_decoded_from_hexadecimal_digits() {
        let read = |hex: String| {
            let identity = "lease-7".into();
            secret(&Key { identity, hex }).ok()
        };
        let mut bytes = [0x1f; 32];
        bytes[..3].copy_from_slice(&[0, 255, 165]);
        assert_eq!(read(format!("00ffA5{}", "1f".repeat(29))), Some(bytes));
        for bad in ["", "0", "0g", "é", "0000"] {
            assert_eq!(read(format!("{bad}{}", "1f".repeat(31))), None, "{bad}");
        }
    }
}

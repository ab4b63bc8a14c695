//! Errors of a TCP endpoint's settings.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Error of a TCP endpoint's settings.
#[derive(Debug, thiserror::Error)]
pub enum TcpDoorError {
    /// Other hosts can reach the address, but the endpoint has no TLS.
    #[error(
        "{0} can be reached from other hosts, which needs TLS. Pass --tls-cert and --tls-key, or listen on 127.0.0.1 and forward the port by ssh, \
         or put a proxy with TLS before it (--public-url)"
    )]
    Plain(SocketAddr),
    /// The certificate or key file cannot be used.
    #[error("cannot use {path} for TLS: {why}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the kernel or of the PEM parser.
        why: String,
    },
    /// The private key does not match the certificate.
    #[error("cannot use the TLS certificate and key")]
    Tls(#[from] tokio_rustls::rustls::Error),
}

//! Why a TCP door can't be.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Why a TCP door can't be.
#[derive(Debug, thiserror::Error)]
pub enum TcpDoorError {
    /// Others could listen.
    #[error(
        "{0} can be reached from other hosts, which needs TLS. Pass --tls-cert and --tls-key, or listen on 127.0.0.1 and forward the port by ssh, \
         or put a proxy with TLS before it (--public-url)"
    )]
    Plain(SocketAddr),
    /// A file can't be used.
    #[error("cannot use {path} for TLS: {why}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// Key and certificate don't fit.
    #[error("cannot use the TLS certificate and key")]
    Tls(#[from] tokio_rustls::rustls::Error),
}

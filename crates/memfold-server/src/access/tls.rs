//! The TLS certificate of the daemon's API on TCP. When the files have changed, they are read
//! again, so that the certificate can be renewed while the daemon runs.

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use memfold_lend::tls_key;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tracing::{info, warn};

/// Why the settings of a TCP address cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TcpDoorError {
    /// Other hosts can reach the TCP address, but no TLS files were given.
    #[error(
        "{0} can be reached from other hosts, which needs TLS. Pass --tls-cert and --tls-key, or listen on 127.0.0.1 and forward the port by ssh, \
         or put a proxy with TLS before it (--public-url)"
    )]
    Plain(SocketAddr),
    /// The certificate or key file cannot be used.
    #[error("cannot use {path} for TLS: {why}")]
    File {
        /// Path of the certificate file or key file.
        path: PathBuf,
        /// Why the file cannot be used: error of the kernel or of the PEM parser.
        why: String,
    },
    /// The private key does not match the certificate.
    #[error("cannot use the TLS certificate and key")]
    Tls(#[from] tokio_rustls::rustls::Error),
}

/// Shortest time between two checks whether the certificate's files have changed.
const LOOK: Duration = Duration::from_secs(1);

/// Paths of the TLS certificate and its private key.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// Path of the TLS certificate, followed by its chain (PEM).
    pub certificate: PathBuf,
    /// Path of the certificate's private key (PEM).
    pub key: PathBuf,
}

/// Identity of a file's content: inode, size, and modification time in seconds and nanoseconds.
type Stamp = (u64, u64, i64, i64);

/// TLS settings for new connections. They follow changes of the certificate's files.
#[derive(Debug)]
pub(super) struct Tls {
    files: TlsFiles,
    shown: Mutex<Shown>,
}

#[derive(Debug)]
struct Shown {
    config: Arc<ServerConfig>,
    /// Stamps of the files that were last read, whether or not the files could be used.
    stamps: [Option<Stamp>; 2],
    looked: Instant,
}

impl Tls {
    pub fn open(files: &TlsFiles) -> Result<Self, TcpDoorError> {
        // The stamps are taken before the files are read, so that a change in between is seen at
        // the next check.
        let stamps = stamps(files);
        let shown = Shown {
            config: Arc::new(read(files)?),
            stamps,
            looked: Instant::now(),
        };
        Ok(Self {
            files: files.clone(),
            shown: Mutex::new(shown),
        })
    }

    /// Returns the TLS settings for a new connection. If a file has changed and cannot be used, for
    /// example while it is being replaced, the previous settings stay.
    pub fn config(&self) -> Arc<ServerConfig> {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        if shown.looked.elapsed() >= LOOK {
            shown.looked = Instant::now();
            let stamps = stamps(&self.files);
            if stamps != shown.stamps {
                shown.stamps = stamps;
                let file = self.files.certificate.display();
                match read(&self.files) {
                    Ok(config) => {
                        shown.config = Arc::new(config);
                        info!(%file, "TLS certificate changed; new connections use the new certificate");
                    }
                    Err(error) => warn!(
                        %file,
                        error = &error as &dyn std::error::Error,
                        "cannot use the changed TLS certificate or key, so the previous pair stays in use; put a matching pair there"
                    ),
                }
            }
        }
        shown.config.clone()
    }
}

fn stamps(files: &TlsFiles) -> [Option<Stamp>; 2] {
    let stamp = |path: &Path| {
        let facts = std::fs::metadata(path).ok()?;
        Some((facts.ino(), facts.size(), facts.mtime(), facts.mtime_nsec()))
    };
    [stamp(&files.certificate), stamp(&files.key)]
}

fn read(files: &TlsFiles) -> Result<ServerConfig, TcpDoorError> {
    let failed = |path: &Path, why: String| TcpDoorError::File {
        path: path.into(),
        why,
    };
    let certificates = CertificateDer::pem_file_iter(&files.certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| failed(&files.certificate, error.to_string()))?;
    if certificates.is_empty() {
        let why = "the file contains no certificate".to_owned();
        return Err(failed(&files.certificate, why));
    }
    let key = tls_key::read(&files.key).map_err(|why| failed(&files.key, why))?;
    Ok(ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(certificates, key)?)
}

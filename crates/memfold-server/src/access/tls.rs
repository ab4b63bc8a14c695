//! The certificate that the TCP door shows. It is read anew when its files have changed: those that
//! expire are replaced while the daemon runs.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use memfold_lend::tls_key;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tracing::{info, warn};

use super::door_error::TcpDoorError;

/// Time between two looks at the files, at least.
const LOOK: Duration = Duration::from_secs(1);

/// Certificate and key.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The certificate and those that vouch for it, PEM.
    pub certificate: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
}

/// How a file was: inode, size, time of its last change in nanoseconds.
type Stamp = (u64, u64, i64, i64);

/// What connections that begin now are shown.
#[derive(Debug)]
pub(super) struct Tls {
    files: TlsFiles,
    shown: Mutex<Shown>,
}

#[derive(Debug)]
struct Shown {
    config: Arc<ServerConfig>,
    /// Of the files that were looked at last, whether or not they could be used.
    stamps: [Option<Stamp>; 2],
    looked: Instant,
}

impl Tls {
    pub fn open(files: &TlsFiles) -> Result<Self, TcpDoorError> {
        // Before they are read: what changes meanwhile is seen at the next look.
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

    /// For a connection that begins. Files that can't be used, as while they are being replaced,
    /// leave it as it was.
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
                        info!(%file, "TLS certificate changed; new connections use the new one");
                    }
                    Err(error) => warn!(
                        %file,
                        error = &error as &dyn std::error::Error,
                        "cannot use the changed certificate or key, serving the previous one; put matching files there"
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

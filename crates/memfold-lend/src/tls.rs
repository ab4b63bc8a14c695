//! Reads the certificate files for TLS to a lease registry: the certificates of the CA that signed
//! the registry's certificate, and this host's own certificate.

use std::path::{Path, PathBuf};

use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Files of this host's certificate and its private key.
#[derive(Clone, Debug)]
pub struct OwnCertificate {
    /// File of this host's certificate and its chain (PEM).
    pub certificate: PathBuf,
    /// File of the private key of this host's certificate (PEM).
    pub key: PathBuf,
}

/// Files for TLS to a registry. They are read for each connection, so that an operator can replace
/// them while the daemon runs.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// File of the CA certificates (PEM) that verify a server's certificate.
    pub ca: PathBuf,
    /// Certificate that this host shows to servers that ask for one; `None`: this host shows none.
    pub own: Option<OwnCertificate>,
}

type FileError = (PathBuf, String);

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let failed = |why: String| (path.to_owned(), why);
    let found = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| failed(error.to_string()))?;
    if found.is_empty() {
        return Err(failed("the file contains no certificate".into()));
    }
    Ok(found)
}

impl TlsFiles {
    /// Reads the files and returns the TLS configuration. An error names the file and the reason.
    pub fn config(&self) -> Result<ClientConfig, FileError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.ca)? {
            let added = roots.add(certificate);
            added.map_err(|error| (self.ca.clone(), error.to_string()))?;
        }
        let builder = ClientConfig::builder().with_root_certificates(roots);
        let Some(own) = &self.own else {
            return Ok(builder.with_no_client_auth());
        };
        let key = crate::tls_key::read(&own.key).map_err(|why| (own.key.clone(), why))?;
        builder
            .with_client_auth_cert(certificates(&own.certificate)?, key)
            .map_err(|error| (own.certificate.clone(), error.to_string()))
    }
}

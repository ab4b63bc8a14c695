//! Where the daemon's API listens: a Unix socket, and, if configured, TCP addresses with or without
//! TLS.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use tokio::net::TcpListener;

use super::origin::PublicUrl;
use super::peer::Groups;
use super::tls::{TcpDoorError, Tls, TlsFiles};

/// Addresses at which the daemon serves its API, and directories of access tokens and records.
#[derive(Clone, Debug)]
pub struct Doors {
    /// Path of the API's Unix socket.
    pub socket: PathBuf,
    /// Groups of users that may use the Unix socket, beside root.
    pub groups: Groups,
    /// TCP address of the API and its settings; `None`: the daemon does not listen on TCP.
    pub tcp: Option<TcpDoor>,
    /// Directory with the files of the access tokens for TCP.
    pub tokens: PathBuf,
    /// Directory of the ledger's history and of the audit log.
    pub records: PathBuf,
}

/// A TCP address at which the daemon serves its API. Its settings were checked.
#[derive(Clone, Debug)]
pub struct TcpDoor {
    pub(super) address: SocketAddr,
    pub(super) names: Vec<String>,
    pub(super) public: Vec<PublicUrl>,
    pub(super) tls: Option<Arc<Tls>>,
}

impl TcpDoor {
    /// Checks the settings for serving the API at `address`. Browsers may also use the host names
    /// `names`, or the `public` URLs of a reverse proxy.
    ///
    /// # Errors
    /// [`TcpDoorError`] if other hosts can reach the address and there is no TLS, or if a TLS file
    /// cannot be used.
    pub fn new(
        address: SocketAddr,
        names: Vec<String>,
        public: Vec<PublicUrl>,
        tls: Option<&TlsFiles>,
    ) -> Result<Self, TcpDoorError> {
        if tls.is_none() && !address.ip().is_loopback() {
            return Err(TcpDoorError::Plain(address));
        }
        let tls = tls.map(Tls::open).transpose()?.map(Arc::new);
        Ok(Self {
            address,
            names,
            public,
            tls,
        })
    }

    /// Returns the names by which browsers may address the daemon, beside IP addresses and
    /// `localhost`.
    pub(super) fn known_names(&self) -> Vec<String> {
        let public = self.public.iter().map(|url| url.name().to_owned());
        self.names.iter().cloned().chain(public).collect()
    }

    /// Returns the URLs at which browsers find the dashboard.
    pub(super) fn urls(&self) -> Vec<String> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let port = self.address.port();
        let own = match self.address.ip() {
            ip if ip.is_unspecified() => SocketAddr::new(IpAddr::from([127, 0, 0, 1]), port),
            _ => self.address,
        };
        let names = self.names.iter().map(|name| format!("{name}:{port}"));
        let direct = names
            .chain([own.to_string()])
            .map(|host| format!("{scheme}://{host}/"));
        self.public
            .iter()
            .map(PublicUrl::url)
            .chain(direct)
            .collect()
    }

    /// Returns the name of the session cookie. Browsers send cookies of an address to all its
    /// ports, so the name contains the port. With TLS, the name has the prefix `__Host-`, which
    /// binds the cookie to this host.
    pub(super) fn cookie_name(&self) -> String {
        let prefix = if self.tls.is_some() { "__Host-" } else { "" };
        format!("{prefix}memfold-{}", self.address.port())
    }

    /// Opens the listening TCP socket. With port 0, the kernel chooses a port.
    pub(crate) async fn listen(&mut self) -> io::Result<TcpListener> {
        let listener = TcpListener::bind(self.address).await?;
        self.address = listener.local_addr()?;
        Ok(listener)
    }

    /// Returns whether the endpoint uses TLS.
    pub(crate) const fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Returns the TCP address at which the daemon serves its API.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn door(address: &str, names: &[&str]) -> Result<TcpDoor, TcpDoorError> {
        let names = names.iter().map(|&name| name.to_owned()).collect();
        TcpDoor::new(address.parse().unwrap(), names, Vec::new(), None)
    }

    #[test]
    fn without_tls_the_daemon_refuses_to_listen_on_a_non_loopback_address() {
        for address in ["127.0.0.1:1", "127.8.0.1:1", "[::1]:1"] {
            assert!(door(address, &[]).is_ok(), "{address}");
        }
        for address in ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "[::ffff:127.0.0.1]:1"] {
            let error = door(address, &[]).unwrap_err().to_string();
            assert!(error.contains("--tls-cert"), "{address}: {error}");
        }
    }

    #[test]
    fn if_a_tls_certificate_file_has_no_certificate_the_error_names_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("empty"), "").unwrap();
        let files = |certificate: &str| TlsFiles {
            certificate: path(certificate),
            key: path("empty"),
        };
        for (name, why) in [("missing", "No such file"), ("empty", "no certificate")] {
            let address = "0.0.0.0:1".parse().unwrap();
            let error =
                TcpDoor::new(address, Vec::new(), Vec::new(), Some(&files(name))).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(name) && text.contains(why), "{text}");
        }
    }

    #[test]
    fn the_daemon_prints_the_urls_of_its_dashboard_with_the_given_host_names() {
        let urls = door("127.0.0.1:8420", &["vm1"]).unwrap().urls();
        assert_eq!(urls, ["http://vm1:8420/", "http://127.0.0.1:8420/"]);
        assert_eq!(door("[::1]:7", &[]).unwrap().urls(), ["http://[::1]:7/"]);
        let name = door("127.0.0.1:8420", &[]).unwrap().cookie_name();
        assert_eq!(name, "memfold-8420");
    }
}

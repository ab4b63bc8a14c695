//! Parses the address of the lease registry as an operator writes it (`serve --registry`), and
//! checks the files with which this host authenticates there.
//!
//! | address | registry |
//! |---|---|
//! | `/run/memfold/memfold.sock` | a daemon on this host |
//! | `https://HOST:PORT` | a daemon on another host: TLS, and this host's token |
//! | `etcd+https://HOST:PORT,HOST:PORT` | the members of an etcd cluster: TLS, and this host's certificate if etcd asks for one |
//! | `etcd+http://127.0.0.1:PORT` | an etcd on this host |

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tokio_rustls::rustls::pki_types::ServerName;

use super::tls::{OwnCertificate, TlsFiles};

/// Maximum number of members of an etcd cluster.
const MOST_MEMBERS: usize = 16;

/// Maximum length of a token in characters.
const LONGEST_TOKEN: u64 = 256;

/// Reason why a registry cannot be used at the given address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// The given text is not an address of a registry.
    #[error(
        "'{said}' is not the address of a lease registry ({why}); give the path of a socket, https://HOST:PORT of another daemon, or etcd+https://HOST:PORT,..."
    )]
    Address {
        /// The text that the operator gave.
        said: String,
        /// Which part of the text is wrong, as a message.
        why: &'static str,
    },
    /// An option that the registry needs is missing.
    #[error("a registry at {place} needs {option}: {why}")]
    Missing {
        /// Address of the registry.
        place: String,
        /// Name of the missing command-line option.
        option: &'static str,
        /// Purpose of the missing option.
        why: &'static str,
    },
    /// A given option does not apply to this kind of registry.
    #[error("{option} does not apply to the registry at {place}; leave it out")]
    Unused {
        /// Address of the registry.
        place: String,
        /// Name of the command-line option that does not apply.
        option: &'static str,
    },
    /// A file with which this host authenticates to the registry cannot be used.
    #[error("cannot use {path} to log in to the lease registry: {why}")]
    File {
        /// Path of the key, certificate or token file.
        path: PathBuf,
        /// Error of the kernel or of OpenSSL, or a file mode that lets other users read the file.
        why: String,
    },
}

/// Host and TCP port of a server that keeps a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Host name or IP address of the server, without brackets.
    pub host: String,
    /// TCP port of the server.
    pub port: u16,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl Member {
    /// Parses an address of the form `HOST:PORT` or `[IPV6]:PORT`.
    fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok().filter(|&port| port != 0)?;
        let host = match host.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').filter(|h| h.contains(':'))?,
            None => Some(host).filter(|h| !h.contains(':'))?,
        };
        // The host must be an IP address or a valid DNS name.
        ServerName::try_from(host).ok()?;
        Some(Self {
            host: host.to_owned(),
            port,
        })
    }

    fn is_this_host(&self) -> bool {
        let address: Option<IpAddr> = self.host.parse().ok();
        address.is_some_and(|address| address.is_loopback())
    }
}

/// Files with which this host authenticates to a registry, as given on the command line.
#[derive(Clone, Debug, Default)]
pub struct RegistryFiles {
    /// File of the CA certificates (PEM) that verify the registry's certificate.
    pub ca: Option<PathBuf>,
    /// File of the token that `memfold host add` on the registry's host created for this host.
    pub token: Option<PathBuf>,
    /// File of this host's own certificate, PEM.
    pub certificate: Option<PathBuf>,
    /// File of the private key (PEM) of this host's certificate.
    pub key: Option<PathBuf>,
}

/// Where a registry is that another process serves, with the files for the authentication there.
#[derive(Clone, Debug)]
pub enum RegistryAt {
    /// A daemon on this host, which listens on this Unix socket.
    Socket(PathBuf),
    /// A daemon on another host, reached by HTTPS.
    Daemon {
        /// Host and port of the daemon.
        member: Member,
        /// Files of the CA certificates that verify the daemon.
        tls: TlsFiles,
        /// File of the token by which the daemon recognizes this host.
        token: PathBuf,
    },
    /// An etcd cluster. No daemon keeps the registry.
    Etcd {
        /// Hosts and ports of the etcd cluster's members.
        members: Vec<Member>,
        /// Files for TLS in both directions; `None` if the etcd is on this host and uses no TLS.
        tls: Option<TlsFiles>,
    },
}

impl fmt::Display for RegistryAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => path.display().fmt(f),
            Self::Daemon { member, .. } => write!(f, "https://{member}"),
            Self::Etcd { members, tls } => {
                let scheme = if tls.is_some() { "https" } else { "http" };
                let members: Vec<String> = members.iter().map(ToString::to_string).collect();
                write!(f, "etcd+{scheme}://{}", members.join(","))
            }
        }
    }
}

impl RegistryAt {
    /// Parses a registry's address and checks its files. The files are read here once, so that an
    /// error appears now and not at the time when a VM cannot borrow.
    ///
    /// # Errors
    /// Fails if the address is malformed, or an option or file is missing, unusable, or not
    /// applicable.
    pub fn new(said: &str, files: &RegistryFiles) -> Result<Self, PlaceError> {
        let bad = |why| PlaceError::Address {
            said: said.to_owned(),
            why,
        };
        let members = |list: &str| -> Option<Vec<Member>> {
            let list = list.strip_suffix('/').unwrap_or(list);
            list.split(',').map(Member::parse).collect()
        };
        let no_list = || bad("the address is not HOST:PORT");
        let ca = || required(files.ca.as_ref(), said, "--registry-ca", CA);
        let (place, used): (_, &[&str]) = if let Some(rest) = said.strip_prefix("https://") {
            let mut all = members(rest).ok_or_else(no_list)?;
            let (Some(member), true) = (all.pop(), all.is_empty()) else {
                return Err(bad("a registry over https has one address"));
            };
            let token = required(files.token.as_ref(), said, "--registry-token", TOKEN)?;
            let tls = TlsFiles {
                ca: ca()?,
                own: None,
            };
            let place = Self::Daemon { member, tls, token };
            (place, &["--registry-ca", "--registry-token"])
        } else if let Some(rest) = said.strip_prefix("etcd+https://") {
            let members = members(rest).ok_or_else(no_list)?;
            let (certificate, key) = (files.certificate.clone(), files.key.clone());
            let own = certificate
                .zip(key)
                .map(|(certificate, key)| OwnCertificate { certificate, key });
            let tls = Some(TlsFiles { ca: ca()?, own });
            let place = Self::Etcd { members, tls };
            (place, &["--registry-ca", "--registry-cert"])
        } else if let Some(rest) = said.strip_prefix("etcd+http://") {
            let members = members(rest).ok_or_else(no_list)?;
            if !members.iter().all(Member::is_this_host) {
                return Err(bad("without TLS only 127.0.0.1 and ::1 are asked"));
            }
            (Self::Etcd { members, tls: None }, &[])
        } else if said.contains("://") {
            return Err(bad("unknown scheme"));
        } else if said.is_empty() {
            return Err(bad("the address is empty"));
        } else {
            (Self::Socket(said.into()), &[])
        };
        let given = [
            (files.ca.is_some(), "--registry-ca"),
            (files.token.is_some(), "--registry-token"),
            (files.certificate.is_some(), "--registry-cert"),
        ];
        let mut given = given.into_iter().filter(|(is_given, _)| *is_given);
        if let Some((_, option)) = given.find(|(_, option)| !used.contains(option)) {
            let place = place.to_string();
            return Err(PlaceError::Unused { place, option });
        }
        place.check()?;
        Ok(place)
    }

    fn check(&self) -> Result<(), PlaceError> {
        let tls = match self {
            Self::Socket(_) => return Ok(()),
            Self::Daemon { tls, token, .. } => {
                read_token(token)?;
                Some(tls)
            }
            Self::Etcd { members, tls } => {
                if members.len() > MOST_MEMBERS {
                    return Err(PlaceError::Address {
                        said: self.to_string(),
                        why: "more than 16 members",
                    });
                }
                tls.as_ref()
            }
        };
        tls.map_or(Ok(()), |tls| {
            tls.config()
                .map(drop)
                .map_err(|(path, why)| PlaceError::File { path, why })
        })
    }
}

const CA: &str = "the certificates (PEM) of the CA that signed its certificate";
const TOKEN: &str = "the file of the token that 'memfold host add' created there for this host";

fn required(
    file: Option<&PathBuf>,
    place: &str,
    option: &'static str,
    why: &'static str,
) -> Result<PathBuf, PlaceError> {
    let place = place.to_owned();
    file.cloned()
        .ok_or(PlaceError::Missing { place, option, why })
}

/// Reads this host's token from a file that no other user may read. The file is read for each
/// request, because an operator may replace it while the daemon runs.
pub fn read_token(path: &Path) -> Result<String, PlaceError> {
    let read = || -> io::Result<String> {
        let file = File::open(path)?;
        let mode = file.metadata()?.permissions().mode();
        let mut text = String::new();
        file.take(LONGEST_TOKEN + 1).read_to_string(&mut text)?;
        if mode & 0o077 != 0 {
            let why = "other users may read the file; run 'chmod 600";
            return Err(io::Error::other(format!("{why} {}'", path.display())));
        }
        let token = text.trim();
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(io::Error::other("the file contains no token"));
        }
        Ok(token.to_owned())
    };
    read().map_err(|error| PlaceError::File {
        path: path.to_owned(),
        why: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, set_permissions, write};

    fn plain(said: &str) -> Result<String, String> {
        RegistryAt::new(said, &RegistryFiles::default())
            .map(|place| place.to_string())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_address_of_a_lease_registry_is_a_socket_path_a_daemon_url_or_an_etcd_url() {
        assert_eq!(plain("/run/s").unwrap(), "/run/s");
        let local = "etcd+http://127.0.0.1:2379,[::1]:2379";
        assert_eq!(plain(local).unwrap(), local);
        for (said, word) in [
            ("", "empty"),
            ("http://a:1", "scheme"),
            ("etcd://a:1", "scheme"),
            ("etcd+http://10.0.0.1:2379", "without TLS"),
            ("etcd+http://127.0.0.1", "HOST:PORT"),
            ("etcd+http://127.0.0.1:0", "HOST:PORT"),
            ("etcd+http://::1:2379", "HOST:PORT"),
            ("https://a b:1", "HOST:PORT"),
            ("https://a:1,b:1", "one address"),
            ("https://a:1", "--registry-token"),
            ("etcd+https://a:1", "--registry-ca"),
        ] {
            let error = plain(said).unwrap_err();
            assert!(error.contains(word), "{said}: {error}");
        }
    }

    #[test]
    fn unused_options_of_the_lease_registry_and_world_readable_token_files_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let files = RegistryFiles {
            token: Some(path.clone()),
            ..RegistryFiles::default()
        };
        let error = RegistryAt::new("/run/s", &files).unwrap_err().to_string();
        assert!(error.contains("--registry-token does not apply"), "{error}");
        assert!(read_token(&path).unwrap_err().to_string().contains("token"));
        write(&path, "abc\n").unwrap();
        set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let error = read_token(&path).unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read_token(&path).unwrap(), "abc");
        write(&path, "a\r\nb: c").unwrap();
        assert!(read_token(&path).is_err(), "it would get into a header");
    }
}

//! Addresses of exports. An export is the network disk by which a lending host serves the RAM of
//! one lease. Its address consists of the place where the lender listens, the protocol and the key.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::files;
use super::registry_error::{RegistryError, check_name, value};

/// Protocol by which a lender serves a lease's RAM.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// NBD, which is encrypted over TCP.
    #[default]
    Nbd,
    /// iSCSI, which is not encrypted.
    Iscsi,
}

impl Transport {
    #[allow(clippy::trivially_copy_pass_by_ref)] // serde's
    fn is_nbd(&self) -> bool {
        *self == Self::Nbd
    }
}

/// What a borrower needs to reach a lease's RAM: address, protocol and key of the lender's export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Address that the lender's export listens on.
    pub address: Address,
    /// Key that the borrower needs over TCP: TLS-PSK for NBD, the CHAP secret for iSCSI. `None` for
    /// a Unix socket.
    pub key: Option<Key>,
    /// Protocol that the lender's export speaks.
    #[serde(default, skip_serializing_if = "Transport::is_nbd")]
    pub transport: Transport,
}

/// Address that a lender's export listens on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Address {
    /// Path of a Unix socket, if lender and borrower are on one host.
    Unix(PathBuf),
    /// IP address and TCP port, for NBD with TLS and a pre-shared key, or for iSCSI with CHAP.
    Tcp {
        /// IP address of the lender's host, or of a forwarder in front of the host.
        ip: IpAddr,
        /// TCP port of the export; never 0.
        port: u16,
    },
}

/// Secret that a borrower needs to reach a lease's RAM over TCP: a pre-shared key for TLS (RFC
/// 4279), or the CHAP secret for iSCSI.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// Name of the key, `lease-ID`, which the borrower sends in clear text.
    pub identity: String,
    /// The secret: 32 bytes as 64 hexadecimal digits.
    pub hex: String,
}

// A key must not get into a log.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "key of {}", self.identity)
    }
}

impl Key {
    /// Writes a key file in the format of `GnuTLS`, readable by its owner only.
    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        files::write_private(path, &format!("{}:{}\n", self.identity, self.hex))
    }

    /// Reads a key file.
    pub(super) fn read(path: &Path) -> io::Result<Self> {
        let text = std::fs::read_to_string(path)?;
        let words = text.trim().split_once(':');
        let (identity, hex) = words.ok_or_else(|| io::Error::other("the file contains no key"))?;
        Ok(Self {
            identity: identity.to_owned(),
            hex: hex.to_owned(),
        })
    }
}

impl Endpoint {
    /// Returns the endpoint of an NBD export on this host.
    pub(super) const fn unix(socket: PathBuf) -> Self {
        Self {
            address: Address::Unix(socket),
            key: None,
            transport: Transport::Nbd,
        }
    }

    /// Checks an endpoint that a lender of another host has written. Refuses Unix sockets, because
    /// their paths would name sockets of this host.
    pub fn check_of_another_host(&self) -> Result<(), RegistryError> {
        self.check()?;
        match self.address {
            Address::Tcp { .. } => Ok(()),
            Address::Unix(_) => Err(value(
                "address",
                "the lender exports on a Unix socket, for its own host only; lend there with 'memfold lend --listen ADDRESS'",
            )),
        }
    }

    /// Checks the values of an endpoint, which may come from another host and become options of
    /// QEMU and the contents of a key file.
    pub fn check(&self) -> Result<(), RegistryError> {
        let is_usable = |path: &Path| {
            let text = path.to_str();
            path.is_absolute()
                && text.is_some_and(|text| text.len() <= memfold_vm::directory::MAX_SOCKET_PATH)
        };
        let is_valid =
            |key: &Key| key.hex.len() == 64 && key.hex.bytes().all(|byte| byte.is_ascii_hexdigit());
        let (field, why) = match (&self.address, &self.key) {
            (Address::Unix(_), _) if self.transport == Transport::Iscsi => {
                ("address", "iSCSI needs an IP address")
            }
            (Address::Unix(path), _) if !is_usable(path) => (
                "address",
                "a Unix socket needs an absolute path in UTF-8, within the kernel's limit of length",
            ),
            (Address::Tcp { port: 0, .. }, _) => ("address", "port 0 is not valid"),
            (Address::Tcp { .. }, None) => ("key", "an export over TCP needs a key"),
            (_, Some(key)) if !is_valid(key) => ("key", "a key is 32 bytes in hexadecimal digits"),
            (_, Some(key)) => return check_name("key", &key.identity),
            (Address::Unix(_), None) => return Ok(()),
        };
        Err(value(field, why))
    }
}

/// Where the exports of a lender listen, and which protocol they speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listen {
    /// NBD on Unix sockets, for borrowers on the lender's own host.
    Unix,
    /// NBD over TCP with TLS. Each export has its own port and key.
    Tcp(TcpListen),
    /// iSCSI over TCP without encryption. Each export has its own port and key.
    Iscsi(TcpListen),
}

/// IP address and ports that a lender's exports listen on, and the address that borrowers are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpListen {
    /// IP address that the lender's exports listen on.
    pub ip: IpAddr,
    /// IP address of a forwarder between borrowers and the lender's host. Borrowers are told this
    /// address; `None`: they are told `ip`.
    pub announce: Option<IpAddr>,
    /// First and last TCP port that the lender's exports may use; `None`: any free port.
    pub ports: Option<(u16, u16)>,
}

/// Addresses that were chosen for servers which bind them later.
static PROMISED: Mutex<BTreeSet<SocketAddr>> = Mutex::new(BTreeSet::new());

fn promised() -> MutexGuard<'static, BTreeSet<SocketAddr>> {
    PROMISED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An address that no other export of this process gets until this value is dropped.
#[derive(Debug)]
pub(super) struct Promised(pub SocketAddr);

impl Drop for Promised {
    fn drop(&mut self) {
        promised().remove(&self.0);
    }
}

impl TcpListen {
    pub(super) fn bind(&self) -> io::Result<TcpListener> {
        self.bind_free(&promised())
    }

    /// Chooses a free address for a server that binds it itself.
    pub(super) fn promise(&self) -> io::Result<Promised> {
        let mut promised = promised();
        let address = self.bind_free(&promised)?.local_addr()?;
        promised.insert(address);
        Ok(Promised(address))
    }

    fn bind_free(&self, promised: &BTreeSet<SocketAddr>) -> io::Result<TcpListener> {
        let Some((first, last)) = self.ports else {
            loop {
                let listener = TcpListener::bind(SocketAddr::new(self.ip, 0))?;
                if !promised.contains(&listener.local_addr()?) {
                    return Ok(listener);
                }
            }
        };
        for port in first..=last {
            let address = SocketAddr::new(self.ip, port);
            if promised.contains(&address) {
                continue;
            }
            match TcpListener::bind(address) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                bound => return bound,
            }
        }
        Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            format!("all ports from {first} to {last} are in use; give more of them"),
        ))
    }

    pub(super) fn endpoint(&self, port: u16, key: Key, transport: Transport) -> Endpoint {
        Endpoint {
            address: Address::Tcp {
                ip: self.announce.unwrap_or(self.ip),
                port,
            },
            key: Some(key),
            transport,
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Tcp(tcp) | Self::Iscsi(tcp)) = self else {
            return f.write_str("Unix sockets");
        };
        write!(f, "{}", tcp.ip)?;
        if let Some((first, last)) = tcp.ports {
            write!(f, ", ports {first} to {last}")?;
        }
        if let Some(announce) = tcp.announce {
            write!(f, ", announced as {announce}")?;
        }
        if matches!(self, Self::Iscsi(_)) {
            f.write_str(", by iSCSI, not encrypted")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_names_and_endpoints_from_other_hosts_are_validated() {
        for bad in ["", "-a", "a/b", "a b", "a\n", &"a".repeat(65)] {
            assert!(check_name("host", bad).is_err(), "{bad}");
        }
        check_name("host", "Node-1.example").unwrap();
        let tcp = |port, key| Endpoint {
            address: Address::Tcp {
                ip: [127, 0, 0, 1].into(),
                port,
            },
            key,
            transport: Transport::Nbd,
        };
        let key = |identity: &str, hex: String| {
            Some(Key {
                identity: identity.into(),
                hex,
            })
        };
        tcp(1, key("a", "0f".repeat(32))).check().unwrap();
        let refused = |endpoint: Endpoint, why: &str| {
            let error = endpoint.check().unwrap_err().to_string();
            assert!(error.contains(why), "{endpoint:?}: {error}");
        };
        for (bad, why) in [
            (tcp(1, None), "over TCP needs a key"),
            (tcp(0, key("a", "0f".repeat(32))), "port 0"),
            (tcp(1, key("a:b", "0f".repeat(32))), "key"),
            (tcp(1, key("a", "0f".repeat(31))), "32 bytes in hexadecimal"),
            (tcp(1, key("a", "\n".repeat(64))), "32 bytes in hexadecimal"),
        ] {
            refused(bad, why);
        }
        let unix = |path: &str| Endpoint {
            address: Address::Unix(path.into()),
            key: None,
            transport: Transport::Nbd,
        };
        unix("/run/x").check().unwrap();
        unix("/run/x").check_of_another_host().unwrap_err();
        let tls = tcp(1, key("a", "0f".repeat(32)));
        tls.check_of_another_host().unwrap();
        let mut iscsi = unix("/run/x");
        iscsi.transport = Transport::Iscsi;
        refused(iscsi, "iSCSI needs an IP address");
        // This record has the form that an earlier daemon wrote.
        let text = serde_json::to_string(&unix("/run/x")).unwrap();
        assert!(!text.contains("transport"), "{text}");
        assert_eq!(
            serde_json::from_str::<Endpoint>(&text).unwrap(),
            unix("/run/x")
        );
        refused(unix("run/x"), "absolute path");
        refused(unix(&format!("/{}", "x".repeat(200))), "limit of length");
    }

    #[test]
    fn a_port_that_was_promised_to_an_export_is_given_to_no_other_until_the_export_has_ended() {
        // Two free ports in a row, which nobody else takes meanwhile but by accident.
        let free = |port: u16| TcpListener::bind(("127.0.0.9", port)).is_ok();
        let first = (20_000..32_000).find(|&port| free(port) && free(port + 1));
        let first = first.unwrap();
        let tcp = TcpListen {
            ip: [127, 0, 0, 9].into(),
            announce: None,
            ports: Some((first, first + 1)),
        };
        let one = tcp.promise().unwrap();
        let other = tcp.promise().unwrap();
        assert_eq!((one.0.port(), other.0.port()), (first, first + 1));
        let told = tcp.promise().unwrap_err().to_string();
        assert!(told.contains("are in use"), "{told}");
        tcp.bind().unwrap_err();
        drop(one);
        let listener = tcp.bind().unwrap();
        assert_eq!(listener.local_addr().unwrap().port(), first);
        drop(other);
    }

    #[test]
    fn debug_output_of_an_endpoint_contains_no_key() {
        let key = Key {
            identity: "a".into(),
            hex: "0123456789abcdef".repeat(4),
        };
        let endpoint = Endpoint {
            address: Address::Unix("/x".into()),
            key: Some(key.clone()),
            transport: Transport::Nbd,
        };
        assert!(!format!("{endpoint:?} {key:?}").contains("0123"));
    }
}

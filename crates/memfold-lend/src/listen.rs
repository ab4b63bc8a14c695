//! Addresses that a lender's exports listen on.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};

use super::endpoint::{Address, Endpoint, Key, Transport};

/// Kind of address that exports listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listen {
    /// Unix sockets, for borrowers on this host.
    Unix,
    /// NBD over TCP with TLS. Each export has its own port and key.
    Tcp(TcpListen),
    /// iSCSI without encryption. Each export has its own port and key.
    Iscsi(TcpListen),
}

/// TCP address and ports of exports, and the address that borrowers are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpListen {
    /// Address that exports listen on.
    pub ip: IpAddr,
    /// Address of a forwarder between borrowers and this host, if there is one. Borrowers are told
    /// this address instead.
    pub announce: Option<IpAddr>,
    /// First and last TCP port of exports; `None` allows any free port.
    pub ports: Option<(u16, u16)>,
}

impl TcpListen {
    pub(super) fn bind(&self) -> io::Result<TcpListener> {
        let Some((first, last)) = self.ports else {
            return TcpListener::bind(SocketAddr::new(self.ip, 0));
        };
        for port in first..=last {
            match TcpListener::bind(SocketAddr::new(self.ip, port)) {
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

impl std::fmt::Display for Listen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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

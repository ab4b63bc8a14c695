//! Addresses that a lender's exports listen on.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};

use super::endpoint::{Address, Endpoint, Key, Transport};

/// Kind of address that exports listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listen {
    /// On Unix sockets: for borrowers on this host.
    Unix,
    /// On a port each, with TLS and a key each.
    Tcp(TcpListen),
    /// On a port each, by iSCSI, with a key each and without encryption.
    Iscsi(TcpListen),
}

/// Where exports listen over TCP, and what borrowers are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpListen {
    /// The address.
    pub ip: IpAddr,
    /// What borrowers are told instead.
    pub announce: Option<IpAddr>,
    /// First and last port; `None`: any that the kernel has free.
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

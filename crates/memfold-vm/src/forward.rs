//! Parses and checks the ports of the host that QEMU's user-mode network forwards into a guest.
//! Only one process of the host can listen on each port.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A host port that QEMU forwards to a port of the guest, written
/// `[tcp:|udp:][ADDRESS:]PORT:GUEST-PORT`. Host port 0 stands for any free port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Forward {
    is_udp: bool,
    /// Host address; 127.0.0.1 by default.
    address: Ipv4Addr,
    host: u16,
    guest: u16,
}

impl Forward {
    /// Parses a rule in QEMU's `hostfwd` syntax, `tcp:ADDRESS:PORT-ADDRESS:PORT`; `None` if the
    /// text is not such a rule.
    #[must_use]
    pub fn of_rule(rule: &str) -> Option<Self> {
        let (host, guest) = rule.split_once('-')?;
        let mut parts = host.split(':');
        let is_udp = match parts.next()? {
            "udp" => true,
            "tcp" | "" => false,
            _ => return None,
        };
        let address = match parts.next()? {
            "" => Ipv4Addr::UNSPECIFIED,
            text => text.parse().ok()?,
        };
        let host = parts.next()?.parse().ok()?;
        let (_, guest) = guest.rsplit_once(':')?;
        let guest = guest.parse().ok().filter(|guest| *guest != 0)?;
        parts.next().is_none().then_some(Self {
            is_udp,
            address,
            host,
            guest,
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let (is_udp, rest) = match text.split_once(':')? {
            ("udp", rest) => (true, rest),
            ("tcp", rest) => (false, rest),
            _ => (false, text),
        };
        let (rest, guest) = rest.rsplit_once(':')?;
        let (address, host) = match rest.rsplit_once(':') {
            Some((address, host)) => (address.parse().ok()?, host),
            None => (Ipv4Addr::LOCALHOST, rest),
        };
        Some(Self {
            is_udp,
            address,
            host: host.parse().ok()?,
            guest: guest.parse().ok().filter(|guest| *guest != 0)?,
        })
    }

    /// Returns the forwarded port as a rule in QEMU's `hostfwd` syntax.
    #[must_use]
    pub fn rule(&self) -> String {
        let protocol = if self.is_udp { "udp" } else { "tcp" };
        format!("{protocol}:{}:{}-:{}", self.address, self.host, self.guest)
    }

    /// Checks that the host port is free, by listening on it briefly. Returns the forwarded port,
    /// with a free port in place of host port 0. Fails if another process holds the host port.
    pub fn claim(&self) -> io::Result<Self> {
        let place = SocketAddrV4::new(self.address, self.host);
        let found = if self.is_udp {
            UdpSocket::bind(place)?.local_addr()
        } else {
            TcpListener::bind(place)?.local_addr()
        };
        Ok(Self {
            host: found?.port(),
            ..self.clone()
        })
    }

    /// Returns whether the host port is 0, which stands for any free port.
    #[must_use]
    pub const fn is_any(&self) -> bool {
        self.host == 0
    }
}

impl fmt::Display for Forward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_udp {
            f.write_str("udp:")?;
        }
        write!(f, "{}:{}:{}", self.address, self.host, self.guest)
    }
}

impl FromStr for Forward {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text).ok_or_else(|| {
            format!(
                "'{text}' is not a port to forward; write HOST-PORT:GUEST-PORT, such as 2222:22, 0:22 (any free one), 0.0.0.0:80:80 or udp:5353:53"
            )
        })
    }
}

impl TryFrom<String> for Forward {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Forward> for String {
    fn from(forward: Forward) -> Self {
        forward.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_for_a_forwarded_port_is_parsed_and_printed_back_equal() {
        for (text, shown, rule) in [
            ("2222:22", "127.0.0.1:2222:22", "tcp:127.0.0.1:2222-:22"),
            (
                "tcp:0.0.0.0:80:8080",
                "0.0.0.0:80:8080",
                "tcp:0.0.0.0:80-:8080",
            ),
            ("udp:0:53", "udp:127.0.0.1:0:53", "udp:127.0.0.1:0-:53"),
        ] {
            let forward: Forward = text.parse().unwrap();
            assert_eq!(
                (forward.to_string().as_str(), forward.rule().as_str()),
                (shown, rule)
            );
            assert_eq!(shown.parse(), Ok(forward.clone()));
            assert_eq!(Forward::of_rule(rule), Some(forward));
        }
        let open = Forward::of_rule("tcp::2222-10.0.2.15:22").unwrap();
        assert_eq!(open.to_string(), "0.0.0.0:2222:22");
        for bad in ["", "22", "a:22", "2222:0", "1:2:3:4", "tcp:22", "70000:22"] {
            assert!(
                bad.parse::<Forward>().unwrap_err().contains("2222:22"),
                "{bad}"
            );
        }
        for bad in ["", "tcp:1-:2:3-4", "unix:/a-:2", "tcp:h:1-:2"] {
            assert_eq!(Forward::of_rule(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_port_that_another_process_uses_cannot_be_forwarded() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let taken: Forward = format!("{port}:22").parse().unwrap();
        let error = taken.claim().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        let any: Forward = "0:22".parse().unwrap();
        let found = any.claim().unwrap();
        assert!(any.is_any() && !found.is_any() && found != taken);
    }
}

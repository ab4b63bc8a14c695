//! The network of a VM, as its description names it, and the MAC address of its network card.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::process::boot_id;

/// Longest name of a network interface, in bytes (`IFNAMSIZ` without the final zero).
const MAX_INTERFACE: usize = 15;

/// First three bytes of the MAC addresses of QEMU's network cards. Bit 1 of the first byte says
/// that the address is not a manufacturer's.
const QEMU_PREFIX: [u8; 3] = [0x52, 0x54, 0x00];

/// Which network the guest's network card is connected to. Written as `none`, `user`,
/// `disconnected`, `bridge=NAME` or `macvtap=NAME`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Network {
    /// The guest has no network card.
    #[default]
    None,
    /// The guest has a card in QEMU's user-mode network.
    User,
    /// The guest has a card that is connected to nothing: for a VM that was restored on a host
    /// without the saved VM's bridge.
    Disconnected,
    /// The guest has a card in the host's bridge of this name, through a tap that exists as long as
    /// the VM.
    Bridge(String),
    /// The guest has a card in the network of the host's interface of this name, through a macvtap
    /// that exists as long as the VM.
    Macvtap(String),
}

impl Network {
    /// Returns whether the guest's card needs a tap, and a MAC address of its own.
    #[must_use]
    pub const fn needs_tap(&self) -> bool {
        matches!(
            self,
            Self::Disconnected | Self::Bridge(_) | Self::Macvtap(_)
        )
    }

    /// Returns the name of the host's bridge or interface that the network uses.
    #[must_use]
    pub fn interface(&self) -> Option<&str> {
        match self {
            Self::Bridge(name) | Self::Macvtap(name) => Some(name),
            _ => None,
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::User => f.write_str("user"),
            Self::Disconnected => f.write_str("disconnected"),
            Self::Bridge(name) => write!(f, "bridge={name}"),
            Self::Macvtap(name) => write!(f, "macvtap={name}"),
        }
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            None if text == "none" => Ok(Self::None),
            None if text == "user" => Ok(Self::User),
            None if text == "disconnected" => Ok(Self::Disconnected),
            Some(("bridge", name)) => Ok(Self::Bridge(interface(name)?)),
            Some(("macvtap", name)) => Ok(Self::Macvtap(interface(name)?)),
            _ => Err(format!(
                "'{text}' is not a network; write none, user, disconnected, bridge=NAME or macvtap=NAME"
            )),
        }
    }
}

impl TryFrom<String> for Network {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Network> for String {
    fn from(network: Network) -> Self {
        network.to_string()
    }
}

/// Checks the name of a network interface as the kernel does (`dev_valid_name`). A name must not
/// look like an option of `ip` either.
fn interface(name: &str) -> Result<String, String> {
    let is_good = (1..=MAX_INTERFACE).contains(&name.len())
        && !name.starts_with(['-', '.'])
        && name
            .chars()
            .all(|c| c.is_ascii_graphic() && !"/:,%\"\\".contains(c));
    is_good.then(|| name.to_owned()).ok_or_else(|| {
        format!("'{name}' cannot be the name of a network interface (1 to {MAX_INTERFACE} letters, digits and ._-)")
    })
}

/// MAC address of a VM's network card, written as six hexadecimal bytes: `52:54:00:12:34:56`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress([u8; 6]);

impl MacAddress {
    /// Returns the address of the VM `name` on this host: always the same for the same name, and
    /// another one on another host. It is computed from the name and the host's machine ID
    /// (`machine-id(5)`), or the boot ID if there is none.
    #[must_use]
    pub fn of_vm(name: &str) -> Self {
        Self::of_hash(hash_on_this_host("network card", name))
    }

    fn of_hash(hash: u64) -> Self {
        let mut bytes = hash.to_be_bytes();
        bytes[2..5].copy_from_slice(&QEMU_PREFIX);
        let [_, _, address @ ..] = bytes;
        Self(address)
    }

    /// Returns the last three bytes of the address as a number.
    #[must_use]
    pub fn last_bytes(self) -> u32 {
        let [_, _, _, a, b, c] = self.0;
        u32::from_be_bytes([0, a, b, c])
    }

    /// Returns the address for the host's end of the card's tap. It begins with `fe`: a bridge
    /// takes over the lowest address of its ports, and must not change it for a VM.
    #[must_use]
    pub fn of_tap(self) -> Self {
        let mut bytes = self.0;
        bytes[0] = 0xfe;
        Self(bytes)
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.map(|byte| format!("{byte:02x}"));
        f.write_str(&bytes.join(":"))
    }
}

impl FromStr for MacAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        let mut is_good = true;
        for byte in &mut bytes {
            let part = parts.next().unwrap_or_default();
            let digits = part.len() == 2 && part.bytes().all(|c| c.is_ascii_hexdigit());
            *byte = u8::from_str_radix(part, 16).unwrap_or_default();
            is_good &= digits;
        }
        // Bit 0 of the first byte marks addresses of groups, which no card can have.
        if !is_good || parts.next().is_some() || bytes[0] & 1 == 1 || bytes == [0; 6] {
            return Err(format!(
                "'{text}' is not the MAC address of a network card; write six bytes such as 52:54:00:12:34:56, the first of them even"
            ));
        }
        Ok(Self(bytes))
    }
}

impl TryFrom<String> for MacAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<MacAddress> for String {
    fn from(address: MacAddress) -> Self {
        address.to_string()
    }
}

/// Returns a number that is always the same for this host, this purpose and this name of a VM.
pub(super) fn hash_on_this_host(purpose: &str, name: &str) -> u64 {
    let host = std::fs::read_to_string("/etc/machine-id").unwrap_or_else(|_| boot_id());
    hash_on(host.trim(), purpose, name)
}

fn hash_on(host: &str, purpose: &str, name: &str) -> u64 {
    xxh3_64(format!("memfold {purpose}\0{host}\0{name}").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_for_a_network_is_parsed_and_printed_back_equal() {
        for text in [
            "none",
            "user",
            "disconnected",
            "bridge=br0",
            "macvtap=enp3s0.7",
        ] {
            let network: Network = text.parse().unwrap();
            assert_eq!(network.to_string(), text);
        }
        let long = format!("bridge={}", "x".repeat(16));
        for bad in [
            "",
            "bridge",
            "bridge=",
            "bridge=-h",
            "bridge=..",
            "bridge=a/b",
            "bridge=a,b",
            "bridge=a b",
            "tap=x",
            "user=1",
            &long,
        ] {
            assert!(bad.parse::<Network>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_mac_address_of_a_vm_is_stable_and_differs_between_names_and_hosts() {
        let of = |host, name| MacAddress::of_hash(hash_on(host, "card", name));
        let web = of("1234", "web");
        assert_eq!(web, of("1234", "web"));
        assert_ne!(web, of("1234", "web2"));
        assert_ne!(web, of("1235", "web"));
        assert!(web.to_string().starts_with("52:54:00:"));
        let tail = format!("52:54:00:{:06x}", web.last_bytes());
        assert_eq!(web.to_string().replace(':', ""), tail.replace(':', ""));
        assert!(web.of_tap().to_string().starts_with("fe:54:00:"));
    }

    #[test]
    fn a_mac_address_is_parsed_and_printed_back_equal() {
        let text = "52:54:00:ab:cd:ef";
        assert_eq!(text.parse::<MacAddress>().unwrap().to_string(), text);
        for bad in [
            "",
            "52:54:00:ab:cd",
            "52:54:00:ab:cd:ef:01",
            "53:54:00:ab:cd:ef",
            "52:54:00:ab:cd:+f",
            "52-54-00-ab-cd-ef",
            "00:00:00:00:00:00",
        ] {
            let error = bad.parse::<MacAddress>().unwrap_err();
            assert!(error.contains("52:54:00:12:34:56"), "{error}");
        }
    }
}

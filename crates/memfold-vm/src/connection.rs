//! Connects the network card of a VM to a bridge or an interface of the host.
//!
//! ```text
//!   bridge=br0      tap memfoldN, port of br0       QEMU has its only descriptor: the tap ends with QEMU
//!   macvtap=eth0    macvtap mf-XXXXXXXX over eth0   QEMU has its character device; the file `macvtap` in the
//!                                                   VM's directory names it, and it is removed with that directory
//! ```
//! QEMU gets an open descriptor, so it needs no rights of its own. All interfaces are in the
//! daemon's network namespace. The program `ip` makes and changes them.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use memfold_host::helper;
use memfold_sys::tap;
use serde::Deserialize;

use super::network::{MacAddress, Network};
use super::overlay;

/// Longest time for one run of `ip`.
const LIMIT: Duration = Duration::from_secs(10);

/// Longest time until the device file of a new macvtap exists.
const DEVICE_LIMIT: Duration = Duration::from_secs(5);

/// Pattern for the names of taps; the kernel replaces `%d` by a number.
const TAP: &str = "memfold%d";

/// Why a VM's network card cannot be connected.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum ConnectionError {
    #[error(
        "bridge '{name}' does not exist; create it (ip link add {name} type bridge; ip link set {name} up), or name another one"
    )]
    NoBridge { name: String },
    #[error("interface '{name}' does not exist; 'ip link' lists the interfaces of this host")]
    NoInterface { name: String },
    #[error(
        "'{name}' is not a bridge of the kernel ({kind}); name a bridge, use network = \"macvtap={name}\", or pass a -netdev of your own to QEMU (qemu_args)"
    )]
    NotABridge { name: String, kind: String },
    #[error("cannot run the program 'ip'; install the package iproute2")]
    NoProgram(#[source] io::Error),
    #[error(
        "cannot create a tap; the daemon needs the right CAP_NET_ADMIN, and the kernel /dev/net/tun"
    )]
    Tap(#[source] io::Error),
    #[error("'ip {arguments}' failed: {said}")]
    Failed { arguments: String, said: String },
    #[error(
        "cannot bring up a macvtap over '{name}': {said}; if another VM with the MAC address {address} uses '{name}', stop it, or set another 'mac'"
    )]
    Up {
        name: String,
        address: MacAddress,
        said: String,
    },
    #[error("cannot open the device file of the VM's macvtap {path}; udev or devtmpfs makes it")]
    Device {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot record the name of the VM's macvtap in its directory")]
    Note(#[source] io::Error),
}

/// What `ip -j -d link show` says of an interface.
#[derive(Debug, Deserialize)]
struct Link {
    ifindex: u32,
    mtu: u32,
    #[serde(default)]
    linkinfo: Option<LinkInfo>,
}

#[derive(Debug, Deserialize)]
struct LinkInfo {
    #[serde(default)]
    info_kind: String,
}

/// Checks that the bridge or interface of `network` exists, and that it is of the right kind.
pub fn check(network: &Network) -> Result<(), ConnectionError> {
    if let Network::Bridge(name) = network {
        find_bridge(name)?;
    }
    if let Network::Macvtap(name) = network {
        find_interface(name)?;
    }
    Ok(())
}

/// Connects the card of a VM. Returns the descriptor for QEMU; `None` if the network needs no tap.
/// `note`: file that will name the VM's macvtap.
pub(super) fn connect(
    network: &Network,
    address: MacAddress,
    note: &Path,
) -> Result<Option<OwnedFd>, ConnectionError> {
    match network {
        Network::None | Network::User => Ok(None),
        Network::Disconnected => {
            let (tap, _) = tap::create(TAP).map_err(ConnectionError::Tap)?;
            Ok(Some(tap))
        }
        Network::Bridge(name) => {
            let bridge = find_bridge(name)?;
            let (tap, port) = tap::create(TAP).map_err(ConnectionError::Tap)?;
            // With another MTU, the bridge would take over the MTU of the tap.
            let (address, mtu) = (address.of_tap().to_string(), bridge.mtu.to_string());
            ip(&[
                "link", "set", "dev", &port, "address", &address, "mtu", &mtu, "master", name, "up",
            ])?;
            Ok(Some(tap))
        }
        Network::Macvtap(name) => make_macvtap(name, address, note).map(Some),
    }
}

fn make_macvtap(name: &str, address: MacAddress, note: &Path) -> Result<OwnedFd, ConnectionError> {
    find_interface(name)?;
    #[allow(clippy::cast_possible_truncation)] // the last bits differ the most
    let own = format!("mf-{:08x}", overlay::unique() as u32);
    // This process may die at any moment, so the name is recorded before the interface is made.
    std::fs::write(note, &own).map_err(ConnectionError::Note)?;
    let text = address.to_string();
    ip(&[
        "link", "add", "link", name, "name", &own, "address", &text, "type", "macvtap", "mode",
        "bridge",
    ])?;
    let up = ip(&["link", "set", "dev", &own, "up"]);
    up.map_err(|error| match error {
        ConnectionError::Failed { said, .. } => ConnectionError::Up {
            name: name.to_owned(),
            address,
            said,
        },
        other => other,
    })?;
    open_device(&own, find_interface(&own)?.ifindex)
}

/// Opens the character device of a macvtap. Its file may appear a moment after the interface. A
/// file of the same name can belong to another network namespace, so the number is compared.
fn open_device(name: &str, index: u32) -> Result<OwnedFd, ConnectionError> {
    let path = format!("/dev/tap{index}");
    let number = format!("/sys/class/net/{name}/tap{index}/dev");
    let end = std::time::Instant::now() + DEVICE_LIMIT;
    loop {
        match try_open(Path::new(&path), Path::new(&number)) {
            Ok(device) => return Ok(device.into()),
            Err(_) if std::time::Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(source) => return Err(ConnectionError::Device { path, source }),
        }
    }
}

fn try_open(path: &Path, number: &Path) -> io::Result<File> {
    let device = File::options().read(true).write(true).open(path)?;
    let is = device.metadata()?.rdev();
    let is = format!("{}:{}", rustix::fs::major(is), rustix::fs::minor(is));
    let should_be = std::fs::read_to_string(number)?;
    if is != should_be.trim() {
        let why = format!("it is device {is}, not {}", should_be.trim());
        return Err(io::Error::other(why));
    }
    Ok(device)
}

/// Removes the macvtap of an ended VM that the file `note` names. Does nothing without that file,
/// or the second time.
pub(super) fn remove(note: &Path) -> io::Result<()> {
    let Ok(name) = std::fs::read_to_string(note) else {
        return Ok(());
    };
    // The daemon was killed, or the file system was full, before the interface was made.
    if name.is_empty() {
        return Ok(());
    }
    match find(&name) {
        Ok(None) => Ok(()),
        Ok(Some(_)) => ip(&["link", "delete", "dev", &name]).map(drop),
        Err(error) => Err(error),
    }
    .map_err(io::Error::other)
}

fn find_bridge(name: &str) -> Result<Link, ConnectionError> {
    let bridge = find(name)?;
    let bridge = bridge.ok_or_else(|| ConnectionError::NoBridge { name: name.into() })?;
    let kind = bridge.linkinfo.as_ref().map(|info| info.info_kind.as_str());
    match kind {
        Some("bridge") => Ok(bridge),
        other => Err(ConnectionError::NotABridge {
            name: name.into(),
            kind: other.unwrap_or("a network card").to_owned(),
        }),
    }
}

fn find_interface(name: &str) -> Result<Link, ConnectionError> {
    find(name)?.ok_or_else(|| ConnectionError::NoInterface { name: name.into() })
}

fn find(name: &str) -> Result<Option<Link>, ConnectionError> {
    let said = match ip(&["-j", "-d", "link", "show", "dev", name]) {
        Err(ConnectionError::Failed { said, .. }) if said.contains("does not exist") => {
            return Ok(None);
        }
        said => said?,
    };
    // `ip` ends a list with an empty object for each interface that it leaves out.
    let links: Vec<serde_json::Value> = serde_json::from_slice(&said).unwrap_or_default();
    let mut links = links
        .into_iter()
        .filter_map(|link| serde_json::from_value(link).ok());
    Ok(links.next())
}

/// Runs `ip` and returns its output.
fn ip(arguments: &[&str]) -> Result<Vec<u8>, ConnectionError> {
    let mut command = Command::new("ip");
    command
        .args(arguments)
        .stdin(Stdio::null())
        .env("LC_ALL", "C");
    let output = helper::output(&mut command, LIMIT).map_err(ConnectionError::NoProgram)?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let arguments = arguments.join(" ");
    Err(ConnectionError::Failed { arguments, said })
}

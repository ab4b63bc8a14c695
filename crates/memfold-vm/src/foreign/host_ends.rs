//! Finds options on a QEMU command line that claim a resource of the host which only one process
//! can have: ports, sockets, displays, taps. A second QEMU with this command line must not claim
//! them.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::network;
use super::options::{self, Named};
use super::value::{Value, parse};
use crate::forward::Forward;
use crate::qemu_line::escape_text;

/// Options whose whole value is a character device.
const CHARACTER: [&str; 6] = [
    "debugcon",
    "monitor",
    "parallel",
    "qmp",
    "qmp-pretty",
    "serial",
];

/// Returns the host resources that an option claims, as text.
pub(super) fn told(name: &str, text: &str) -> Result<Vec<String>, String> {
    let first = |text: &str| text.split(',').next().unwrap_or_default().to_owned();
    let leads_out = |text: &str| {
        let text = text.strip_prefix("mon:").unwrap_or(text);
        match text.split_once(':').map_or("", |(kind, _)| kind) {
            "tcp" | "udp" | "telnet" | "tn3270" | "websocket" | "unix" | "pipe" | "file" => true,
            _ => text.starts_with("/dev/") || text.starts_with("pty"),
        }
    };
    let found = match name {
        "vnc" | "gdb" => (!text.starts_with("none")).then(|| format!("-{name} {}", first(text))),
        "s" => Some("-gdb tcp::1234".to_owned()),
        "display" => {
            let kind = if text.starts_with('{') {
                parse("type", text)?.kind().to_owned()
            } else {
                // The value may be just an address, such as `vnc=:1`.
                text.split([',', '=']).next().unwrap_or_default().to_owned()
            };
            let is_served =
                kind.starts_with("vnc") || ["dbus", "spice-app"].contains(&kind.as_str());
            is_served.then(|| format!("-display {kind}"))
        }
        "spice" => {
            let spice = parse("", text)?;
            let named = ["port", "tls-port", "unix", "addr"];
            let named = named.iter().filter(|key| spice.get(key).is_some());
            let named = named.map(|key| format!("{key}={}", spice.text(key)));
            Some(format!("-spice {}", named.collect::<Vec<_>>().join(",")))
        }
        "chardev" => {
            let chardev = parse("backend", text)?;
            let named = ["path", "port", "fd", "name"];
            let named = named.iter().find(|key| !chardev.text(key).is_empty());
            named.map(|key| {
                let (kind, place) = (chardev.kind(), chardev.text(key));
                format!("chardev '{}' ({kind} {key}={place})", chardev.text("id"))
            })
        }
        "netdev" | "nic" | "net" => {
            let (_, left) = network::copy(name, text)?;
            let id = match parse("type", text)?.text("id") {
                id if id.is_empty() => format!("-{name}"),
                id => format!("network {id}"),
            };
            return Ok(left.into_iter().map(|end| format!("{id}: {end}")).collect());
        }
        "device" => {
            let device = parse("driver", text)?;
            let is_vsock = device.kind().starts_with("vhost-vsock");
            is_vsock.then(|| format!("{} guest-cid={}", device.kind(), device.text("guest-cid")))
        }
        name if CHARACTER.contains(&name) => {
            leads_out(text).then(|| format!("-{name} {}", first(text)))
        }
        _ => None,
    };
    Ok(found.into_iter().collect())
}

/// Returns the settings in an option that say how the host provides RAM, as text. The copy leaves
/// them out, because a VM that runs from a snapshot maps its RAM from the snapshot.
pub(super) fn of_ram(name: &str, text: &str) -> Result<Option<String>, String> {
    Ok(match name {
        "mem-prealloc" => Some("-mem-prealloc (RAM is not filled at the start)".to_owned()),
        "overcommit" if parse("", text)?.is_on("mem-lock") => {
            Some("-overcommit mem-lock=on (RAM is not locked)".to_owned())
        }
        "object" => {
            let object = parse("qom-type", text)?;
            let is_filled =
                object.kind().starts_with("memory-backend-") && object.is_on("prealloc");
            is_filled.then(|| {
                let id = object.text("id");
                format!("prealloc=on of memory '{id}' (RAM is not filled at the start)")
            })
        }
        _ => None,
    })
}

/// Returns the host resources that a user's additional QEMU arguments claim (ports, sockets,
/// displays), each as text.
#[must_use]
pub fn of_arguments(arguments: &[String]) -> Vec<String> {
    let named = read(arguments).unwrap_or_default().into_iter();
    let told = named.map(|(name, value)| told(&name, &value.unwrap_or_default()));
    told.flat_map(Result::unwrap_or_default).collect()
}

/// Changes additional QEMU arguments so that they no longer claim a host resource (port, socket,
/// tap) which another process holds now. Returns the claims that were removed, each as text.
pub fn leave_out_taken(arguments: &mut Vec<String>) -> Vec<String> {
    let mut left = Vec::new();
    // Arguments that cannot be parsed stay unchanged; QEMU then reports the error.
    let Some(named) = read(arguments) else {
        return left;
    };
    let mut kept = Vec::new();
    for (name, value) in named {
        let text = value.as_deref().unwrap_or_default();
        let other = without_taken(&name, text, &mut left);
        kept.extend(other.unwrap_or_else(|| words(&name, value)));
    }
    if !left.is_empty() {
        *arguments = kept;
    }
    left
}

fn read(arguments: &[String]) -> Option<Vec<Named>> {
    let line = std::iter::once(String::new()).chain(arguments.iter().cloned());
    options::read(&line.collect::<Vec<_>>()).ok()
}

fn words(name: &str, value: Option<String>) -> Vec<String> {
    std::iter::once(format!("-{name}")).chain(value).collect()
}

/// Returns what replaces an option that claims a resource which another process holds; `None` if it
/// claims no such resource.
fn without_taken(name: &str, text: &str, left: &mut Vec<String>) -> Option<Vec<String>> {
    let is_taken = match name {
        "netdev" | "nic" | "net" => {
            let net = network_without_taken(text, left)?;
            return Some(words(name, Some(net)));
        }
        "s" => is_tcp_taken("", "1234"),
        "chardev" => is_chardev_taken(&Value::parse("backend", text)?),
        "vnc" | "gdb" => is_place_taken(name, text),
        name => CHARACTER.contains(&name) && is_place_taken(name, text),
    };
    if !is_taken {
        return None;
    }
    left.extend(told(name, text).ok()?);
    Some(match name {
        "serial" | "parallel" | "debugcon" => words(name, Some("null".to_owned())),
        "chardev" => words(name, Some(null_chardev(&Value::parse("backend", text)?))),
        _ => Vec::new(),
    })
}

fn network_without_taken(text: &str, left: &mut Vec<String>) -> Option<String> {
    let mut net = Value::parse("type", text)?;
    let rules = net.all("hostfwd");
    let is_in_use = |error: std::io::Error| error.kind() == ErrorKind::AddrInUse;
    let is_taken = |rule: &&String| {
        Forward::of_rule(rule).is_some_and(|port| port.claim().is_err_and(is_in_use))
    };
    let (taken, free): (Vec<&String>, Vec<&String>) = rules.iter().partition(is_taken);
    let tap = net.get("ifname").filter(|_| net.kind() == "tap");
    let tap = tap.filter(|tap| is_tap_taken(tap)).map(str::to_owned);
    if taken.is_empty() && tap.is_none() {
        return None;
    }
    left.extend(taken.iter().map(|rule| format!("hostfwd={rule}")));
    if let Some(tap) = tap {
        left.push(format!("tap ifname={tap} (the kernel has named the tap)"));
        net.drop_keys(|key| key == "ifname");
    }
    net.drop_keys(|key| key == "hostfwd");
    for rule in free {
        net.push("hostfwd", rule);
    }
    Some(net.render())
}

fn is_chardev_taken(chardev: &Value) -> bool {
    let is_server = chardev.kind() == "socket" && chardev.is_on("server");
    is_server
        && match chardev.get("path") {
            Some(path) => is_unix_taken(path),
            None => is_tcp_taken(&chardev.text("host"), &chardev.text("port")),
        }
}

/// Returns whether another process holds the address that an option listens on: `:1` (VNC),
/// `unix:PATH,server`, `tcp:HOST:PORT,server`.
fn is_place_taken(name: &str, text: &str) -> bool {
    let text = text.strip_prefix("mon:").unwrap_or(text);
    let mut parts = text.split(',');
    let place = parts.next().unwrap_or_default();
    let is_server =
        ["vnc", "gdb"].contains(&name) || parts.any(|part| ["server", "server=on"].contains(&part));
    if !is_server {
        return false;
    }
    if let Some(path) = place.strip_prefix("unix:") {
        return is_unix_taken(path);
    }
    let place = if name == "vnc" {
        Some(place)
    } else {
        place.split_once(':').map(|(_, place)| place)
    };
    let Some((host, port)) = place.and_then(|place| place.rsplit_once(':')) else {
        return false;
    };
    match (name, port.parse::<u16>()) {
        ("vnc", Ok(display)) => is_tcp_taken(host, &(5900 + u32::from(display)).to_string()),
        _ => is_tcp_taken(host, port),
    }
}

fn is_tcp_taken(host: &str, port: &str) -> bool {
    let Ok(port) = port.parse::<u16>() else {
        return false;
    };
    let host = if host.is_empty() { "0.0.0.0" } else { host };
    TcpListener::bind((host, port)).is_err_and(|error| error.kind() == ErrorKind::AddrInUse)
}

/// Returns whether a process of this network namespace has a tap of this name open. The kernel
/// shows the name in the `fdinfo` of each open `/dev/net/tun` (`tun_chr_show_fdinfo`).
fn is_tap_taken(name: &str) -> bool {
    let network = |process: &Path| std::fs::read_link(process.join("ns/net")).ok();
    let own = network(Path::new("/proc/self"));
    let has_it = |process: &Path| {
        let descriptors = std::fs::read_dir(process.join("fd"));
        descriptors.into_iter().flatten().flatten().any(|entry| {
            let is_tun =
                std::fs::read_link(entry.path()).is_ok_and(|to| to == Path::new("/dev/net/tun"));
            let facts = process.join("fdinfo").join(entry.file_name());
            is_tun && std::fs::read_to_string(facts).is_ok_and(|facts| is_tap_of(&facts, name))
        })
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut processes = processes.map(|entry| entry.path());
    processes.any(|process| network(&process) == own && has_it(&process))
}

fn is_tap_of(facts: &str, name: &str) -> bool {
    let mut lines = facts.lines();
    lines.any(|line| line.strip_prefix("iff:").map(str::trim) == Some(name))
}

/// Returns whether a process listens on a Unix socket. QEMU would replace the socket by its own.
fn is_unix_taken(path: &str) -> bool {
    UnixStream::connect(Path::new(path)).is_ok()
}

/// Returns a null character device with the name of `chardev`.
pub(crate) fn null_chardev(chardev: &Value) -> String {
    let shared = if chardev.is_on("mux") { ",mux=on" } else { "" };
    format!("null,id={}{shared}", escape_text(&chardev.text("id")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_copied_vm_loses_sockets_and_ports_that_another_process_uses_and_they_are_named() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name).display().to_string();
        let _listens = UnixListener::bind(path("taken")).unwrap();
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let taken = other.local_addr().unwrap().port();
        let free = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let text = format!(
            "-netdev user,id=n,hostfwd=tcp:127.0.0.1:{taken}-:22,hostfwd=tcp:127.0.0.1:{free}-:80 -device e1000,netdev=n \
             -qmp unix:{0},server=on,wait=off -qmp unix:{1},server=on,wait=off -serial tcp:127.0.0.1:{taken},server=on \
             -chardev socket,id=c,path={0},server=on,wait=off -gdb tcp:127.0.0.1:{taken} -gdb tcp:127.0.0.1:{free} -S",
            path("taken"),
            path("free"),
        );
        let mut arguments: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        let left = leave_out_taken(&mut arguments);
        let wanted = format!(
            "-netdev user,hostfwd=tcp:127.0.0.1:{free}-:80,id=n -device e1000,netdev=n -qmp unix:{},server=on,wait=off -serial null \
             -chardev null,id=c -gdb tcp:127.0.0.1:{free} -S",
            path("free")
        );
        assert_eq!(arguments.join(" "), wanted);
        assert_eq!(left.len(), 5, "{left:?}");
        assert!(left[0].contains(&taken.to_string()), "{left:?}");
        // A save reports all claims.
        let told = of_arguments(&arguments);
        assert_eq!(told.len(), 3, "{told:?}");
        let vsock = ["-device", "vhost-vsock-pci,guest-cid=7"].map(str::to_owned);
        assert_eq!(of_arguments(&vsock), ["vhost-vsock-pci guest-cid=7"]);
        // Arguments that memfold does not know stay, so that QEMU judges them.
        let mut strange = vec!["-brand-new".to_owned()];
        assert_eq!(
            (leave_out_taken(&mut strange), strange.len()),
            (Vec::new(), 1)
        );
    }
}

//! Rewrites the network options of a QEMU command line for a second QEMU, which runs a snapshot of
//! the first one's VM. The guest's network card works as before, but its backend uses no resource
//! of the host.
//!
//! The saved state of a network card contains two properties of its backend: whether packets carry
//! offload headers (those of taps do), and the number of queues. So the second QEMU's backend must
//! have the same two properties.

use super::value::{Value, parse};

/// Keys of network options that use a resource of the host which no second QEMU can have.
const OF_THE_HOST: [&str; 6] = [
    "hostfwd",
    "guestfwd",
    "smb",
    "smbserver",
    "tftp",
    "bootfile",
];

/// Keys that are valid for every kind of network backend.
const COMMON: [&str; 6] = ["id", "model", "mac", "macaddr", "name", "netdev"];

/// Returns a network option for the copy, and the host resources that were left out of it, as text.
pub(super) fn copy(option: &str, value: &str) -> Result<(String, Vec<String>), String> {
    let mut net = parse("type", value)?;
    let kind = net.kind().to_owned();
    let mut left = Vec::new();
    match kind.as_str() {
        "none" | "hubport" => {}
        // A network card, made by the old option `-net`.
        "nic" if option == "net" => {}
        "user" => {
            for key in OF_THE_HOST {
                left.extend(net.all(key).iter().map(|rule| format!("{key}={rule}")));
            }
            net.drop_keys(|key| OF_THE_HOST.contains(&key));
        }
        _ => {
            left.push(host_end(&kind, &net));
            let queues = queues(&net);
            net.drop_keys(|key| !COMMON.contains(&key));
            // Packets of these backends have offload headers.
            if ["tap", "bridge", "vhost-user", "vhost-vdpa"].contains(&kind.as_str()) {
                for (key, value) in [("type", "tap"), ("script", "no"), ("downscript", "no")] {
                    net.set(key, value);
                }
                if queues > 1 {
                    net.set_typed("queues", queues, &queues.to_string());
                }
            } else {
                net.set("type", "user");
                net.set_typed("restrict", true, "on");
            }
        }
    }
    Ok((net.render(), left))
}

/// Returns the number of queue pairs of a network backend.
fn queues(net: &Value) -> u64 {
    // libvirt passes a list of file descriptors, one for each queue pair.
    let fds = net.text("fds");
    if fds.is_empty() {
        return net.text("queues").parse().unwrap_or(1);
    }
    u64::try_from(fds.split(':').count()).unwrap_or(1)
}

/// Describes the host's side of a network backend, as text.
fn host_end(kind: &str, net: &Value) -> String {
    let named = ["ifname", "br", "path", "connect", "listen", "mcast", "udp"];
    let mut named = named
        .iter()
        .filter_map(|key| Some(format!(" {key}={}", net.get(key)?)));
    let named = named.next();
    format!("{kind}{}", named.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copied_vm_has_a_network_backend_that_looks_the_same_to_its_network_card() {
        for (option, value, wanted) in [
            (
                "netdev",
                "user,id=n,net=10.1.0.0/16,hostfwd=tcp::1-:1,hostfwd=tcp::2-:2",
                "user,id=n,net=10.1.0.0/16",
            ),
            (
                "netdev",
                "tap,id=n,queues=4,ifname=t0,script=/up,vhost=on",
                "tap,downscript=no,id=n,queues=4,script=no",
            ),
            (
                "netdev",
                "tap,id=n,fds=3:4,vhostfds=5:6,vhost=on",
                "tap,downscript=no,id=n,queues=2,script=no",
            ),
            (
                "netdev",
                "bridge,id=n,br=b0",
                "tap,downscript=no,id=n,script=no",
            ),
            (
                "netdev",
                "vhost-user,id=n,chardev=c,queues=2",
                "tap,downscript=no,id=n,queues=2,script=no",
            ),
            ("netdev", "hubport,id=n,hubid=0", "hubport,hubid=0,id=n"),
            (
                "netdev",
                r#"{"type":"socket","id":"n","mcast":"230.0.0.1:1"}"#,
                r#"{"id":"n","restrict":true,"type":"user"}"#,
            ),
            (
                "netdev",
                r#"{"type":"tap","id":"n","queues":2,"vhost":true}"#,
                r#"{"downscript":"no","id":"n","queues":2,"script":"no","type":"tap"}"#,
            ),
            (
                "netdev",
                r#"{"type":"stream","id":"n","server":false,"addr":{"type":"unix","path":"/p"}}"#,
                r#"{"id":"n","restrict":true,"type":"user"}"#,
            ),
            (
                "nic",
                "tap,model=e1000,mac=52:54:00:00:00:01,ifname=t",
                "tap,downscript=no,mac=52:54:00:00:00:01,model=e1000,script=no",
            ),
            ("nic", "none", "none"),
            (
                "net",
                "nic,model=rtl8139,macaddr=52:54:00:00:00:01",
                "nic,macaddr=52:54:00:00:00:01,model=rtl8139",
            ),
            ("net", "user,hostfwd=tcp::1-:1", "user"),
        ] {
            assert_eq!(copy(option, value).unwrap().0, wanted, "{value}");
        }
    }

    #[test]
    fn ports_and_interfaces_left_out_of_a_copied_network_backend_are_named() {
        let left = |value: &str| copy("netdev", value).unwrap().1.join("; ");
        assert_eq!(
            left("user,id=n,hostfwd=tcp::1-:1,hostfwd=tcp::2-:2,tftp=/t"),
            "hostfwd=tcp::1-:1; hostfwd=tcp::2-:2; tftp=/t"
        );
        let json = r#"{"type":"user","id":"n","hostfwd":[{"str":"tcp::1-:1"}]}"#;
        assert_eq!(left(json), "hostfwd=tcp::1-:1");
        assert_eq!(left("tap,id=n,ifname=tap7"), "tap ifname=tap7");
        assert_eq!(left("user,id=n"), "");
    }
}

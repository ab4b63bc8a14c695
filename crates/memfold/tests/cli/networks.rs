//! Tests of VMs in a bridge and behind a macvtap. Bridges and interfaces are in a network namespace
//! of the test's own.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use memfold_testkit::skip;
use serde_json::{Value, json};

use super::support::{Daemon, code, err, refused, wait};

/// Number of namespaces that tests of this process have made.
static NAMESPACES: AtomicU32 = AtomicU32::new(0);

/// A network namespace with the bridge `br-test` and the interface `eth-test`.
struct Namespace(String);

impl Namespace {
    /// Returns `None` if this host does not allow one.
    fn create() -> Option<Self> {
        // Tests of one process may run at the same time.
        let number = NAMESPACES.fetch_add(1, Ordering::Relaxed);
        let namespace = Self(format!("mf{}-{number}", std::process::id()));
        let made = Command::new("ip")
            .args(["netns", "add", &namespace.0])
            .output();
        if !made.is_ok_and(|made| made.status.success()) {
            return None;
        }
        namespace.ip("link add br-test type bridge");
        namespace.ip("link set br-test up mtu 1400");
        namespace.ip("link add eth-test type veth peer name eth-peer");
        namespace.ip("link set eth-test up");
        Some(namespace)
    }

    /// Runs `ip` in the namespace and returns its output.
    #[track_caller]
    fn ip(&self, words: &str) -> String {
        let mut command = Command::new("ip");
        let output = command
            .args(["-n", &self.0])
            .args(words.split(' '))
            .output();
        let output = output.unwrap();
        assert!(output.status.success(), "{words}: {}", err(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    fn links(&self) -> Vec<Value> {
        serde_json::from_str(&self.ip("-j -d link show")).unwrap()
    }

    /// Returns the interfaces that memfold has made: taps in the bridge, and macvtaps.
    fn made(&self) -> Vec<Value> {
        let mut links = self.links();
        links.retain(|link| {
            let name = link["ifname"].as_str().unwrap();
            name.starts_with("memfold") || name.starts_with("mf-")
        });
        links
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).output();
    }
}

/// Returns the MAC address of a VM's network card, as its QEMU has it.
fn mac(daemon: &Daemon, vm: &str) -> String {
    let socket = daemon.state().join(format!("vms/{vm}/qmp.sock"));
    let mut monitor =
        memfold_vm::Qmp::connect(&socket, std::time::Duration::from_secs(20)).unwrap();
    let text = monitor.human("info network").unwrap();
    let (_, rest) = text
        .split_once("macaddr=")
        .unwrap_or_else(|| panic!("{text}"));
    rest.split([',', '\r', '\n']).next().unwrap().to_owned()
}

fn stop(daemon: &Daemon, vm: &str) {
    let output = daemon.run(&["vm", "stop", vm, "--timeout", "0"]);
    assert_eq!(code(&output), 0, "{}", err(&output));
}

fn run<'a>(name: &'a str, network: &'a str) -> [&'a str; 8] {
    [
        "vm",
        "run",
        "--name",
        name,
        "--memory",
        "64M",
        "--network",
        network,
    ]
}

#[test]
fn a_vm_in_a_bridge_has_a_tap_and_a_stable_mac_address_and_its_copies_get_their_own() {
    let Some(host) = Namespace::create() else {
        skip!("only root can make network namespaces");
    };
    let daemon = Daemon::start_in_namespace(&host.0);
    let info = daemon.json(&run("first", "bridge=br-test"));
    let taps = host.made();
    assert_eq!(taps.len(), 1, "{taps:?}");
    let tap = &taps[0];
    assert_eq!(
        (&tap["master"], &tap["mtu"]),
        (&json!("br-test"), &json!(1400))
    );
    let address = mac(&daemon, "first");
    assert_eq!(info["network"], "bridge=br-test");
    assert_eq!(info["mac"], address);
    assert!(address.starts_with("52:54:00:"), "{address}");
    // A bridge takes over the lowest address of its ports, so the tap's address is high.
    assert_eq!(tap["address"], address.replacen("52", "fe", 1));

    daemon.json(&["snapshot", "save", "first", "s", "--keep", "all"]);
    let second = daemon.json(&["snapshot", "restore", "s", "--as", "second", "--force"]);
    assert_eq!(second["left_out"], json!([]));
    let clones = ["clone", "s", "--prefix", "c", "--no-wait", "--force"];
    daemon.json(&clones);
    let ports = host.made();
    assert_eq!(ports.len(), 3, "{ports:?}");
    assert!(
        ports.iter().all(|port| port["master"] == "br-test"),
        "{ports:?}"
    );
    let spec = |vm: &str| -> Value {
        let file = daemon.state().join(format!("vms/{vm}/spec.json"));
        serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
    };
    // A restored VM continues as the saved one, and a clone is another VM.
    assert_eq!(spec("second")["mac"], address);
    assert_ne!(spec("c-1")["mac"], address);

    for vm in ["first", "second", "c-1"] {
        stop(&daemon, vm);
    }
    wait("the taps are gone", || host.made().is_empty());
    daemon.json(&run("first", "bridge=br-test"));
    assert_eq!(mac(&daemon, "first"), address);
    stop(&daemon, "first");

    // Without its bridge, a restored VM runs and says what is missing.
    host.ip("link delete br-test");
    let alone = daemon.json(&["snapshot", "restore", "s", "--as", "first"]);
    let left = alone["left_out"][0].as_str().unwrap();
    assert!(left.contains("bridge 'br-test' does not exist"), "{left}");
    assert_eq!(mac(&daemon, "first"), address);
    assert!(host.made().iter().all(|tap| tap["master"].is_null()));
}

#[test]
fn a_macvtap_of_a_vm_has_the_vms_mac_address_and_ends_with_the_vm_even_without_a_daemon() {
    let Some(host) = Namespace::create() else {
        skip!("only root can make network namespaces");
    };
    let mut daemon = Daemon::start_in_namespace(&host.0);
    let mut arguments = run("web", "macvtap=eth-test").to_vec();
    arguments.extend(["--mac", "52:54:00:00:00:01"]);
    daemon.json(&arguments);
    let made = host.made();
    assert_eq!(made.len(), 1, "{made:?}");
    assert_eq!(made[0]["address"], "52:54:00:00:00:01");
    assert_eq!(made[0]["linkinfo"]["info_kind"], "macvtap");
    assert_eq!(made[0]["link"], "eth-test");
    assert_eq!(mac(&daemon, "web"), "52:54:00:00:00:01");
    // A second VM with this address is refused, and leaves nothing.
    let mut other = run("other", "macvtap=eth-test").to_vec();
    other.extend(["--mac", "52:54:00:00:00:01"]);
    refused(
        &daemon.run(&other),
        1,
        &["'other'", "MAC address 52:54:00:00:00:01", "another 'mac'"],
    );
    assert_eq!(host.made().len(), 1);
    assert!(!daemon.state().join("vms/other").exists());

    // The VM ends while no daemon runs; the next daemon cleans up.
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    memfold_vm::Vm::find(&daemon.state(), "web")
        .unwrap()
        .process()
        .kill()
        .unwrap();
    assert_eq!(host.made().len(), 1);
    daemon.start_again();
    let files = daemon.state().join("vms/web");
    wait("the macvtap and the VM's files are removed", || {
        host.made().is_empty() && !files.exists()
    });
    // A file that names an interface which is gone does not disturb.
    daemon.json(&run("web", "macvtap=eth-test"));
    let name = host.made()[0]["ifname"].as_str().unwrap().to_owned();
    host.ip(&format!("link delete {name}"));
    stop(&daemon, "web");
    wait("the VM's files are removed", || !files.exists());
}

#[test]
fn a_network_that_is_missing_or_of_another_kind_is_refused_with_its_name_and_the_fix() {
    let Some(host) = Namespace::create() else {
        skip!("only root can make network namespaces");
    };
    let daemon = Daemon::start_in_namespace(&host.0);
    for (network, code, words) in [
        (
            "bridge=nowhere",
            1,
            [
                "'nowhere' does not exist",
                "ip link add nowhere type bridge",
            ],
        ),
        (
            "bridge=eth-test",
            1,
            ["'eth-test' is not a bridge", "macvtap=eth-test"],
        ),
        (
            "macvtap=nowhere",
            1,
            ["'nowhere' does not exist", "ip link"],
        ),
        ("bridge=../x", 2, ["'../x'", "network interface"]),
        ("tap=x", 2, ["'tap=x'", "bridge=NAME"]),
    ] {
        refused(&daemon.run(&run("web", network)), code, &words);
    }
    let mut forwards = run("web", "bridge=br-test").to_vec();
    forwards.extend(["--forward", "0:22"]);
    refused(&daemon.run(&forwards), 1, &["user mode"]);
    assert_eq!(daemon.json(&["vm", "list"]), json!([]));
    assert!(host.made().is_empty());
}

//! Test of a guest in a bridge, with a seed disk for cloud-init, and of its clone. The bridge is in
//! a network namespace of the test's own.

use std::fs;
use std::process::Command;
use std::time::Duration;

use memfold_lab::{DiskMode, Lab};
use memfold_testkit::wait_until;
use memfold_units::ByteSize;
use memfold_vm::{CloudInit, MacAddress, Network};
use serde_json::Value;

use crate::served::{Served, exec, succeeds, wait_agent};
use crate::support;

/// Mounts the seed disk, as cloud-init does, and prints one of its files.
const READ_SEED: &str = "set -e; disk=$(blkid -L cidata); mkdir -p /run/seed; mount -o ro $disk /run/seed; \
    trap 'umount /run/seed' EXIT; [ \"$(cat /sys/block/${disk#/dev/}/ro)\" = 1 ]; cat /run/seed/";

struct Namespace(String);

impl Namespace {
    fn create() -> Self {
        let namespace = Self(format!("mfreal{}", std::process::id()));
        ip(&["netns", "add", &namespace.0]);
        for words in [
            "link set lo up",
            "link add br-test type bridge",
            "addr add 10.77.0.1/24 dev br-test",
            "link set br-test up",
        ] {
            let words: Vec<&str> = words.split(' ').collect();
            ip(&[&["-n", &namespace.0], &words[..]].concat());
        }
        namespace
    }

    /// Returns whether a guest's kernel answers to the host: it refuses a connection.
    fn reaches(&self, address: &str) -> bool {
        let connect = format!("exec 3<>/dev/tcp/{address}/9");
        let mut command = Command::new("ip");
        command.args([
            "netns", "exec", &self.0, "timeout", "5", "bash", "-c", &connect,
        ]);
        let output = command.output().unwrap();
        String::from_utf8_lossy(&output.stderr).contains("refused")
    }

    /// Returns the MAC address that the host has seen behind an IP address.
    fn neighbour(&self, address: &str) -> String {
        let show = ["-n", &self.0, "-j", "neigh", "show", address];
        let output = Command::new("ip").args(show).output().unwrap();
        let known: Value = serde_json::from_slice(&output.stdout).unwrap();
        known[0]["lladdr"].as_str().unwrap_or_default().to_owned()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn ip(arguments: &[&str]) {
    assert!(
        Command::new("ip")
            .args(arguments)
            .status()
            .unwrap()
            .success(),
        "{arguments:?}"
    );
}

#[test]
fn a_guest_in_a_bridge_reads_its_seed_disk_and_its_clone_has_its_own_address_and_seed() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let host = Namespace::create();
    let directory = tempfile::Builder::new()
        .prefix("memfold-network.")
        .tempdir()
        .unwrap();
    let state = directory.path();
    let mut served = Served::new(state, &["web", "c-1"]).in_network(&host.0);
    served.start();
    let client = served.answers();
    let user_data = format!("#cloud-config\n# {}\n", "data ".repeat(5000));
    fs::write(state.join("user-data"), &user_data).unwrap();
    fs::write(state.join("key.pub"), "ssh-ed25519 AAAAC3Nza admin\n").unwrap();
    let mut vm = Lab::spec("web", "trixie-a", ByteSize::mib(384), DiskMode::Buffered).unwrap();
    vm.network = Network::Bridge("br-test".into());
    vm.cloud_init = Some(CloudInit {
        user_data: Some(state.join("user-data")),
        ssh_keys: vec![state.join("key.pub")],
        seed: None,
    });
    served.run(&vm);
    wait_agent(&client, "web");

    let read = |vm: &str, file: &str| exec(&client, vm, &format!("{READ_SEED}{file}")).stdout;
    assert_eq!(read("web", "user-data"), user_data);
    let meta = |vm: &str| -> Value { serde_json::from_str(&read(vm, "meta-data")).unwrap() };
    let of_web = meta("web");
    assert_eq!(of_web["local-hostname"], "web");
    assert_eq!(of_web["public-keys"][0], "ssh-ed25519 AAAAC3Nza admin");

    let address = |vm: &str, last: u32| {
        let set = format!(
            "modprobe virtio_net; for left in $(seq 60); do ls /sys/class/net/*/device > /dev/null 2>&1 && break; sleep 1; done; \
             nic=$(ls -d /sys/class/net/*/device | head -n 1); nic=${{nic%/device}}; nic=${{nic##*/}}; \
             ip addr flush dev $nic; ip addr add 10.77.0.{last}/24 dev $nic; ip link set $nic up; cat /sys/class/net/$nic/address"
        );
        exec(&client, vm, &set).stdout.trim().to_owned()
    };
    let reached = |last: u32, mac: &str| {
        let at = format!("10.77.0.{last}");
        wait_until(
            "the host reaches the guest",
            Duration::from_secs(60),
            || host.reaches(&at),
        );
        assert_eq!(host.neighbour(&at), mac);
    };
    let own = MacAddress::of_vm("web").to_string();
    assert_eq!(address("web", 2), own);
    reached(2, &own);

    let run = |arguments: &[&str]| succeeds(state, arguments);
    // The files are gone, but the snapshot has their texts, which it does not show.
    fs::remove_file(state.join("user-data")).unwrap();
    run(&["snapshot", "save", "web", "s"]);
    let manifest = run(&["snapshot", "inspect", "s", "--json"]);
    assert!(
        manifest.contains("not shown") && !manifest.contains("data data"),
        "{manifest}"
    );
    // The guest's random numbers may not be ready so soon after its boot, so the command would
    // fail.
    run(&["clone", "s", "--prefix", "c", "--identity", "--no-wait"]);
    wait_until(
        "the clone has its identity",
        Duration::from_secs(120),
        || {
            wait_agent(&client, "c-1")
                .renewal
                .is_some_and(|renewal| !renewal.pending)
        },
    );
    let own = MacAddress::of_vm("c-1").to_string();
    assert_eq!(address("c-1", 3), own);
    reached(3, &own);
    assert_eq!(read("c-1", "user-data"), user_data);
    let of_clone = meta("c-1");
    assert_eq!(of_clone["local-hostname"], "c-1");
    assert_ne!(of_clone["instance-id"], of_web["instance-id"]);
    assert_eq!(meta("web"), of_web);
}

//! Tests of `memfold pve` on a fake node of Proxmox VE. `real/beside/pve.rs` runs VMs on one.

use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};

use crate::fake_node::FakeNode;
use crate::support::{code, err, out, program, refused};

const UUID: &str = "7b10d7af-b932-4c66-b2c3-3996152ec465";

fn node() -> FakeNode {
    let node = FakeNode::new(Path::new("/dev/null"), "#!/bin/sh\nexit 1\n");
    let config = format!("cores: 2\nname: it's a web\nsmbios1: uuid={UUID}\n");
    let line = "/usr/bin/kvm -id 100 -name 'it'\\''s a web,debug-threads=on' -m 512\n";
    node.add("one", 100, &config, line);
    let passed = "/usr/bin/kvm -id 101 -device 'vfio-pci,host=0000:01:00.0,id=hostpci0'\n";
    node.add("one", 101, "hostpci0: 01:00\n", passed);
    node.add(
        "one",
        102,
        "arch: aarch64\n",
        "/usr/bin/qemu-system-aarch64 -id 102\n",
    );
    node.add("two", 103, &config, "");
    node
}

fn pve(node: &FakeNode, arguments: &[&str]) -> Output {
    let mut command = program();
    command.args(["--socket", "/nonexistent", "pve"]);
    node.on(command).args(arguments).output().unwrap()
}

#[track_caller]
fn said(node: &FakeNode, arguments: &[&str]) -> String {
    let output = pve(node, arguments);
    assert_eq!(code(&output), 0, "{arguments:?}: {}", err(&output));
    out(&output)
}

#[test]
fn enable_and_disable_leave_a_proxmox_node_byte_for_byte_as_it_was() {
    let node = node();
    let before = node.archive();
    for (arguments, words) in [
        (
            &["enable", "100", "--domain", "shop"][..],
            &["VM 100: enabled in trust domain shop\n"][..],
        ),
        (
            &["enable", "100", "--domain", "shop"],
            &["VM 100: enabled already"],
        ),
        (
            &["enable", "100", "--domain", "mail"],
            &["VM 100: enabled in trust domain mail\n"],
        ),
        (
            &["enable", "101"],
            &[
                "VM 101: enabled\n",
                "not folded: a passed-through device",
                "hostpci",
            ],
        ),
        (&["enable", "102"], &["not folded:", "qemu-system-aarch64"]),
        (&["enable", "103"], &["node 'two'"]),
    ] {
        let text = said(&node, arguments);
        for word in words {
            assert!(text.contains(word), "{arguments:?}: no '{word}' in: {text}");
        }
    }
    assert_ne!(node.archive(), before);
    let status: Value = serde_json::from_str(&said(&node, &["status", "--json"])).unwrap();
    let wanted = json!({
        "vmid": 100, "running": false, "enabled": true, "domain": "mail",
        "started_with_memfold": null, "vm": null, "folding": "when it is started",
    });
    assert_eq!(status[0], wanted);
    assert_eq!(status.as_array().unwrap().len(), 4);
    for vmid in ["100", "101", "102", "103"] {
        assert_eq!(
            said(&node, &["disable", vmid]),
            format!("VM {vmid}: disabled\n")
        );
    }
    assert!(said(&node, &["disable", "100"]).contains("disabled already"));
    assert!(node.archive() == before, "something is left");
    assert!(said(&node, &["status", "100"]).contains("no: not enabled"));
}

#[test]
fn a_new_vm_with_the_number_of_a_deleted_vm_is_not_in_its_trust_domain() {
    let node = node();
    said(&node, &["enable", "100", "--domain", "shop"]);
    let config = node.root().join("etc/pve/nodes/one/qemu-server/100.conf");
    std::fs::remove_file(&config).unwrap();
    assert!(said(&node, &["status"]).contains("memfold pve disable 100"));
    std::fs::write(&config, "smbios1: uuid=4f1e\n").unwrap();
    assert!(said(&node, &["status", "100"]).contains("another UUID"));
    said(&node, &["enable", "100"]);
    assert!(said(&node, &["status", "100"]).contains("when it is started"));
}

#[test]
fn pve_enable_is_refused_with_the_condition_and_its_fix() {
    let node = node();
    node.add("one", 104, "", "");
    std::fs::remove_file(node.root().join("showcmd/104")).unwrap();
    let before = node.archive();
    refused(&pve(&node, &["enable", "99"]), 2, &["99"]);
    refused(&pve(&node, &["enable", "999"]), 1, &["VM 999", "qm list"]);
    refused(&pve(&node, &["status", "999"]), 1, &["VM 999", "qm list"]);
    refused(
        &pve(&node, &["enable", "104"]),
        1,
        &["'away' is not online"],
    );
    refused(
        &pve(&node, &["enable", "100", "--domain", "Shop"]),
        1,
        &["domain", "Shop"],
    );
    assert!(
        node.archive() == before,
        "a refused command changes the node"
    );
    // As before the package, or after its removal.
    std::fs::write(node.root().join("usr/bin/kvm"), "#!/bin/sh\nexit 1\n").unwrap();
    refused(
        &pve(&node, &["enable", "100"]),
        1,
        &["usr/bin/kvm", "memfold-proxmox"],
    );
    let mut command = node.on(program());
    command.env("PATH", "/nonexistent");
    let output = command.args(["pve", "enable", "100"]).output().unwrap();
    refused(&output, 1, &["qm showcmd", "qemu-server"]);
}

//! Test of VMs that a fake node of Proxmox VE starts with memfold's script: the daemon attaches to
//! them without a command, in their trust domains.

use std::path::Path;
use std::process::{Command, Output};

use memfold_api::{Client, VmInfo};
use memfold_host::guest_images;
use memfold_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::fake_node::FakeNode;
use crate::served::{Served, wait_agent};
use crate::support::{self, BOOT};

/// Proxmox's QEMU has an option more than Debian's: `-id`.
const KVM: &str = "#!/bin/sh\nshift 2\nexec qemu-system-x86_64 \"$@\"\n";

const GUEST: u32 = 101;
/// A VM that was deleted after it was enabled, so that its number was free for a new VM.
const REUSED: u32 = 100;

struct Running<'a>(&'a FakeNode);

impl Running<'_> {
    /// Starts a VM as `qm start` does.
    fn start(&self, vmid: u32) {
        let line = std::fs::read_to_string(self.0.root().join(format!("showcmd/{vmid}"))).unwrap();
        let root = self.0.root().display();
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("exec {root}{line}")]);
        let output = self.0.on(shell).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!said.contains("cannot be folded"), "{said}");
    }

    fn kill(&self, vmid: u32) {
        let file = self.0.root().join(format!("run/qemu-server/{vmid}.pid"));
        let pid = std::fs::read_to_string(&file).ok();
        let pid = pid.and_then(|text| Pid::from_raw(text.trim().parse().ok()?));
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::KILL);
            let _ = std::fs::remove_file(file);
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.kill(GUEST);
        self.kill(REUSED);
    }
}

/// Adds a VM to the node, with a command line like that of Proxmox VE.
fn add(node: &FakeNode, vmid: u32, uuid: &str, more: &str) {
    let run = node.root().join("run/qemu-server").join(vmid.to_string());
    let run = run.display();
    let line = format!(
        "/usr/bin/kvm -id {vmid} -name 'vm{vmid},debug-threads=on' -no-shutdown \
         -chardev 'socket,id=qmp,path={run}.qmp,server=on,wait=off' -mon 'chardev=qmp,mode=control' \
         -pidfile {run}.pid -daemonize -smbios 'type=1,uuid={uuid}' -nodefaults -display none \
         -machine q35 -accel 'tcg,thread=multi' {more}\n"
    );
    node.add("one", vmid, &format!("smbios1: uuid={uuid}\n"), &line);
}

fn pve(node: &FakeNode, state: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_memfold"));
    command.arg("--socket").arg(state.join("s")).arg("pve");
    let output = node.on(command).args(arguments).output().unwrap();
    let wrong = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {wrong}");
    output
}

/// Returns the names of the VMs that a daemon lists.
fn names(client: &Client) -> Vec<String> {
    let vms: Vec<VmInfo> = client.get("/v1/vms").unwrap();
    vms.into_iter().map(|vm| vm.name).collect()
}

#[test]
fn enabled_proxmox_vms_are_attached_in_their_trust_domain_as_they_start() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path();
    let node = FakeNode::new(&memfold_host::library().unwrap(), KVM);
    let images = guest_images().unwrap();
    let image = &images["trixie-a"];
    let (kernel, initrd) = (image.kernel.display(), image.initrd.display());
    let boot = format!(
        "-m 384 -cpu max -kernel {kernel} -initrd {initrd} -drive 'file={},if=virtio,format=raw,snapshot=on' \
         -append 'root=/dev/vda rw quiet mitigations=off no_timer_check tsc=reliable' -device 'virtio-balloon-pci,free-page-reporting=on'",
        image.disk.display()
    );
    add(&node, GUEST, "7b10d7af-b932-4c66-b2c3-3996152ec465", &boot);
    let (deleted, new) = (
        "11111111-b932-4c66-b2c3-3996152ec465",
        "22222222-b932-4c66-b2c3-3996152ec465",
    );
    add(&node, REUSED, deleted, "-m 64");
    let before = node.archive();
    for vmid in [GUEST, REUSED].map(|vmid| vmid.to_string()) {
        pve(&node, state, &["enable", &vmid, "--domain", "shop"]);
    }
    add(&node, REUSED, new, "-m 64");

    let running = Running(&node);
    running.start(REUSED);
    running.start(GUEST);
    let root = node.root().display().to_string();
    let more = ["--pve", root.as_str()];
    let mut served = Served::new(state, &[]).with(&more);
    served.start();
    let client = served.answers();
    let vm = wait_agent(&client, "vm101");
    assert_eq!(vm.domain.as_deref(), Some("shop"));
    let status = pve(&node, state, &["status", "--json"]).stdout;
    let status: Value = serde_json::from_slice(&status).unwrap();
    println!("{status:#}");
    // The search for VMs is in the order of their numbers.
    assert_eq!(
        (&status[0]["vmid"], &status[0]["vm"]),
        (&100.into(), &Value::Null)
    );
    assert!(status[0]["folding"].as_str().unwrap().contains("UUID"));
    assert_eq!(
        (&status[1]["vm"], &status[1]["folding"]),
        (&"vm101".into(), &"yes".into())
    );
    assert_eq!(status[1]["started_with_memfold"], true);

    served.kill();
    served.start();
    let client = served.answers();
    wait_agent(&client, "vm101");
    for vmid in [GUEST, REUSED].map(|vmid| vmid.to_string()) {
        pve(&node, state, &["disable", &vmid]);
    }
    // A running VM keeps memfold until it ends.
    assert_eq!(names(&client), ["vm101"]);
    running.kill(GUEST);
    wait_until("the daemon forgets the VM", BOOT, || {
        names(&client).is_empty()
    });
    add(&node, REUSED, deleted, "-m 64");
    assert!(node.archive() == before, "something is left");
}

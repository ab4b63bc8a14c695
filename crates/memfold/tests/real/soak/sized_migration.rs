//! Tests of a live migration while right-sizing is on: a VM with memory in its balloon moves to the
//! QEMU of another daemon, and its size stays safe there.
//!
//! ```text
//!   lab, right-sizing on                            other daemon
//!   QEMU: balloon holds 256 MiB  --- migrate -->    QEMU -incoming: balloon holds 256 MiB
//! ```
//! Both QEMUs have the same file as their disk.

use std::path::Path;
use std::time::Duration;

use memfold_api::{Client, RightsizeMode, RightsizeReport, RightsizeRequest, Sizing, VmRightsize};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab, wait_for_migration};
use memfold_testkit::{patience, wait_until};
use memfold_units::ByteSize;
use memfold_vm::{DiskFormat, DiskSpec, Qmp, Vm, VmSpec};
use serde_json::json;

use crate::served::{Served, exec, wait_agent};
use crate::sizing::{self, CHECK, LONG, estimate_anew, now, size, size_in, wait_reason};
use crate::support::{self, BOOT};

const VM: &str = "moves";

/// RAM of the guest, and the maximum that the operator sets at first.
const MEMORY: ByteSize = ByteSize::mib(896);
const MAXIMUM: ByteSize = ByteSize::mib(640);

/// Memory that the guest needs at the new host, in MiB: with the balloon as it came, it has less.
const NEEDS: u64 = 560;

/// Longest time of a migration.
const MIGRATION: Duration = Duration::from_secs(120);

/// Prints what a restart of the guest would change.
const SAME: &str = "cat /proc/sys/kernel/random/boot_id /run/nonce";

/// Starts a VM in the lab, and lets right-sizing take it to its maximum.
fn start_small(lab: &Lab) -> VmSpec {
    let spec = Lab::spec(VM, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    lab.start_warm(spec.clone()).unwrap();
    lab.wait_ready(VM, BOOT).unwrap();
    estimate_anew(lab);
    let service = lab.daemon().rightsizing();
    service.set_mode(RightsizeMode::On);
    let sizing = Sizing {
        max_bytes: Some(MAXIMUM.0),
        ..Sizing::default()
    };
    service.set_sizing(VM, sizing).unwrap();
    wait_until("the balloon takes the guest to its maximum", LONG, || {
        size(lab, VM) <= MAXIMUM
    });
    spec
}

/// Returns the description of a VM that waits for the lab's VM, with the same disk.
fn receiver(lab: &Lab, mut spec: VmSpec) -> VmSpec {
    let vm = Vm::find(lab.directory(), VM).unwrap();
    let overlay = vm.record().unwrap().overlays[0].clone();
    spec.disks[0] = DiskSpec {
        format: Some(DiskFormat::Qcow2),
        ..DiskSpec::new(overlay)
    };
    spec.qemu_args = ["-incoming", "defer"].map(str::to_owned).into();
    spec
}

/// Moves a VM from one QEMU to another while it runs.
fn migrate(from: &mut Qmp, to: &mut Qmp) {
    let any_port = json!({ "uri": "tcp:127.0.0.1:0" });
    to.execute("migrate-incoming", any_port).unwrap();
    let listens = to.query("query-migrate").unwrap();
    let port = &listens["socket-address"][0]["port"];
    let port = port.as_str().unwrap_or_else(|| panic!("{listens}"));
    // QEMU's own limit is 128 MiB/s.
    let limits = json!({ "max-bandwidth": 1_u64 << 40 });
    from.execute("migrate-set-parameters", limits).unwrap();
    let there = json!({ "uri": format!("tcp:127.0.0.1:{port}") });
    from.execute("migrate", there).unwrap();
    for qmp in [from, to] {
        wait_for_migration(qmp, patience(MIGRATION)).unwrap();
    }
}

/// A daemon to which a VM of the lab was moved.
struct Moved<'a> {
    /// Ends the VM when it is dropped.
    _served: Served<'a>,
    client: Client,
    state: &'a Path,
}

impl<'a> Moved<'a> {
    /// Makes a VM small in a lab, and moves it to a daemon with these arguments, which has its
    /// files in `state`.
    fn new(state: &'a Path, arguments: &'a [&'a str]) -> Self {
        let lab = Lab::new(EngineSettings::default()).unwrap();
        let spec = start_small(&lab);
        let nonce = "head -c 16 /dev/urandom | sha256sum > /run/nonce";
        lab.exec(VM, nonce, LONG).unwrap();
        let same = lab.exec(VM, SAME, LONG).unwrap();
        let before = size(&lab, VM);

        let mut served = Served::new(state, &[VM]).with(arguments);
        served.start();
        let client = served.answers();
        served.run(&receiver(&lab, spec));
        let moved = Self {
            _served: served,
            client,
            state,
        };
        moved.wait_words("the VM's memory is still being received");
        let mut from = support::qmp(lab.directory(), VM);
        migrate(&mut from, &mut support::qmp(state, VM));
        let arrived = moved.size();
        println!("{before} before the migration, {arrived} after it");
        assert!(arrived >= before, "{arrived}");

        // The daemon of the first host says where the VM is, and forgets it when its QEMU ends.
        wait_reason(&lab, VM, "the VM was migrated away by another program");
        assert_eq!(now(&lab, VM).order, None);
        drop(from);
        lab.stop(VM).unwrap();
        wait_until("right-sizing forgets the VM", LONG, || {
            lab.daemon().rightsizing().report(0).vms.is_empty()
        });
        wait_agent(&moved.client, VM);
        assert_eq!(exec(&moved.client, VM, SAME).stdout, same);
        moved
    }

    /// Returns the size that the balloon leaves to the guest.
    fn size(&self) -> ByteSize {
        size_in(self.state, VM)
    }

    fn report(&self) -> RightsizeReport {
        self.client.get("/v1/rightsize").unwrap()
    }

    /// Returns what right-sizing says about the VM.
    fn now(&self) -> VmRightsize {
        let mut vms = self.report().vms.into_iter();
        vms.find(|vm| vm.vm == VM).unwrap_or_default()
    }

    fn wait_words(&self, words: &str) {
        wait_until(&format!("the reason has the words '{words}'"), LONG, || {
            self.now().reason.contains(words)
        });
    }
}

#[test]
fn a_vm_that_moves_with_memory_in_its_balloon_gets_it_at_the_new_host_when_it_needs_it() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::Builder::new().prefix("memfold-moved.").tempdir();
    let directory = directory.unwrap();
    let moved = Moved::new(directory.path(), &["--rightsize", "on"]);
    assert!(moved.size() <= MAXIMUM, "{}", moved.size());
    wait_until("the guest is believed", LONG, || {
        let now = moved.now();
        !["", "unknown"].contains(&&*now.basis) && now.size_bytes == moved.size().0
    });

    // No limit of the first host holds here. The guest has no swap.
    let sum = exec(&moved.client, VM, &sizing::hold(NEEDS)).stdout;
    let grown = moved.size();
    let report = moved.report();
    for event in &report.events {
        println!("{}: {} ({:?})", event.order, event.reason, event.result);
    }
    assert!(grown > MAXIMUM, "{grown}");
    let balloon = "set the balloon so that the guest has";
    let mut orders = report.events.iter();
    assert!(orders.any(|event| event.vm == VM && event.order.starts_with(balloon)));
    let check = exec(&moved.client, VM, CHECK).stdout;
    assert_eq!(check, format!("{sum}oom_kill 0\n"));

    let watch = RightsizeRequest {
        mode: RightsizeMode::Watch,
    };
    let _: RightsizeReport = moved.client.put("/v1/rightsize", &watch).unwrap();
    wait_until("the guest has its memory back", LONG, || {
        moved.size() == MEMORY
    });
    assert_eq!(exec(&moved.client, VM, CHECK).stdout, check);
}

#[test]
fn a_vm_that_moves_to_a_daemon_that_sizes_no_vms_gets_back_what_its_balloon_holds() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::Builder::new().prefix("memfold-moved.").tempdir();
    let directory = directory.unwrap();
    let moved = Moved::new(directory.path(), &["--rightsize", "watch"]);
    wait_until("the guest has its memory back", LONG, || {
        moved.size() == MEMORY
    });
    wait_until("right-sizing shows all of it", LONG, || {
        moved.now().size_bytes == MEMORY.0
    });
}

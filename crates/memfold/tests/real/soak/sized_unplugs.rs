//! Tests of memory that another program takes away from a VM while right-sizing is on: by
//! virtio-mem, or with a DIMM. Sizes stay safe, and words say what happened.

use std::time::{Duration, Instant};

use memfold_api::{RightsizeMode, Sizing};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_testkit::wait_until;
use memfold_units::ByteSize;
use memfold_vm::{Qmp, VmSpec, virtio_mem};
use serde_json::json;

use crate::sizing::{
    self, CHECK, LONG, check_none_killed, estimate_anew, meminfo, now, orders, size, wait_known,
};
use crate::support::{self, BOOT};

/// A VM whose plugged memory another program unplugs, and one whose DIMM another program removes.
const UNPLUGGED: &str = "unplugged";
const REMOVED: &str = "removed";

/// RAM of the first VM at its start, the most that it can have, and its minimum at first.
const MEMORY: ByteSize = ByteSize::mib(512);
const MOST: ByteSize = ByteSize::mib(1280);
const LEAST: ByteSize = ByteSize::mib(768);

/// RAM of the second VM without and with its DIMM. The maximum that the operator sets is as much as
/// the RAM without it, so the balloon holds as much as the DIMM has.
const OWN: ByteSize = ByteSize::mib(768);
const DIMM: ByteSize = ByteSize::mib(256);

/// Time after which a guest is asked again to give a DIMM up, because a page of it could not be
/// moved.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// Makes the guest's kernel use a new DIMM for pages that can move only, so that it can give it up.
const MOVABLE: &str = "echo online_movable > /sys/devices/system/memory/auto_online_blocks";

/// Starts a lab with one VM, whose description `change` completes.
fn start(vm: &str, memory: ByteSize, change: impl FnOnce(&mut VmSpec)) -> Lab {
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let mut spec = Lab::spec(vm, "trixie-a", memory, DiskMode::Buffered).unwrap();
    change(&mut spec);
    lab.start_warm(spec).unwrap();
    lab.wait_ready(vm, BOOT).unwrap();
    estimate_anew(&lab);
    lab
}

fn set_minimum(lab: &Lab, least: ByteSize) {
    let sizing = Sizing {
        min_bytes: Some(least.0),
        ..Sizing::default()
    };
    let service = lab.daemon().rightsizing();
    service.set_sizing(UNPLUGGED, sizing).unwrap();
}

/// Returns the size of the first VM, as right-sizing shows it.
fn shown(lab: &Lab) -> u64 {
    now(lab, UNPLUGGED).size_bytes
}

/// Lets the first VM keep so many MiB while `work` is done. No byte may change, and the guest's
/// kernel may kill nothing.
fn while_held(lab: &Lab, mib: u64, work: impl FnOnce()) {
    let sum = lab.exec(UNPLUGGED, &sizing::hold(mib), LONG).unwrap();
    work();
    let check = lab.exec(UNPLUGGED, CHECK, LONG).unwrap();
    assert_eq!(check, format!("{sum}oom_kill 0\n"));
    lab.exec(UNPLUGGED, "umount /run/held", LONG).unwrap();
}

#[test]
fn memory_that_another_program_unplugs_comes_back_if_the_guest_or_its_minimum_needs_it() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = start(UNPLUGGED, MEMORY, |spec| spec.memory_max = Some(MOST));
    let mut other = support::qmp(lab.directory(), UNPLUGGED);
    lab.daemon().rightsizing().set_mode(RightsizeMode::On);
    set_minimum(&lab, LEAST);
    wait_until("the guest has its minimum", LONG, || shown(&lab) >= LEAST.0);

    // The operator wants a minimum, and another program wants less.
    let before = orders(&lab, UNPLUGGED, "plug").len();
    while_held(&lab, 64, || {
        virtio_mem::request(&mut other, ByteSize(0)).unwrap();
        wait_until("right-sizing plugs the memory again", LONG, || {
            orders(&lab, UNPLUGGED, "plug").len() > before
        });
        wait_until("the guest has its minimum again", LONG, || {
            shown(&lab) >= LEAST.0
        });
    });
    let plugs = orders(&lab, UNPLUGGED, "plug").split_off(before);
    println!("{plugs:#?}");
    let words = "the VM is smaller than its minimum";
    assert!(plugs.iter().any(|event| event.reason.contains(words)));

    // Nobody needs it.
    set_minimum(&lab, ByteSize(MEMORY.0 / 4));
    virtio_mem::request(&mut other, ByteSize(0)).unwrap();
    wait_until("right-sizing sees that it is gone", LONG, || {
        let now = now(&lab, UNPLUGGED);
        now.plugged_bytes == Some(0) && now.size_bytes == MEMORY.0
    });
    println!("{:?}", now(&lab, UNPLUGGED));

    // The guest needs more than it has left.
    while_held(&lab, 448, || {
        println!("{:?}", now(&lab, UNPLUGGED));
        assert!(shown(&lab) > MEMORY.0);
    });
}

/// Plugs a DIMM into the second VM, and waits until its guest uses it.
fn plug_dimm(lab: &Lab, qmp: &mut Qmp) {
    let before = meminfo(lab, REMOVED, "MemTotal");
    lab.exec(REMOVED, MOVABLE, LONG).unwrap();
    let memory = json!({ "qom-type": "memory-backend-ram", "id": "extra", "size": DIMM.0 });
    qmp.execute("object-add", memory).unwrap();
    let dimm = json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "extra" });
    qmp.execute("device_add", dimm).unwrap();
    wait_until("the guest uses the DIMM", LONG, || {
        meminfo(lab, REMOVED, "MemTotal") >= before + DIMM.0 * 3 / 4
    });
}

/// Removes the DIMM, which the guest must give up.
fn remove_dimm(qmp: &mut Qmp) {
    let mut asked: Option<Instant> = None;
    wait_until("the guest gives the DIMM up", LONG, || {
        if asked.is_none_or(|at| at.elapsed() >= ASK_AGAIN) {
            asked = Some(Instant::now());
            // QEMU refuses while the guest still tries.
            let _ = qmp.execute("device_del", json!({ "id": "dimm" }));
        }
        let devices = qmp.query("query-memory-devices").unwrap();
        devices.as_array().is_some_and(Vec::is_empty)
    });
    let memory = json!({ "id": "extra" });
    qmp.execute("object-del", memory).unwrap();
}

#[test]
fn a_vm_whose_dimm_another_program_removes_gets_back_what_its_balloon_holds() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = start(REMOVED, OWN, |spec| {
        spec.memory_max = Some(ByteSize(OWN.0 + 2 * DIMM.0));
        spec.memory_slots = 1;
    });
    let mut other = support::qmp(lab.directory(), REMOVED);
    let service = lab.daemon().rightsizing();
    service.set_mode(RightsizeMode::On);
    wait_known(&lab, REMOVED);

    // A guest that has more memory than before is believed.
    plug_dimm(&lab, &mut other);
    wait_until("right-sizing sees the DIMM", LONG, || {
        now(&lab, REMOVED).size_bytes == OWN.0 + DIMM.0
    });
    let seen = now(&lab, REMOVED);
    assert!(!seen.reason.contains("claims"), "{seen:?}");
    wait_known(&lab, REMOVED);
    let sizing = Sizing {
        max_bytes: Some(OWN.0),
        ..Sizing::default()
    };
    service.set_sizing(REMOVED, sizing).unwrap();
    wait_until("the balloon takes the guest to its maximum", LONG, || {
        size(&lab, REMOVED) <= OWN
    });

    // The balloon holds as much as before, of less RAM.
    remove_dimm(&mut other);
    wait_until("right-sizing sees that the DIMM is gone", LONG, || {
        let now = now(&lab, REMOVED);
        now.size_bytes < OWN.0 && now.size_bytes == size(&lab, REMOVED).0
    });
    wait_known(&lab, REMOVED);
    let smaller = now(&lab, REMOVED);
    println!("{smaller:?}");
    assert!(!smaller.reason.contains("claims"));

    service.set_mode(RightsizeMode::Off);
    wait_until("the guest has all that is left", LONG, || {
        size(&lab, REMOVED) == OWN
    });
    check_none_killed(&lab, REMOVED);
}

//! Test of memory beyond the start size (virtio-mem): right-sizing plugs it when the guest is short
//! and unplugs it when it is idle; it is folded, and part of snapshots, like other RAM.

use std::time::Duration;

use memfold_api::{RestoreRequest, RightsizeMode, SaveRequest, Sizing};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_rightsize::Policy;
use memfold_snapshot::Renew;
use memfold_testkit::wait_until;
use memfold_units::{ByteSize, PAGE_SIZE};

use crate::sizing::{self, CHECK, LONG, check_none_killed, now, orders, wait_reason};
use crate::support::{self, BOOT};

const VM: &str = "grows";
/// Guest with the same files.
const MATE: &str = "mate";

/// RAM of the guest at its start, and the most that it can have.
const MEMORY: ByteSize = ByteSize::mib(512);
const MOST: ByteSize = ByteSize::mib(1280);

/// Size that the operator asks for first.
const FIRST: u64 = 640 << 20;

/// Bytes that the guest then needs, more than it was started with.
const NEEDS: u64 = 640 << 20;

fn plugged(lab: &Lab, vm: &str) -> u64 {
    now(lab, vm).plugged_bytes.unwrap_or(0)
}

fn total(lab: &Lab) -> u64 {
    sizing::meminfo(lab, VM, "MemTotal")
}

fn limit(lab: &Lab, min: u64) {
    let sizing = Sizing {
        min_bytes: Some(min),
        ..Sizing::default()
    };
    lab.daemon().rightsizing().set_sizing(VM, sizing).unwrap();
}

/// Returns the pages of the page store that are mapped in the plugged part of the guest's RAM.
fn folded_in_plugged_memory(lab: &Lab) -> u64 {
    let (pid, layout) = support::ram(lab.directory(), VM);
    let block = &layout.blocks[1];
    let (start, end) = (block.hva.0, block.hva.0 + block.pages * PAGE_SIZE);
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let folded = maps.lines().filter(|line| line.contains("memfold:"));
    folded
        .filter_map(|line| {
            let (from, to) = line.split_once(' ')?.0.split_once('-')?;
            let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).unwrap());
            (from >= start && to <= end).then_some((to - from) / PAGE_SIZE)
        })
        .sum()
}

#[test]
fn a_short_guest_gets_memory_plugged_that_is_folded_and_saved_and_unplugged_when_it_is_idle() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let mut spec = Lab::spec(VM, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    spec.memory_max = Some(MOST);
    lab.start_warm(spec).unwrap();
    lab.wait_ready(VM, BOOT).unwrap();
    let before = total(&lab);
    assert!(before < MEMORY.0, "{before}");
    let service = lab.daemon().rightsizing();
    service.set_policy(Policy {
        idle: Duration::from_secs(10),
        settle: Duration::from_secs(10),
        unplug_leaves_free: ByteSize::mib(64),
        ..Policy::default()
    });

    without_a_driver_words_say_what_the_guest_lacks(&lab);
    wait_until("the guest has what the operator asked for", LONG, || {
        plugged(&lab, VM) + MEMORY.0 >= FIRST
    });
    assert!(total(&lab) >= before + FIRST - MEMORY.0 - (16 << 20));
    limit(&lab, MEMORY.0 / 4);

    // The guest has no swap, so it lacks this memory if nothing is plugged.
    let sum = lab.exec(VM, &sizing::hold(NEEDS >> 20), LONG).unwrap();
    println!("{:#?}\n{:?}", orders(&lab, VM, "plug"), now(&lab, VM));
    assert!(plugged(&lab, VM) >= NEEDS - MEMORY.0 + (128 << 20));
    let check = lab.exec(VM, CHECK, LONG).unwrap();
    assert_eq!(check, format!("{sum}oom_kill 0\n"));

    plugged_memory_is_folded(&lab);
    a_snapshot_has_plugged_memory(&lab, &check);

    lab.exec(VM, "umount /run/held", LONG).unwrap();
    let most = plugged(&lab, VM);
    wait_until("half of the plugged memory is unplugged", LONG, || {
        plugged(&lab, VM) <= most / 2
    });
    println!("{:#?}", orders(&lab, VM, "unplug"));
    let layout = support::ram(lab.directory(), VM).1;
    assert_eq!(layout.blocks.len(), 2);
    // The guest still works, and gets memory again.
    limit(&lab, FIRST + (64 << 20));
    wait_until("the guest has what the operator asked for", LONG, || {
        plugged(&lab, VM) + MEMORY.0 >= FIRST + (64 << 20)
    });
    check_none_killed(&lab, VM);
}

fn without_a_driver_words_say_what_the_guest_lacks(lab: &Lab) {
    lab.exec(VM, "modprobe -r virtio_mem", LONG).unwrap();
    limit(lab, FIRST);
    lab.daemon().rightsizing().set_mode(RightsizeMode::On);
    wait_reason(lab, VM, "load the module virtio_mem");
    assert!(orders(lab, VM, "plug").is_empty());
    assert_eq!(plugged(lab, VM), 0);
    lab.exec(VM, "modprobe virtio_mem", LONG).unwrap();
}

/// Page cache goes to plugged memory first, because its pages can move.
fn plugged_memory_is_folded(lab: &Lab) {
    let mate = Lab::spec(MATE, "trixie-b", support::MEMORY, DiskMode::Buffered).unwrap();
    lab.start_warm(mate).unwrap();
    lab.wait_ready(MATE, BOOT).unwrap();
    lab.fold(true).unwrap();
    lab.exec_all(
        &[VM, MATE],
        "find /usr -xdev -type f -size +256k -exec cat {} + > /dev/null",
        LONG,
    )
    .unwrap();
    wait_until("pages of plugged memory are folded", LONG, || {
        folded_in_plugged_memory(lab) > 1000
    });
    lab.fold(false).unwrap();
    lab.stop(MATE).unwrap();
}

fn a_snapshot_has_plugged_memory(lab: &Lab, check: &str) {
    let snapshots = lab.daemon().snapshots();
    snapshots.save(&SaveRequest::new(VM, "grown")).unwrap();
    assert_eq!(snapshots.verify("grown").unwrap().problems, [""; 0]);
    let request = RestoreRequest {
        renew: Renew::Network,
        ..RestoreRequest::new("again")
    };
    snapshots.restore("grown", &request).unwrap();
    lab.daemon().vms().wait_agent("again", BOOT).unwrap();
    assert_eq!(lab.exec("again", CHECK, LONG).unwrap(), check);
    wait_until("the restored VM has the plugged memory", LONG, || {
        plugged(lab, "again") == plugged(lab, VM)
    });
    lab.exec("again", "umount /run/held", LONG).unwrap();
    lab.stop("again").unwrap();
}

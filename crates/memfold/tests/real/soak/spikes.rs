//! Test of right-sizing on a host at its reserve: four guests take memory at once, and each gets
//! it.

use std::time::Duration;

use memfold_api::{DebtRequest, RUNGS, RightsizeMode, RungChange};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab, at_once};
use memfold_testkit::wait_until;

use crate::sizing::{self, LONG, estimate_anew, meminfo, size};
use crate::support::{self, BOOT, MEMORY};

const VMS: [&str; 4] = ["spike-0", "spike-1", "spike-2", "spike-3"];

/// Size of a file in each guest's page cache that nobody reads again, and how much page cache each
/// guest loses before the spikes.
const COLD: u64 = 192 << 20;
const TRIMMED: u64 = 48 << 20;

/// Memory that each guest takes at once, in MiB, and how long it keeps that.
const SPIKE_MIB: u64 = 256;
const KEEP: Duration = Duration::from_secs(20);

/// Memory that the host has above its reserve before the spikes: as much as one of them takes.
const LEFT: u64 = SPIKE_MIB << 20;

/// Sets the reserve, so that the host has little more. Other programs of the host may take and free
/// memory meanwhile.
fn bring_to_reserve(lab: &Lab) {
    let brake = lab.daemon().brake();
    let available = brake.debt().unwrap().mem_available_bytes;
    let request = DebtRequest {
        reserve: Some(available.saturating_sub(LEFT).to_string()),
        cover_percent: None,
    };
    brake.set_debt(&request).unwrap();
    wait_until("the host is at its reserve", LONG, || {
        let rung = lab.daemon().rightsizing().report(0).rung;
        rung.is_some_and(|rung| rung != "ample")
    });
}

/// Checks that the host went up and down the ladder rung by rung, and that words say why.
fn check_ladder(changes: &[RungChange]) {
    // A host begins on the lowest rung.
    let (mut before, mut highest) = (0_usize, 0_usize);
    for change in changes {
        println!("rung {}: {}", change.rung, change.why);
        let rung = RUNGS.iter().position(|name| *name == change.rung).unwrap();
        assert!(
            rung.abs_diff(before) <= 1,
            "a rung was left out: {changes:?}"
        );
        assert!(!change.why.is_empty(), "{changes:?}");
        highest = highest.max(rung);
        before = rung;
    }
    assert!(highest > 0, "the host was never short: {changes:?}");
}

#[test]
fn four_spikes_at_once_on_a_host_at_its_reserve_are_served_and_no_rung_is_left_out() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    for vm in VMS {
        let spec = Lab::spec(vm, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
        lab.start_warm(spec).unwrap();
    }
    for vm in VMS {
        lab.wait_ready(vm, BOOT).unwrap();
    }
    let pids = VMS.map(|vm| lab.pid(vm).unwrap());
    lab.exec_all(&VMS, &sizing::fill(COLD), LONG).unwrap();
    let cached = VMS.map(|vm| meminfo(&lab, vm, "Cached"));
    estimate_anew(&lab);
    let service = lab.daemon().rightsizing();
    service.set_mode(RightsizeMode::On);
    for (vm, before) in VMS.into_iter().zip(cached) {
        wait_until("the guest has lost 48 MiB of page cache", LONG, || {
            meminfo(&lab, vm, "Cached") + TRIMMED <= before
        });
    }
    bring_to_reserve(&lab);

    let spike = |vm| sizing::spike(&lab, vm, SPIKE_MIB, KEEP);
    let spikes = at_once(VMS, spike).unwrap();
    let report = service.report(1000);
    for event in &report.events {
        let (vm, order, reason) = (&event.vm, &event.order, &event.reason);
        println!("'{vm}': {order}, because {reason}: {:?}", event.result);
        assert!(!reason.is_empty(), "{event:?}");
    }
    check_ladder(&report.rungs);
    for (vm, spike) in VMS.iter().zip(&spikes) {
        println!("'{vm}': {spike:?}");
        assert_eq!((spike.swapped, spike.killed), (0, 0), "{vm}");
    }

    let files = lab.exec_all(&VMS, sizing::CHECK_FILL, LONG).unwrap();
    assert!(files.iter().all(|said| said.trim() == "right"), "{files:?}");
    assert_eq!(VMS.map(|vm| lab.pid(vm).unwrap()), pids, "a VM has ended");
    service.set_mode(RightsizeMode::Off);
    for vm in VMS {
        wait_until("the guest has its memory back", LONG, || {
            size(&lab, vm) == MEMORY
        });
    }
}

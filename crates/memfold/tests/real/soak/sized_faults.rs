//! Sizes of a VM whose agent stands still or is killed, whose guest has no balloon driver, or whose
//! clock jumps: they stay safe, and words say what happened.

use std::time::Duration;

use memfold_api::{RightsizeMode, Sizing, VmRightsize};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_rightsize::Policy;
use memfold_testkit::wait_until;
use memfold_units::ByteSize;

use crate::support::{self, BOOT, MEMORY};

const VM: &str = "failing";
const LONG: Duration = Duration::from_secs(300);

/// Maximum that the operator sets, so that right-sizing moves the balloon.
const MAXIMUM: ByteSize = ByteSize(MEMORY.0 / 4 * 3);

/// Stops the agent in a second, and lets it go on half a minute later.
const FREEZE: &str = "systemd-run -q --on-active=1 systemctl kill -s STOP memfold-agent; \
    systemd-run -q --on-active=30 systemctl kill -s CONT memfold-agent";
const KILL: &str = "systemd-run -q --on-active=1 systemctl kill -s KILL memfold-agent";

fn now(lab: &Lab) -> VmRightsize {
    let report = lab.daemon().rightsizing().report(0);
    let found = report.vms.into_iter().find(|vm| vm.vm == VM);
    found.unwrap_or_default()
}

fn wait_reason(lab: &Lab, words: &str) {
    wait_until(&format!("the reason has the words '{words}'"), LONG, || {
        now(lab).reason.contains(words)
    });
}

fn wait_known(lab: &Lab) {
    wait_until("the guest is believed again", LONG, || {
        !["", "unknown"].contains(&&*now(lab).basis)
    });
}

fn size(lab: &Lab) -> ByteSize {
    lab.daemon().vms().balloon_size(VM).unwrap()
}

fn start_again(lab: &Lab) {
    lab.daemon().rightsizing().set_policy(Policy {
        young: Duration::ZERO,
        ..Policy::default()
    });
}

#[test]
fn a_vm_keeps_its_size_if_its_agent_its_balloon_driver_or_its_clock_fails_and_words_say_so() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let spec = Lab::spec(VM, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    lab.start_warm(spec).unwrap();
    lab.wait_ready(VM, BOOT).unwrap();
    start_again(&lab);
    let service = lab.daemon().rightsizing();
    service.set_mode(RightsizeMode::On);
    wait_known(&lab);

    // An agent that stands still, and one that is killed.
    lab.exec(VM, FREEZE, LONG).unwrap();
    wait_reason(&lab, "has not reported");
    assert_eq!(size(&lab), MEMORY);
    wait_known(&lab);
    lab.daemon().vms().wait_agent(VM, BOOT).unwrap();
    lab.exec(VM, KILL, LONG).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    lab.daemon().vms().wait_agent(VM, BOOT).unwrap();
    wait_known(&lab);
    assert_eq!(size(&lab), MEMORY);

    // A clock that jumps there and back.
    for jump in ["+2 hours", "-2 hours"] {
        lab.exec(VM, &format!("date -s '{jump}'"), LONG).unwrap();
        std::thread::sleep(Duration::from_secs(5));
        assert_eq!(size(&lab), MEMORY);
    }
    wait_known(&lab);

    // A guest without a balloon driver.
    lab.exec(VM, "modprobe -r virtio_balloon", LONG).unwrap();
    let sizing = Sizing {
        max_bytes: Some(MAXIMUM.0),
        ..Sizing::default()
    };
    service.set_sizing(VM, sizing).unwrap();
    wait_reason(&lab, "had no effect");
    assert_eq!(size(&lab), MEMORY);
    lab.exec(VM, "modprobe virtio_balloon", LONG).unwrap();
    start_again(&lab);
    wait_until("the balloon takes the guest to its maximum", LONG, || {
        size(&lab) <= MAXIMUM
    });
    for event in service.report(1000).events {
        println!("{}: {} ({:?})", event.order, event.reason, event.result);
    }
    service.set_mode(RightsizeMode::Off);
    wait_until("the guest has its memory back", LONG, || {
        size(&lab) == MEMORY
    });
    let killed = lab.exec(VM, "grep ^oom_kill /proc/vmstat", LONG).unwrap();
    assert_eq!(killed.trim(), "oom_kill 0");
}

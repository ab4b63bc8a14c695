//! Sizes of a VM whose agent stands still or is killed, whose guest has no balloon driver, or whose
//! clock jumps: they stay safe, and words say what happened.

use std::time::Duration;

use memfold_api::{RightsizeMode, Sizing};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_ledger::GuestMemorySource;
use memfold_testkit::wait_until;
use memfold_units::ByteSize;

use crate::sizing::{LONG, check_none_killed, estimate_anew, size, wait_known, wait_reason};
use crate::support::{self, BOOT, MEMORY};

const VM: &str = "failing";

/// Maximum that the operator sets, so that right-sizing moves the balloon.
const MAXIMUM: ByteSize = ByteSize(MEMORY.0 / 4 * 3);

/// Stops the agent in a few seconds, and lets it go on half a minute later. The commands have a
/// unit of their own: a signal to the agent's unit reaches the processes that the agent has
/// started, too.
const FREEZE: &str = "systemd-run -q sh -c 'sleep 5; systemctl kill -s STOP memfold-agent; \
    sleep 30; systemctl kill -s CONT memfold-agent'";
const KILL: &str = "systemd-run -q sh -c 'sleep 5; systemctl kill -s KILL memfold-agent'";

/// Prints how often the agent was started again after it had ended.
const RESTARTS: &str = "systemctl show -P NRestarts memfold-agent";

/// Returns who reported the guest's newest memory figures.
fn source(lab: &Lab) -> Option<GuestMemorySource> {
    let vms = lab.report().unwrap().ledger.vms;
    let vm = vms.into_iter().find(|vm| vm.name == VM)?;
    vm.guest.map(|guest| guest.source)
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
    estimate_anew(&lab);
    let service = lab.daemon().rightsizing();
    service.set_mode(RightsizeMode::On);
    wait_known(&lab, VM);

    // An agent that stands still, and one that is killed.
    lab.exec(VM, FREEZE, LONG).unwrap();
    wait_until("the balloon driver reports instead", LONG, || {
        source(&lab) == Some(GuestMemorySource::Balloon)
    });
    assert_eq!(size(&lab, VM), MEMORY);
    wait_until("the agent reports again", LONG, || {
        source(&lab) == Some(GuestMemorySource::Agent)
    });
    wait_known(&lab, VM);
    lab.daemon().vms().wait_agent(VM, BOOT).unwrap();
    let restarts = lab.exec(VM, RESTARTS, LONG).unwrap();
    lab.exec(VM, KILL, LONG).unwrap();
    wait_until("the agent was killed and runs again", LONG, || {
        // A command fails while the agent starts.
        lab.exec(VM, RESTARTS, LONG)
            .is_ok_and(|now| now != restarts)
    });
    wait_known(&lab, VM);
    assert_eq!(size(&lab, VM), MEMORY);

    // A clock that jumps there and back.
    for jump in ["+2 hours", "-2 hours"] {
        lab.exec(VM, &format!("date -s '{jump}'"), LONG).unwrap();
        std::thread::sleep(Duration::from_secs(5));
        assert_eq!(size(&lab, VM), MEMORY);
    }
    wait_known(&lab, VM);

    // A guest without a balloon driver.
    lab.exec(VM, "modprobe -r virtio_balloon", LONG).unwrap();
    let sizing = Sizing {
        max_bytes: Some(MAXIMUM.0),
        ..Sizing::default()
    };
    service.set_sizing(VM, sizing).unwrap();
    wait_reason(&lab, VM, "had no effect");
    assert_eq!(size(&lab, VM), MEMORY);
    lab.exec(VM, "modprobe virtio_balloon", LONG).unwrap();
    estimate_anew(&lab);
    wait_until("the balloon takes the guest to its maximum", LONG, || {
        size(&lab, VM) <= MAXIMUM
    });
    for event in service.report(1000).events {
        println!("{}: {} ({:?})", event.order, event.reason, event.result);
    }
    service.set_mode(RightsizeMode::Off);
    wait_until("the guest has its memory back", LONG, || {
        size(&lab, VM) == MEMORY
    });
    check_none_killed(&lab, VM);
}

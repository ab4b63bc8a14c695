//! Tests of right-sizing: a real guest loses page cache that it does not miss, and gets memory at
//! once when it needs it; and its balloon, across the death of daemons.

use std::time::Duration;

use memfold_api::{
    Client, RestoreRequest, RightsizeMode, RightsizeReport, RightsizeRequest, SaveRequest, Sizing,
};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_snapshot::Renew;
use memfold_testkit::{bound, patience, wait_until};
use memfold_units::ByteSize;

use crate::served::{Served, wait_agent};
use crate::sizing::{self, LONG, now, orders, size_in, wait_reason};
use crate::support::{self, BOOT, set_allowed};

const VM: &str = "sized";

/// RAM of the guest.
const MEMORY: ByteSize = ByteSize::mib(896);

/// Size of a file that nobody reads again.
const COLD: u64 = 300 << 20;

/// Memory that the guest takes at once, in MiB.
const SPIKE_MIB: u64 = 512;

/// Time in which a spike is served on a machine that is not busy, and number of spikes. Other tests
/// can make one of them wait, so the fastest counts.
const SERVED: Duration = Duration::from_secs(1);
const SPIKES: usize = 3;

/// Returns the results of the guest's trims so far.
fn trims(lab: &Lab) -> Vec<String> {
    let trims = orders(lab, VM, "trim").into_iter();
    trims.filter_map(|event| event.result).collect()
}

fn cached(lab: &Lab) -> u64 {
    sizing::meminfo(lab, VM, "Cached")
}

fn pss(lab: &Lab) -> u64 {
    let vms = lab.report().unwrap().ledger.vms;
    vms.iter().find(|vm| vm.name == VM).unwrap().pss_bytes.0
}

#[test]
fn a_right_sized_guest_loses_cold_page_cache_and_serves_a_spike_without_swap_or_oom_kill() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let spec = Lab::spec(VM, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    lab.start_warm(spec).unwrap();
    lab.wait_ready(VM, BOOT).unwrap();
    lab.exec(VM, &sizing::fill(COLD), LONG).unwrap();
    let (cached_before, pss_before) = (cached(&lab), pss(&lab));

    let service = lab.daemon().rightsizing();
    // The guest booted when it was saved, so nothing waits for its boot.
    sizing::estimate_anew(&lab);
    service
        .set_sizing(
            VM,
            Sizing {
                pinned: Some(true),
                ..Sizing::default()
            },
        )
        .unwrap();
    service.set_mode(RightsizeMode::On);
    wait_reason(&lab, VM, "pinned");
    assert_eq!(trims(&lab).len(), 0);
    set_allowed(&lab, VM, r#"["exec", "inspect"]"#);
    service
        .set_sizing(
            VM,
            Sizing {
                pinned: Some(false),
                ..Sizing::default()
            },
        )
        .unwrap();

    wait_until("right-sizing decides about the guest", LONG, || {
        !now(&lab, VM).reason.contains("pinned")
    });
    assert_eq!(trims(&lab).len(), 0, "its owner forbids trims");
    set_allowed(&lab, VM, r#"["exec", "inspect", "trim"]"#);
    let goal = 64 << 20;
    wait_until("the guest has lost 64 MiB of page cache", LONG, || {
        cached(&lab) + goal <= cached_before
    });
    let results = trims(&lab);
    println!("trims: {results:?}\n{:?}", now(&lab, VM));
    assert!(
        results.iter().any(|result| result.contains("reclaimed")),
        "{results:?}"
    );
    wait_until("the host has the memory", LONG, || {
        pss(&lab) + goal / 2 <= pss_before
    });

    let spike = |_| {
        let spike = sizing::spike(&lab, VM, SPIKE_MIB, Duration::ZERO).unwrap();
        assert_eq!((spike.swapped, spike.killed), (0, 0));
        spike.took
    };
    let spikes: Vec<Duration> = (0..SPIKES).map(spike).collect();
    service.set_mode(RightsizeMode::Off);
    assert!(service.report(0).vms.is_empty());
    // The same guest now, on a machine that is as busy: nothing steers its memory.
    let unsteered: Vec<Duration> = (0..SPIKES).map(spike).collect();
    println!("spikes of 512 MiB took {spikes:?}, without right-sizing {unsteered:?}");
    let fastest = *spikes.iter().min().unwrap();
    let slowest = *unsteered.iter().max().unwrap();
    assert!(
        fastest <= bound(SERVED).max(2 * slowest),
        "{fastest:?}, without right-sizing {slowest:?}"
    );
    let file = lab.exec(VM, sizing::CHECK_FILL, LONG).unwrap();
    assert_eq!(file.trim(), "right");
}

#[test]
fn a_restored_vm_gets_back_what_its_balloon_held_when_it_was_saved() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let spec = Lab::spec(VM, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    lab.start_warm(spec).unwrap();
    lab.wait_ready(VM, BOOT).unwrap();
    let vms = lab.daemon().vms();
    vms.set_balloon(VM, Some(MAXIMUM)).unwrap();
    wait_until("the guest has given memory up", LONG, || {
        vms.balloon_size(VM).unwrap() <= MAXIMUM
    });
    let snapshots = lab.daemon().snapshots();
    snapshots.save(&SaveRequest::new(VM, "small")).unwrap();
    lab.stop(VM).unwrap();
    let restore = |name: &str| {
        let request = RestoreRequest {
            renew: Renew::Network,
            ..RestoreRequest::new(name)
        };
        snapshots.restore("small", &request).unwrap();
    };
    restore("first");
    wait_until("the guest has its memory back", LONG, || {
        vms.balloon_size("first").unwrap() == MEMORY
    });
    lab.stop("first").unwrap();

    // While right-sizing is on, the guest gets it back as it would from a balloon that right-sizing
    // has moved: not at once, but when right-sizing is turned off at the latest.
    let service = lab.daemon().rightsizing();
    service.set_mode(RightsizeMode::On);
    restore("second");
    assert!(vms.balloon_size("second").unwrap() < MEMORY);
    vms.wait_agent("second", patience(BOOT)).unwrap();
    service.set_mode(RightsizeMode::Watch);
    wait_until("the guest has its memory back", LONG, || {
        vms.balloon_size("second").unwrap() == MEMORY
    });
}

/// Maximum of the guest's size that the operator sets, so that right-sizing moves its balloon.
const MAXIMUM: ByteSize = ByteSize::mib(640);

#[test]
fn a_new_daemon_gives_back_the_balloon_that_a_killed_daemon_has_moved() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::Builder::new()
        .prefix("memfold-sized.")
        .tempdir()
        .unwrap();
    let state = directory.path();
    let mut served = Served::new(state, &[VM]).with(&["--rightsize", "on"]);
    served.start();
    let client = served.answers();
    served.run_warm(&Lab::spec(VM, "trixie-a", MEMORY, DiskMode::Buffered).unwrap());
    wait_agent(&client, VM);
    let size = || size_in(state, VM);
    assert_eq!(size(), MEMORY);
    let limits = Sizing {
        max_bytes: Some(MAXIMUM.0),
        ..Sizing::default()
    };
    let _: Sizing = client
        .put(&format!("/v1/vms/{VM}/sizing"), &limits)
        .unwrap();
    let shrinks = |client: &Client| {
        wait_until("the balloon takes the guest to its maximum", LONG, || {
            size() <= MAXIMUM
        });
        let report: RightsizeReport = client.get("/v1/rightsize").unwrap();
        println!("{:?}", report.events);
    };
    shrinks(&client);

    // A daemon that sizes VMs keeps the balloon until right-sizing is turned off.
    served.kill();
    served.start();
    let client = served.answers();
    wait_agent(&client, VM);
    assert!(size() <= MAXIMUM);
    let off = RightsizeRequest {
        mode: RightsizeMode::Off,
    };
    let _: RightsizeReport = client.put("/v1/rightsize", &off).unwrap();
    wait_until("the guest has its memory back", LONG, || size() == MEMORY);

    // A daemon that does not size VMs gives the memory back by itself.
    let on = RightsizeRequest {
        mode: RightsizeMode::On,
    };
    let _: RightsizeReport = client.put("/v1/rightsize", &on).unwrap();
    shrinks(&client);
    served.kill();
    let mut served = served.with(&["--rightsize", "watch"]);
    served.start();
    served.answers();
    wait_until("the guest has its memory back", LONG, || size() == MEMORY);
}

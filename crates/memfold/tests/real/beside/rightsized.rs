//! Test of right-sizing: a real guest loses page cache that it does not miss, and gets memory at
//! once when it needs it.

use std::time::Duration;

use memfold_api::{RightsizeMode, Sizing, VmRightsize};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_testkit::wait_until;
use memfold_units::ByteSize;

use crate::support::{self, BOOT};

const VM: &str = "sized";
const LONG: Duration = Duration::from_secs(300);

/// RAM of the guest.
const MEMORY: ByteSize = ByteSize::mib(768);

/// Fills the page cache with a file that nobody reads again, and keeps a checksum of it.
const FILL: &str = "yes 'a page that nobody misses' | head -c 314572800 > /var/tmp/cold && sync \
    && md5sum /var/tmp/cold > /run/sums && cat /var/tmp/cold > /dev/null";

/// Allocates 320 MiB at once, and prints how long that took in ms, and how often the guest swapped
/// or killed a process meanwhile.
const SPIKE: &str = r#"python3 - <<'END'
import time
def counts():
    fields = dict(line.split() for line in open("/proc/vmstat"))
    return int(fields["pswpout"]) + int(fields["oom_kill"])
before, began = counts(), time.monotonic()
held = bytearray(320 << 20)
for page in range(0, len(held), 4096): held[page] = 1
print(int((time.monotonic() - began) * 1000), counts() - before)
END"#;

fn now(lab: &Lab) -> VmRightsize {
    let report = lab.daemon().rightsizing().report();
    let found = report.vms.into_iter().find(|vm| vm.vm == VM);
    found.unwrap_or_default()
}

/// Returns the results of the guest's trims so far.
fn trims(lab: &Lab) -> Vec<String> {
    let events = lab.daemon().rightsizing().report().events.into_iter();
    let trims = events.filter(|event| event.vm == VM && event.order.starts_with("trim"));
    trims.filter_map(|event| event.result).collect()
}

fn cached(lab: &Lab) -> u64 {
    let text = lab.exec(VM, "grep ^Cached: /proc/meminfo", LONG).unwrap();
    let kib = text.split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() << 10
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
    lab.exec(VM, FILL, LONG).unwrap();
    let (cached_before, pss_before) = (cached(&lab), pss(&lab));

    let service = lab.daemon().rightsizing();
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
    wait_until("right-sizing sees the guest's figures", LONG, || {
        now(&lab).reason.contains("pinned")
    });
    assert_eq!(trims(&lab).len(), 0);
    service
        .set_sizing(
            VM,
            Sizing {
                pinned: Some(false),
                ..Sizing::default()
            },
        )
        .unwrap();

    let goal = 64 << 20;
    wait_until("the guest has lost 64 MiB of page cache", LONG, || {
        cached(&lab) + goal <= cached_before
    });
    let results = trims(&lab);
    println!("trims: {results:?}\n{:?}", now(&lab));
    assert!(
        results.iter().any(|result| result.contains("reclaimed")),
        "{results:?}"
    );
    wait_until("the host has the memory", LONG, || {
        pss(&lab) + goal / 2 <= pss_before
    });

    let spike = lab.exec(VM, SPIKE, LONG).unwrap();
    let (ms, bad) = spike.trim().split_once(' ').unwrap();
    println!("a spike of 320 MiB took {ms} ms");
    assert_eq!(bad, "0", "pages swapped out and processes killed");
    assert_eq!(
        lab.exec(VM, "md5sum --quiet -c /run/sums && echo right", LONG)
            .unwrap()
            .trim(),
        "right"
    );
    service.set_mode(RightsizeMode::Off);
    assert!(service.report().vms.is_empty());
}

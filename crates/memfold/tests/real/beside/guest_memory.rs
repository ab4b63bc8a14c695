//! Test of a guest's memory figures, of trimming its page cache by order, and of its balloon.

use std::collections::BTreeMap;
use std::time::Duration;

use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_ledger::{GuestMemory, GuestMemorySource, VmAccount};
use memfold_testkit::{patience, wait_until};
use memfold_units::ByteSize;
use memfold_vm::Trim;
use memfold_wire::memory::TrimEnd;

use crate::support::{self, BOOT, MEMORY, set_allowed};

const VM: &str = "trimmed";
const LONG: Duration = Duration::from_secs(120);

/// Size of the file whose clean pages are in the guest's page cache.
const CLEAN: u64 = 160 << 20;
/// Bytes that the trim is ordered to take.
const TAKEN: u64 = 96 << 20;
/// What programs of the guest may change meanwhile.
const NOISE: u64 = 16 << 20;

/// Makes a clean file, a dirty file, and a process whose memory is known; writes checksums.
const PREPARE: &str = r#"set -e
mount -t debugfs none /sys/kernel/debug
sysctl -qw vm.dirty_writeback_centisecs=0 vm.dirty_expire_centisecs=360000
yes "a clean page of memfold" | head -c 167772160 > /var/tmp/clean
sync
cat /var/tmp/clean > /dev/null
yes "a dirty page" | head -c 8388608 > /var/tmp/dirty
md5sum /var/tmp/dirty > /run/sums
cat > /run/hold.py <<'END'
import signal, sys, time
held = bytes(range(256)) * (4096 * 40)
def check(*_):
    good = held == bytes(range(256)) * (4096 * 40)
    open("/run/held", "w").write("good" if good else "bad")
signal.signal(signal.SIGUSR1, check)
open("/run/holds", "w").write("yes")
while True: time.sleep(1)
END
systemd-run -q --unit=hold python3 /run/hold.py
for i in $(seq 600); do [ -e /run/holds ] && break; sleep 0.1; done
[ -e /run/holds ]"#;

/// Compares the checksums, and lets the process compare its memory.
const CHECK: &str = r#"set -e
systemctl kill -s USR1 hold
md5sum --quiet -c /run/sums
[ "$(yes "a clean page of memfold" | head -c 167772160 | md5sum)" = "$(md5sum < /var/tmp/clean)" ]
for i in $(seq 600); do [ -s /run/held ] && break; sleep 0.1; done
cat /run/held"#;

/// Reads the guest's `/proc/meminfo`, in bytes.
fn meminfo(lab: &Lab) -> BTreeMap<String, u64> {
    let text = lab.exec(VM, "cat /proc/meminfo", LONG).unwrap();
    let figure = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let kib: u64 = rest.split_whitespace().next()?.parse().ok()?;
        Some((name.to_owned(), kib << 10))
    };
    text.lines().filter_map(figure).collect()
}

fn account(lab: &Lab) -> VmAccount {
    let report = lab.report().unwrap();
    let vms = report.ledger.vms.into_iter();
    vms.into_iter().find(|vm| vm.name == VM).unwrap()
}

/// Waits for figures that the guest read after this call.
fn guest(lab: &Lab) -> GuestMemory {
    let began = std::time::Instant::now();
    let mut found = None;
    wait_until("the guest reports new memory figures", LONG, || {
        found = account(lab).guest;
        let age = found
            .as_ref()
            .map(|guest| Duration::from_millis(guest.age_ms));
        // A report that came right after the call was read before it.
        age.is_some_and(|age| age + Duration::from_secs(2) < began.elapsed())
    });
    found.unwrap()
}

fn is_near(what: &str, a: u64, b: u64) {
    assert!(a.abs_diff(b) <= NOISE, "{what}: {a} and {b}");
}

#[test]
fn a_trim_takes_only_clean_page_cache_of_the_guest_and_the_host_gets_the_memory() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let spec = Lab::spec(VM, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    lab.start_warm(spec).unwrap();
    lab.wait_ready(VM, BOOT).unwrap();
    lab.exec(VM, PREPARE, Duration::from_secs(300)).unwrap();

    the_report_has_the_guests_own_figures(&lab);
    trimming_takes_clean_pages(&lab);
    the_owner_can_forbid_trimming(&lab);
    the_balloon_moves(&lab);
    assert_eq!(lab.exec(VM, CHECK, LONG).unwrap(), "good");
}

fn the_report_has_the_guests_own_figures(lab: &Lab) {
    let own = meminfo(lab);
    let guest = guest(lab);
    println!("{guest:?}");
    assert_eq!(guest.source, GuestMemorySource::Agent);
    assert_eq!(guest.mem_total_bytes.0, own["MemTotal"]);
    for (name, reported) in [
        ("MemFree", guest.mem_free_bytes),
        ("MemAvailable", Some(guest.mem_available_bytes)),
        ("Cached", guest.cached_bytes),
        ("AnonPages", guest.anon_pages_bytes),
        ("Dirty", guest.dirty_bytes),
        ("Shmem", guest.shmem_bytes),
        ("SwapTotal", guest.swap_total_bytes),
    ] {
        is_near(name, reported.unwrap().0, own[name]);
    }
    // Debian 13 has PSI and uses the multi-gen LRU.
    assert!(guest.pressure.is_some());
    wait_until("the guest reports the ages of its page cache", LONG, || {
        let classes = account(lab)
            .guest
            .map_or_else(Vec::new, |guest| guest.lru_gen);
        let on_lists: u64 = classes.iter().map(|class| class.file_bytes.0).sum();
        (CLEAN..=MEMORY.0).contains(&on_lists)
    });
    assert!(guest.oom_kill == Some(0) && guest.pgscan.is_some());
}

fn trimming_takes_clean_pages(lab: &Lab) {
    let (before, pss) = (meminfo(lab), account(lab).pss_bytes.0);
    let trim = Trim {
        bytes: TAKEN,
        max_pressure: 1.0,
        limit: patience(LONG),
        spare_swap: true,
    };
    let result = lab.daemon().vms().trim(VM, &trim).unwrap();
    println!("{result:?}");
    assert_eq!(result.end, TrimEnd::Done);
    assert!(result.reclaimed_bytes >= TAKEN && result.steps > 3);
    let after = meminfo(lab);
    let fell = before["Cached"].saturating_sub(after["Cached"]);
    assert!(fell + NOISE >= TAKEN, "Cached fell by {fell}");
    is_near("AnonPages", before["AnonPages"], after["AnonPages"]);
    // The kernel may have begun to write dirty pages to disk; their bytes are compared at the end.
    assert_eq!(before["SwapFree"], after["SwapFree"]);
    let mut given = 0;
    wait_until("free page reporting gives memory to the host", LONG, || {
        given = pss.saturating_sub(account(lab).pss_bytes.0);
        given >= TAKEN / 3
    });
    println!("the VM's PSS fell by {} MiB", given >> 20);
    let guest = guest(lab);
    is_near("Cached", guest.cached_bytes.unwrap().0, after["Cached"]);
}

fn the_owner_can_forbid_trimming(lab: &Lab) {
    let trim = Trim {
        bytes: 8 << 20,
        max_pressure: 1.0,
        limit: patience(LONG),
        spare_swap: true,
    };
    set_allowed(lab, VM, r#"["exec"]"#);
    let result = lab.daemon().vms().trim(VM, &trim).unwrap();
    assert_eq!(
        (result.end, result.reclaimed_bytes),
        (TrimEnd::Forbidden, 0)
    );
    set_allowed(lab, VM, r#"["exec", "inspect", "trim"]"#);
}

fn the_balloon_moves(lab: &Lab) {
    let vms = lab.daemon().vms();
    assert_eq!(vms.balloon_size(VM).unwrap(), MEMORY);
    for target in [ByteSize::mib(1), ByteSize(MEMORY.0 + (1 << 20))] {
        let error = vms.set_balloon(VM, Some(target)).unwrap_err().to_string();
        assert!(error.contains("from 64.0 MiB to 512 MiB"), "{error}");
    }
    let free = meminfo(lab)["MemFree"];
    let target = ByteSize(MEMORY.0 - (64 << 20));
    vms.set_balloon(VM, Some(target)).unwrap();
    wait_until("the balloon is filled", LONG, || {
        vms.balloon_size(VM).unwrap() <= target
    });
    let filled = meminfo(lab)["MemFree"];
    // The guest may free what the agent's restart needed.
    assert!(free >= filled + 2 * NOISE, "{free} {filled}");
    vms.set_balloon(VM, None).unwrap();
    wait_until("the balloon is empty", LONG, || {
        vms.balloon_size(VM).unwrap() == MEMORY
    });
}

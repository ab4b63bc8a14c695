//! Tests memfold's ledger (account of the host's RAM) with real guests: after boot, under load,
//! after folding, and after their end. Each time, all sums must agree with the kernel's.
//!
//! Without guest images, the test is skipped; if `MEMFOLD_REAL` is set (as by `make test`), the
//! test fails.

use std::fs::File;
use std::time::{Duration, Instant};

use memfold_api::FullReport;
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_ledger::{Report, check_change, shared_frames};
use memfold_testkit::patience;
use memfold_units::{ByteSize, PageCount};
use memfold_vm::Vm;
use rustix::fs::FlockOperation;

const GUESTS: [(&str, &str); 2] = [("ledger-a", "trixie-a"), ("ledger-b", "trixie-b")];
const TIMEOUT: Duration = Duration::from_secs(240);
const WORK: &str = "find /usr/bin /usr/sbin /usr/lib/x86_64-linux-gnu -xdev -type f -size -4M -print0 | sort -z | \
    head -z -n 1500 | xargs -0 cat | sha256sum";

/// Returns why real guests cannot be booted here; `None` if they can.
fn missing() -> Option<String> {
    if !rustix::process::getuid().is_root() {
        return Some("not root".into());
    }
    if let Err(error) = memfold_host::library() {
        return Some(error.to_string());
    }
    match memfold_host::guest_images() {
        Err(error) => Some(error.to_string()),
        Ok(images) => {
            let lacks = GUESTS
                .iter()
                .find(|(_, image)| !images.contains_key(*image));
            lacks.map(|(_, image)| format!("no guest image {image}"))
        }
    }
}

/// Takes the lock of this machine, by which tests that measure memory and tests that boot guests
/// exclude each other.
fn turn() -> File {
    let lock = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(std::env::temp_dir().join("memfold-guests.lock"))
        .unwrap();
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();
    lock
}

/// Returns the sums of a report, and of its difference to `before`, that disagree.
fn wrong(before: &Report, after: &Report) -> Vec<String> {
    let mut wrong: Vec<String> = after
        .disagreements
        .iter()
        .map(|d| format!("{d:?}"))
        .collect();
    wrong.extend(check_change(before, after).map(|d| format!("{d:?}")));
    for vm in &after.vms {
        // These sums must be exactly equal: no page is forgotten, and none is counted twice.
        if vm.sum_of_parts() != vm.ram_bytes {
            wrong.push(format!(
                "{}: parts {} of {}",
                vm.name,
                vm.sum_of_parts(),
                vm.ram_bytes
            ));
        }
    }
    wrong
}

/// Takes reports until one agrees with the kernel and with the change since `before`: guests and
/// the rest of the machine continue to run while pages are counted.
fn agreeing(lab: &Lab, before: &Report, moment: &str) -> FullReport {
    let mut last = Vec::new();
    let end = Instant::now() + patience(Duration::from_secs(60));
    while Instant::now() < end {
        let report = lab.report().unwrap();
        last = wrong(before, &report.ledger);
        let (was, is) = (&before.host, &report.ledger.host);
        println!(
            "{moment}: MemAvailable {} -> {}, the ledger's sum {} -> {}, saved {}; {} disagree",
            was.mem_available_bytes,
            is.mem_available_bytes,
            was.unreclaimable_bytes,
            is.unreclaimable_bytes,
            ByteSize(is.saved_by_folding_bytes.unsigned_abs()),
            last.len()
        );
        if last.is_empty() {
            return report;
        }
        std::thread::sleep(Duration::from_secs(2));
    }
    panic!("{moment}: never agreed: {last:#?}");
}

/// Takes the ledger at a moment when the rest of the machine is quiet, because an error in it would
/// affect each later comparison.
fn at_rest(lab: &Lab) -> Report {
    let mut last = lab.report().unwrap().ledger;
    for _ in 0..60 {
        std::thread::sleep(Duration::from_millis(500));
        let next = lab.report().unwrap().ledger;
        let (was, is) = (last.host.mem_available_bytes, next.host.mem_available_bytes);
        if was.0.abs_diff(is.0) < 4 << 20 {
            return next;
        }
        last = next;
    }
    last
}

fn wait_folded(lab: &Lab) {
    let began = Instant::now();
    let (mut best, mut grew) = (0, began);
    while grew.elapsed() < patience(Duration::from_secs(6)).min(Duration::from_secs(20))
        && began.elapsed() < patience(Duration::from_secs(60))
    {
        let stats = lab.stats().unwrap();
        let folded: u64 = stats.vms.iter().map(|vm| vm.matched_folded_pages).sum();
        if folded > best + best / 200 {
            (best, grew) = (folded, Instant::now());
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[test]
fn the_ledgers_sums_of_two_real_guests_equal_the_kernels_before_and_after_folding() {
    if let Some(why) = missing() {
        assert!(
            std::env::var_os("MEMFOLD_REAL").is_none(),
            "MEMFOLD_REAL is set, and {why}"
        );
        memfold_testkit::skip!("{why}");
    }
    let _turn = turn();
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let empty = at_rest(&lab);
    for (name, image) in GUESTS {
        let spec = Lab::spec(name, image, ByteSize::mib(512), DiskMode::Buffered).unwrap();
        lab.start_warm(spec).unwrap();
    }
    let names = GUESTS.map(|(name, _)| name);
    for name in names {
        lab.wait_ready(name, TIMEOUT).unwrap();
    }
    let sums = lab.exec_all(&names, WORK, TIMEOUT).unwrap();
    let booted = agreeing(&lab, &empty, "booted");
    assert!(
        booted
            .ledger
            .vms
            .iter()
            .all(|vm| vm.folded_bytes == ByteSize(0))
    );
    assert!(
        booted
            .ledger
            .vms
            .iter()
            .all(|vm| vm.private_bytes > ByteSize::mib(128))
    );

    lab.fold(true).unwrap();
    wait_folded(&lab);
    // Reading the files again brings folded pages into the page tables. Their frames are then
    // shared, and count in parts.
    assert_eq!(lab.exec_all(&names, WORK, TIMEOUT).unwrap(), sums);
    let folded = agreeing(&lab, &empty, "folded");
    let (vms, host) = (&folded.ledger.vms, &folded.ledger.host);
    for vm in vms {
        assert!(vm.folded_bytes > ByteSize::mib(40), "{vm:?}");
        assert!(
            vm.pss_bytes < vm.ram_rss_bytes + vm.qemu_pss_bytes,
            "{vm:?}"
        );
        // The engine's own figures, which come from other reads at another moment, agree.
        let stats = folded.fold.vms.iter().find(|s| s.name == vm.name).unwrap();
        let engine = PageCount(stats.mapped_pages).bytes();
        let ledger = vm.folded_bytes + vm.unfolded_bytes;
        let off = engine.0.abs_diff(ledger.0) as f64 / ledger.0 as f64;
        assert!(off < 0.1, "engine {engine}, ledger {ledger}");
    }
    assert!(host.saved_by_folding_bytes > 40 << 20, "{host:?}");
    let layout = |name: &str| {
        let vm = Vm::find(lab.directory(), name).unwrap();
        let layout = vm.layout(&mut vm.qmp().unwrap()).unwrap();
        (vm.pid().as_raw_nonzero().get(), layout)
    };
    let (a, b) = (layout(names[0]), layout(names[1]));
    let frames = shared_frames((a.0, &a.1), (b.0, &b.1)).unwrap();
    println!(
        "{} of page frames are mapped by both",
        PageCount(frames).bytes()
    );
    assert!(
        PageCount(frames).bytes() > ByteSize::mib(20),
        "{frames} frames"
    );
    // Pages in both page tables cannot be more than those in either of them.
    assert!(
        vms.iter()
            .all(|vm| PageCount(frames).bytes() <= vm.folded_resident_bytes + ByteSize::mib(8))
    );

    for name in names {
        lab.stop(name).unwrap();
    }
    agreeing(&lab, &folded.ledger, "ended");
}

//! Tests of hot snapshots, which refer to the disk for cached pages: they are small, and VMs
//! restored from them have a warm page cache.

use std::collections::HashSet;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use memfold_api::{KeepChoice, RestoreRequest, SaveRequest};
use memfold_daemon::DaemonError;
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_snapshot::{Manifest, SnapshotError};
use memfold_testkit::{patience, wait_until};
use memfold_units::ByteSize;

use super::snapshots::MEMORY;
use crate::support::{self, BOOT};

/// Shell script that reads files of the disk, and one that was just written, and keeps their
/// checksums in memory.
const READ_FILES: &str = "set -e
head -c 8M /dev/urandom > /var/tmp/new; sync
{ find /usr/bin /usr/lib -type f -size +15k | sort | head -n 800; echo /var/tmp/new; } > /run/list
xargs -a /run/list sha256sum > /run/sums
awk '/^Cached:/ { print $2 * 1024 }' /proc/meminfo";

const LIMIT: Duration = Duration::from_secs(300);

/// Program that writes pages in turn until [`STOP_TURNS`] ends it.
const TURNS: &str = include_str!("../guest/turns.py");

const START_TURNS: &str = "setsid /opt/turns.py > /run/turns.log 2>&1 < /dev/null &
for _ in $(seq 500); do [ -e /run/turns.ready ] && exit 0; sleep 0.2; done; exit 1";

/// Script that stops the program and prints its result.
const STOP_TURNS: &str = "touch /run/turns.stop
for _ in $(seq 500); do [ -e /run/turns.done ] && break; sleep 0.2; done
cat /run/turns.done || cat /run/turns.log";

/// Shell script that reads the files again, and prints the bytes that were read from the disk for
/// that.
const READ_AGAIN: &str = "set -e
sectors() { awk '$3 == \"vda\" { print $6 }' /proc/diskstats; }
before=$(sectors)
sha256sum --quiet -c /run/sums
echo $((($(sectors) - before) * 512))";

/// Shell script that makes the agent report every place of every file wrong by one page.
const LIE: &str = "set -e
disk=/run/lie/vda; mkdir -p $disk/device $disk/vda1 /run/lie/block; touch $disk/vda1/partition
echo 8 > $disk/vda1/start; cat /sys/block/vda/dev > $disk/dev
ln -s $disk/vda1 /run/lie/block/$(cat /sys/block/vda/dev)
mount --bind /run/lie/block /sys/dev/block";

/// Returns how often this process has images open that were laid out in memory.
fn laid_out() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    links
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .filter(|path| path.to_string_lossy().contains("memfold-image:"))
        .collect::<HashSet<_>>()
        .len()
}

/// Changes a byte of a file, and keeps the file's times.
fn flip(path: &Path, at: u64) {
    let file = std::fs::File::options().read(true).write(true).open(path);
    let file = file.unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    file.set_modified(modified).unwrap();
}

/// Sizes of a saved snapshot, in bytes, and its description.
struct Saved {
    manifest: Manifest,
    on_disk: u64,
    referred: u64,
}

/// Saves the VM `first`.
fn save(lab: &Lab, name: &str, keep: KeepChoice, live: bool, compress: bool) -> Saved {
    let request = SaveRequest {
        keep,
        live,
        compress,
        ..SaveRequest::new("first", name)
    };
    let manifest = lab.daemon().snapshots().save(&request).unwrap();
    let list = lab.daemon().snapshots().list().unwrap();
    let on_disk = list
        .iter()
        .find(|info| info.name == name)
        .unwrap()
        .disk_bytes;
    let referred = manifest.references.as_ref().map_or(0, |r| r.pages) * 4096;
    println!(
        "{name}: {} on disk, {} by reference; {:?}",
        ByteSize(on_disk),
        ByteSize(referred),
        manifest.steps
    );
    Saved {
        manifest,
        on_disk,
        referred,
    }
}

/// Starts the VM `first`, which has files in its page cache, and prints their number of bytes.
fn start_first(lab: &Lab) -> u64 {
    let spec = Lab::spec("first", "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    lab.start_warm(spec).unwrap();
    lab.wait_ready("first", BOOT).unwrap();
    let cached = lab.exec("first", READ_FILES, LIMIT).unwrap();
    println!("{} KiB cached", cached.trim());
    cached.trim().parse().unwrap()
}

fn restore(lab: &Lab, snapshot: &str, vm: &str, prefetch: bool) {
    let request = RestoreRequest {
        prefetch,
        ..RestoreRequest::new(vm)
    };
    lab.daemon()
        .snapshots()
        .restore(snapshot, &request)
        .unwrap();
    lab.daemon().vms().wait_agent(vm, patience(BOOT)).unwrap();
}

/// Reads the files again, compares their sums, and returns the bytes that came from the VM's disk.
fn read_again(lab: &Lab, vm: &str) -> u64 {
    let from_disk = lab.exec(vm, READ_AGAIN, LIMIT).unwrap();
    let from_disk = from_disk.trim().parse().unwrap();
    println!("{vm} read {} from its disk", ByteSize(from_disk));
    from_disk
}

#[test]
fn a_snapshot_with_page_cache_as_references_is_small_and_its_restored_vm_has_the_cache() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let daemon = lab.daemon();
    let cached = start_first(&lab);
    let hot = save(&lab, "hot", KeepChoice::Hot, true, false);
    let packed = save(&lab, "packed", KeepChoice::Hot, false, true);
    let cold = save(&lab, "cold", KeepChoice::None, false, false);
    // All cached memory counts, also shared memory and files that were never written to disk.
    let referred = hot.referred;
    assert!(referred * 10 > cached * 7, "{referred} of {cached}");
    let [hot_bytes, packed_bytes, cold_bytes] = [&hot, &packed, &cold].map(|s| s.on_disk);
    assert!(
        hot_bytes * 10 <= cold_bytes * 13,
        "{hot_bytes}, {cold_bytes}"
    );
    assert!(packed_bytes * 2 < hot_bytes, "{packed_bytes}, {hot_bytes}");

    let vms = [("hot", "warm"), ("packed", "warm-2"), ("cold", "cool")];
    let read = vms.map(|(snapshot, vm)| {
        // It is not known yet which pages the VM will use.
        restore(&lab, snapshot, vm, true);
        read_again(&lab, vm)
    });
    assert!(read[0] * 20 < read[2] && read[1] * 20 < read[2], "{read:?}");
    lab.stop("cool").unwrap();
    // Only the compressed image is laid out in memory; the other is mapped where it is.
    assert_eq!(laid_out(), 1);
    let shelf = memfold_snapshot::Shelf::open(&lab.directory().join("snapshots"));
    let warm = memfold_snapshot::restore::users(&shelf, "hot").unwrap();
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", warm[0].as_raw_nonzero())).unwrap();
    let references = hot.manifest.references.as_ref().unwrap();
    for source in &references.sources {
        let name = source.file_name().unwrap().to_str().unwrap();
        assert!(maps.lines().any(|line| line.ends_with(name)), "{name}");
    }
    println!(
        "{:?} mappings of disks, {} of all kinds",
        references.mappings,
        maps.lines().count()
    );
    let report = lab.daemon().reports().report().unwrap();
    let images = report.ledger.host.images_bytes;
    assert!(images.0 > referred, "{images} of memory are accounted for");
    // Disk blocks that are part of a snapshot's memory stay, whatever happens to the saved VM.
    let rewrite =
        "head -c 24M /dev/urandom > /var/tmp/new; head -c 24M /dev/urandom > /var/tmp/newer; sync";
    lab.exec("first", rewrite, LIMIT).unwrap();
    let later = save(&lab, "later", KeepChoice::Auto, false, false);
    let reason = later.manifest.keep_reason.unwrap();
    assert!(reason.starts_with("page cache of "), "{reason}");
    assert!(daemon.snapshots().remove("hot").is_err());
    daemon.snapshots().remove("later").unwrap();
    save(&lab, "latest", KeepChoice::None, false, false);
    read_again(&lab, "warm");
    // The restored VM's RAM is a view of memory, which can be write-protected like that of the
    // saved VM.
    let again = SaveRequest {
        live: true,
        keep: KeepChoice::Hot,
        ..SaveRequest::new("warm-2", "again")
    };
    let saved = daemon.snapshots().save(&again).unwrap();
    println!("saved again, stood still for {:.0} ms", saved.pause_ms);
    restore(&lab, "again", "heir", false);
    read_again(&lab, "heir");
    lab.stop("heir").unwrap();
    // The pages that the first VM used are prefetched for the next one.
    let set = lab.directory().join("snapshots/hot/working-set");
    wait_until("what was used first is noted", BOOT, || set.exists());
    restore(&lab, "hot", "fetched", true);
    assert!(read_again(&lab, "fetched") * 20 < read[2]);
    let report = daemon.reports().report().unwrap();
    let fetched = report.ledger.vms.iter().find(|vm| vm.name == "fetched");
    println!("fetched: {:?}", fetched.map(|vm| vm.file_resident_bytes));
    // The VM "warm" has these pages too, and they are in memory once.
    let saved = report.ledger.host.saved_by_clones_bytes;
    println!("clones save {} MiB", saved >> 20);
    assert!(saved > 50 << 20 && saved < 400 << 20, "{saved}");
    lab.stop("fetched").unwrap();
    // This also holds for a daemon that does not know what an earlier one has laid out.
    for (name, users) in [("hot", 1), ("packed", 1), ("cold", 0)] {
        let found = memfold_snapshot::restore::users(&shelf, name).unwrap();
        assert_eq!(found.len(), users, "{name}");
    }
    assert!(matches!(
        daemon.snapshots().remove("hot"),
        Err(DaemonError::Snapshot(SnapshotError::InUse { .. }))
    ));
    for vm in ["warm", "warm-2", "first"] {
        lab.stop(vm).unwrap();
    }
    wait_until("memory that no VM needs is freed", BOOT, || laid_out() == 0);
}

#[test]
fn pages_that_equal_the_snapshot_again_are_shared_again_while_the_restored_vm_runs() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let settings = EngineSettings {
        fold_back_interval: Duration::from_secs(2),
        ..EngineSettings::default()
    };
    let lab = Lab::new(settings).unwrap();
    start_first(&lab);
    let turns = support::file("turns.py", TURNS) + START_TURNS;
    lab.exec("first", &turns, LIMIT).unwrap();
    save(&lab, "hot", KeepChoice::Hot, true, false);
    save(&lab, "packed", KeepChoice::Hot, false, true);
    lab.stop("first").unwrap();
    // Pages of a VM whose RAM is a view of memory are folded back while it runs; those of a VM that
    // maps a file, at pauses. The next pass begins only when the CPU time of the last one is a
    // small share of the time since.
    let clones = ["warm", "warm-2"];
    for (snapshot, vm) in ["hot", "packed"].iter().zip(clones) {
        restore(&lab, snapshot, vm, false);
    }
    lab.fold(true).unwrap();
    let stats = support::wait_stats(
        "pages return to the snapshot",
        LIMIT,
        || lab.stats().unwrap(),
        |stats| {
            let back = |name: &&str| support::vm(stats, name).folded_back_pages;
            clones.iter().all(|name| back(name) > 2000)
        },
    );
    for vm in clones {
        let written = lab.exec(vm, STOP_TURNS, LIMIT).unwrap();
        let stats = support::vm(&stats, vm);
        println!(
            "{vm}: {} of {} pages written, {} folded back, {} pauses; {written}",
            stats.template_copied_pages,
            stats.template_pages,
            stats.folded_back_pages,
            stats.pauses
        );
        assert!(written.starts_with("errors 0 "), "{vm}: {written}");
        assert!(vm != "warm-2" || stats.pauses == 0, "{stats:?}");
    }
}

#[test]
fn if_a_guest_reports_wrong_places_of_its_files_the_files_of_the_restored_vm_are_right() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    start_first(&lab);
    let hot = save(&lab, "hot", KeepChoice::Hot, true, false);
    lab.exec("first", LIE, LIMIT).unwrap();
    let lied = save(&lab, "lied", KeepChoice::Hot, true, false);
    assert!(lied.referred * 20 < hot.referred);
    assert!(lied.on_disk > hot.on_disk);
    restore(&lab, "lied", "lied-to", false);
    read_again(&lab, "lied-to");
}

#[test]
fn no_vm_is_restored_from_a_hot_snapshot_whose_disk_or_memory_was_changed() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let daemon = lab.daemon();
    start_first(&lab);
    let hot = save(&lab, "hot", KeepChoice::Hot, true, false);
    save(&lab, "packed", KeepChoice::Hot, false, true);
    save(&lab, "cold", KeepChoice::None, false, false);
    lab.stop("first").unwrap();
    // First a block of the disk to which the image refers is changed, then a frame.
    let place = lab.directory().join("snapshots");
    let references = hot.manifest.references.unwrap();
    let table = std::fs::read(place.join("hot/ram.refs")).unwrap();
    let all = memfold_snapshot::refer::decode(&table, u64::MAX, references.sources.len());
    let own = references.sources.iter().position(|s| s.is_relative());
    let found = all.unwrap().into_iter();
    let mut found = found.filter(|r| own.is_some_and(|own| own == r.file as usize));
    let block = found.next().unwrap().block;
    flip(&place.join("hot/disk0.qcow2"), block * 4096 + 5);
    flip(&place.join("packed/ram.zst"), 70_000);
    let base = references.sources.iter().find(|s| s.is_absolute()).unwrap();
    let base = std::fs::File::open(base).unwrap();
    let modified = base.metadata().unwrap().modified().unwrap();
    base.set_modified(modified + Duration::from_secs(1))
        .unwrap();
    let refused = daemon
        .snapshots()
        .restore("cold", &RestoreRequest::new("broken"));
    base.set_modified(modified).unwrap();
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains("was changed since the save; the saved RAM"),
        "{refused}"
    );
    for (snapshot, words) in [
        ("hot", "or a disk that it refers to, was changed"),
        ("packed", "was changed since it was saved"),
    ] {
        let report = daemon.snapshots().verify(snapshot).unwrap();
        // Several chunks may refer to one block.
        assert!(!report.problems.is_empty());
        let refused = daemon
            .snapshots()
            .restore(snapshot, &RestoreRequest::new("broken"));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains(words), "{refused}");
    }
    assert_eq!(laid_out(), 0);
}

//! Tests of hot snapshots, which refer to the disk for cached pages: they are small, and VMs
//! restored from them have a warm page cache.

use std::collections::HashSet;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use memfold_api::{KeepChoice, RestoreRequest, SaveRequest};
use memfold_daemon::DaemonError;
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_snapshot::SnapshotError;
use memfold_units::ByteSize;
use memfold_vm::{DiskFormat, DiskSpec};

use super::snapshots::MEMORY;
use crate::support::{self, BOOT};

/// Shell script that reads files of the disk, and one that was just written, and keeps their
/// checksums in memory.
const READ_FILES: &str = "set -e
head -c 8M /dev/urandom > /var/tmp/new; sync
{ find /usr/bin /usr/lib -type f -size +15k | sort | head -n 1500; echo /var/tmp/new; } > /run/list
xargs -a /run/list sha256sum > /run/sums
awk '/^Cached:/ { print $2 * 1024 }' /proc/meminfo";

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

/// Makes a disk whose bytes look like a qcow2 image over a file of the host.
fn forge(path: &Path) {
    let made = Command::new("qemu-img")
        .args([
            "create",
            "-q",
            "-u",
            "-f",
            "qcow2",
            "-F",
            "raw",
            "-b",
            "/etc/passwd",
        ])
        .arg(path)
        .arg("1M")
        .status();
    assert!(made.unwrap().success());
}

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

#[test]
fn a_snapshot_with_page_cache_as_references_is_small_and_its_restored_vm_has_the_cache() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let limit = Duration::from_secs(300);
    let settings = EngineSettings {
        fold_back_interval: Duration::from_secs(5),
        ..EngineSettings::default()
    };
    let lab = Lab::new(settings).unwrap();
    let daemon = lab.daemon();
    let mut spec = Lab::spec("first", "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    let forged = lab.directory().join("forged.img");
    forge(&forged);
    let mut extra = DiskSpec::new(&forged);
    (extra.read_only, extra.format) = (true, Some(DiskFormat::Raw));
    spec.disks.push(extra);
    lab.start(spec).unwrap();
    lab.wait_ready("first", BOOT).unwrap();
    let cached = lab.exec("first", READ_FILES, limit).unwrap();
    let cached: u64 = cached.trim().parse().unwrap();
    let save = |name: &str, keep, live, compress| {
        let request = SaveRequest {
            keep,
            live,
            compress,
            ..SaveRequest::new("first", name)
        };
        let saved = daemon.snapshots().save(&request).unwrap();
        let list = daemon.snapshots().list().unwrap();
        let info = list.iter().find(|info| info.name == name).unwrap();
        let referred = saved.references.as_ref().map_or(0, |r| r.pages) * 4096;
        println!(
            "{name}: {} on disk, {} by reference of {} cached; {:?}",
            ByteSize(info.disk_bytes),
            ByteSize(referred),
            ByteSize(cached),
            saved.steps
        );
        (saved, info.disk_bytes, referred)
    };
    // Another file of this name is not the one that the VM has open.
    let aside = forged.with_extension("aside");
    std::fs::rename(&forged, &aside).unwrap();
    std::fs::copy(&aside, &forged).unwrap();
    let refused = daemon.snapshots().save(&SaveRequest::new("first", "hot"));
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("was replaced after"), "{refused}");
    std::fs::rename(&aside, &forged).unwrap();
    lab.exec("first", READ_FILES, limit).unwrap();

    let turns = support::file("turns.py", TURNS) + START_TURNS;
    lab.exec("first", &turns, limit).unwrap();
    let (hot, hot_bytes, referred) = save("hot", KeepChoice::Hot, true, false);
    // The guest wrote the content of the raw disk, even if it looks like an image over a file of
    // the host.
    assert!(hot.disks[1].backing.is_empty(), "{:?}", hot.disks[1]);
    let (_, packed_bytes, _) = save("packed", KeepChoice::Hot, false, true);
    lab.exec("first", LIE, limit).unwrap();
    let (_, lied_bytes, lied) = save("lied", KeepChoice::Hot, true, false);
    lab.exec("first", "umount /sys/dev/block", limit).unwrap();
    assert!(lied * 20 < referred, "{lied} of {referred}");
    assert!(lied_bytes > hot_bytes, "{lied_bytes}, {hot_bytes}");
    let (_, cold_bytes, _) = save("cold", KeepChoice::None, false, false);
    // All cached memory counts, also shared memory and files that were never written to disk.
    assert!(referred * 10 > cached * 7, "{referred} of {cached}");
    assert!(
        hot_bytes * 10 <= cold_bytes * 13,
        "{hot_bytes}, {cold_bytes}"
    );
    assert!(packed_bytes * 2 < hot_bytes, "{packed_bytes}, {hot_bytes}");

    let restore = RestoreRequest::new("lied-to");
    daemon.snapshots().restore("lied", &restore).unwrap();
    daemon.vms().wait_agent("lied-to", BOOT).unwrap();
    lab.exec("lied-to", READ_AGAIN, limit).unwrap();
    lab.stop("lied-to").unwrap();

    let mut read = Vec::new();
    for (snapshot, vm) in [("hot", "warm"), ("packed", "warm-2"), ("cold", "cool")] {
        let began = Instant::now();
        let request = RestoreRequest {
            // It is not known yet which pages the VM will use.
            prefetch: true,
            ..RestoreRequest::new(vm)
        };
        daemon.snapshots().restore(snapshot, &request).unwrap();
        let ran = began.elapsed();
        daemon.vms().wait_agent(vm, BOOT).unwrap();
        let from_disk = lab.exec(vm, READ_AGAIN, limit).unwrap();
        let from_disk: u64 = from_disk.trim().parse().unwrap();
        println!(
            "{vm} ran after {ran:?}, read {} from its disk",
            ByteSize(from_disk)
        );
        read.push(from_disk);
    }
    assert!(read[0] * 20 < read[2] && read[1] * 20 < read[2], "{read:?}");
    // Only the compressed image is laid out in memory; the other is mapped where it is.
    assert_eq!(laid_out(), 1);
    let shelf = memfold_snapshot::Shelf::open(&lab.directory().join("snapshots"));
    let warm = memfold_snapshot::restore::users(&shelf, "hot").unwrap();
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", warm[0].as_raw_nonzero())).unwrap();
    let references = hot.references.as_ref().unwrap();
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
    lab.exec("first", rewrite, limit).unwrap();
    let (later, ..) = save("later", KeepChoice::Auto, false, false);
    let reason = later.keep_reason.unwrap();
    assert!(reason.starts_with("page cache of "), "{reason}");
    assert!(daemon.snapshots().remove("hot").is_err());
    daemon.snapshots().remove("later").unwrap();
    save("latest", KeepChoice::None, false, false);
    lab.exec("warm", READ_AGAIN, limit).unwrap();
    // The restored VM's RAM is a view of memory, which can be write-protected like that of the
    // saved VM.
    let again = SaveRequest {
        live: true,
        keep: KeepChoice::Hot,
        ..SaveRequest::new("warm-2", "again")
    };
    let saved = daemon.snapshots().save(&again).unwrap();
    println!("saved again, stood still for {:.0} ms", saved.pause_ms);
    daemon
        .snapshots()
        .restore("again", &RestoreRequest::new("heir"))
        .unwrap();
    daemon.vms().wait_agent("heir", BOOT).unwrap();
    lab.exec("heir", READ_AGAIN, limit).unwrap();
    lab.stop("heir").unwrap();
    // The pages that the first VM used are prefetched for the next one.
    let set = lab.directory().join("snapshots/hot/working-set");
    let end = Instant::now() + Duration::from_secs(120);
    while !set.exists() {
        assert!(Instant::now() < end, "nobody noted what was used first");
        std::thread::sleep(Duration::from_millis(100));
    }
    let prefetch = RestoreRequest {
        prefetch: true,
        ..RestoreRequest::new("fetched")
    };
    daemon.snapshots().restore("hot", &prefetch).unwrap();
    daemon.vms().wait_agent("fetched", BOOT).unwrap();
    let from_disk = lab.exec("fetched", READ_AGAIN, limit).unwrap();
    assert!(from_disk.trim().parse::<u64>().unwrap() * 20 < read[2]);
    let report = daemon.reports().report().unwrap();
    let fetched = report.ledger.vms.iter().find(|vm| vm.name == "fetched");
    println!("fetched: {:?}", fetched.map(|vm| vm.file_resident_bytes));
    // The VM "warm" has these pages too, and they are in memory once.
    let saved = report.ledger.host.saved_by_clones_bytes;
    println!("clones save {} MiB", saved >> 20);
    assert!(saved > 50 << 20 && saved < 400 << 20, "{saved}");
    lab.stop("fetched").unwrap();
    // This also holds for a daemon that does not know what an earlier one has laid out.
    for (name, users) in [("hot", 1), ("packed", 1), ("cold", 1)] {
        let found = memfold_snapshot::restore::users(&shelf, name).unwrap();
        assert_eq!(found.len(), users, "{name}");
    }
    assert!(matches!(
        daemon.snapshots().remove("hot"),
        Err(DaemonError::Snapshot(SnapshotError::InUse { .. }))
    ));
    // Pages of a VM whose RAM is a view of memory are folded back while it runs; those of a VM that
    // maps a file, at pauses. The next pass begins only when the CPU time of the last one is a
    // small share of the time since. On a slow machine, that takes most of a minute.
    let clones = ["warm", "warm-2", "cool"];
    lab.fold(true).unwrap();
    let stats = support::wait_stats(
        "pages return to the snapshot",
        Duration::from_secs(300),
        || lab.stats().unwrap(),
        |stats| {
            let back = |name: &&str| support::vm(stats, name).folded_back_pages;
            clones.iter().all(|name| back(name) > 2000)
        },
    );
    for vm in clones {
        let written = lab.exec(vm, STOP_TURNS, limit).unwrap();
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
    for vm in clones.iter().chain(&["first"]) {
        lab.stop(vm).unwrap();
    }
    let end = Instant::now() + Duration::from_secs(60);
    while laid_out() > 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(laid_out(), 0, "memory that nobody needs");

    // First a block of the disk to which the image refers is changed, then a frame.
    let place = lab.directory().join("snapshots");
    let references = hot.references.unwrap();
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

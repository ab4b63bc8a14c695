//! Tests of snapshots with disks that a VM writes in place: the snapshot's disk and memory are of
//! one instant, and the VM keeps its own disk.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use memfold_api::{Client, KeepChoice, RestoreRequest, SaveRequest};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_testkit::patience;
use memfold_units::ByteSize;
use memfold_vm::{Aio, CacheMode, DiskFormat, DiskSpec, VmSpec};

use super::snapshots::{Small, VERIFY, pause_of_writers};
use crate::served::{exec, wait_agent};
use crate::support::{self, BOOT};

const MEMORY: ByteSize = ByteSize::mib(384);

/// Program that writes to disks; [`CHECK_DISKS`] checks its data.
pub const WRITER: &str = include_str!("../guest/disk.py");

/// Script that checks the writer's data on its disks.
pub const CHECK_DISKS: &str = r"set -e
systemctl is-active -q writer || { systemctl status writer; exit 1; }
rm -f /run/disk.checked; touch /run/disk.check
while [ -e /run/disk.check ]; do sleep 0.1; done
cat /run/disk.checked";

/// Returns the shell script that starts the writer on disks.
pub fn write_to(disks: &str) -> String {
    let pause = pause_of_writers(0.02);
    support::file("disk.py", WRITER)
        + &format!("systemd-run -q --unit=writer python3 /opt/disk.py {pause} {disks}; sleep 2")
}

/// Makes two disks of 64 MiB that are written in place: a raw one that bypasses the host's page
/// cache, and a qcow2.
pub fn two_disks(place: &Path) -> Vec<DiskSpec> {
    let make = |name: &str, format, text: &str, bytes: u64| {
        let path = place.join(name);
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", text])
            .arg(&path)
            .arg(bytes.to_string())
            .status();
        assert!(made.unwrap().success());
        let mut disk = DiskSpec::new(path);
        disk.format = Some(format);
        disk
    };
    // The size is not a whole number of clusters.
    let mut direct = make("plain.raw", DiskFormat::Raw, "raw", (64 << 20) + 4096);
    (direct.cache, direct.aio) = (CacheMode::None, Aio::IoUring);
    let buffered = make("plain.qcow2", DiskFormat::Qcow2, "qcow2", 64 << 20);
    vec![direct, buffered]
}

/// Makes a raw disk for reading only, whose bytes look like a qcow2 image over a file of the host.
fn forged_disk(path: PathBuf) -> DiskSpec {
    let forge = [
        "create",
        "-q",
        "-u",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        "/etc/passwd",
    ];
    let mut command = Command::new("qemu-img");
    let made = command.args(forge).arg(&path).arg("1M").status();
    assert!(made.unwrap().success());
    let mut disk = DiskSpec::new(path);
    (disk.read_only, disk.format) = (true, Some(DiskFormat::Raw));
    disk
}

/// Returns the description of a VM with disks below `place` that it writes in place, and one that
/// it only reads.
pub fn spec(name: &str, place: &Path) -> VmSpec {
    let mut spec = Lab::spec(name, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    spec.disks.extend(two_disks(place));
    spec.disks.push(forged_disk(place.join("forged.img")));
    spec
}

/// Returns the block nodes of QEMU that a save has added and left.
pub fn left_nodes(state: &Path, vm: &str) -> Vec<String> {
    let flat = serde_json::json!({ "flat": true });
    let nodes = support::qmp(state, vm)
        .execute("query-named-block-nodes", flat)
        .unwrap();
    let names = nodes.as_array().unwrap().iter();
    let names = names.filter_map(|node| Some(node["node-name"].as_str()?.to_owned()));
    names.filter(|name| name.starts_with("save-")).collect()
}

/// Returns the MD5 sum of a disk's content.
fn sum(disk: &Path, format: &str) -> String {
    let raw = disk.with_extension("sum");
    let made = Command::new("qemu-img")
        .args(["convert", "-f", format, "-O", "raw"])
        .args([disk, &raw])
        .status();
    assert!(made.unwrap().success());
    let sum = Command::new("md5sum").arg(&raw).output().unwrap().stdout;
    std::fs::remove_file(raw).unwrap();
    String::from_utf8(sum).unwrap()[..32].to_owned()
}

/// Waits until a guest answers. Then the programs that rewrite its memory and write to its disks
/// both check all of their data at the same time.
pub fn verify(client: &Client, vm: &str) {
    wait_agent(client, vm);
    let script = format!(
        "({VERIFY}) > /run/memory.said & ({CHECK_DISKS}) > /run/disks.said & wait; cat /run/memory.said /run/disks.said"
    );
    let said = exec(client, vm, &script).stdout;
    println!("{vm}: {}", said.trim().replace('\n', "; "));
    let [memory, disks] = ["errors 0 rounds ", "errors 0 operations "];
    let (first, second) = said.split_once('\n').unwrap_or_default();
    assert!(
        first.starts_with(memory) && second.starts_with(disks),
        "{vm}: {said}"
    );
}

#[test]
fn a_save_copies_disks_without_overlay_into_the_snapshot_and_the_vm_keeps_its_disks() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let limit = Duration::from_secs(300);
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let (daemon, place) = (lab.daemon(), lab.directory());
    let mut spec = spec("plain", place);
    // QEMU drops its rights and can still be saved, and so can its clones.
    spec.user = Some("nobody".into());
    let files: Vec<PathBuf> = spec.disks[1..3]
        .iter()
        .map(|disk| disk.path.clone())
        .collect();
    lab.start_warm(spec).unwrap();
    lab.wait_ready("plain", BOOT).unwrap();
    lab.exec("plain", &write_to("/dev/vdb /dev/vdc"), limit)
        .unwrap();
    let check = |vm: &str| {
        let said = lab.exec(vm, CHECK_DISKS, limit).unwrap();
        println!("{vm}: {}", said.trim());
        assert!(said.starts_with("errors 0 operations "), "{vm}: {said}");
    };
    let save = |name: &str, live, keep| {
        let request = SaveRequest {
            live,
            keep,
            ..SaveRequest::new("plain", name)
        };
        daemon.snapshots().save(&request)
    };
    // Each attempt has more free space, until there is enough for the memory but not for the disks,
    // which is noticed only when the VM runs again.
    let fill = "dd if=/dev/urandom of=/dev/vdb bs=1M seek=44 count=20 oflag=direct 2>&1";
    lab.exec("plain", fill, limit).unwrap();
    let shelf = place.join("snapshots");
    let late = (40..400).step_by(15).find(|&room| {
        let _full = Small::mount(&shelf, room);
        let failed = save("full", true, KeepChoice::All).unwrap_err();
        let words = format!("{:#}", anyhow::Error::from(failed));
        println!("{room} MiB: {words}");
        assert_eq!(left_nodes(place, "plain"), Vec::<String>::new());
        let late = words.contains("cannot copy disk 1");
        assert!(late || words.contains("No space left"), "{words}");
        late
    });
    assert!(late.is_some());
    check("plain");
    for (number, (name, live, keep)) in [
        ("live", true, KeepChoice::None),
        ("still", false, KeepChoice::All),
        ("hot", true, KeepChoice::Hot),
    ]
    .into_iter()
    .enumerate()
    {
        let saved = save(name, live, keep).unwrap();
        println!(
            "{name}: stood still for {:.0} ms; {:?}",
            saved.pause_ms, saved.steps
        );
        assert_eq!(left_nodes(place, "plain"), Vec::<String>::new());
        let saved = saved.disks.iter().map(|disk| disk.read_only);
        assert_eq!(saved.collect::<Vec<_>>(), [false, false, false, true]);
        let vm = format!("copy-{number}");
        daemon
            .snapshots()
            .restore(name, &RestoreRequest::new(&vm))
            .unwrap();
        daemon.vms().wait_agent(&vm, patience(BOOT)).unwrap();
        check(&vm);
        check("plain");
        let report = daemon.snapshots().verify(name).unwrap();
        assert!(report.problems.is_empty(), "{:?}", report.problems);
        lab.stop(&vm).unwrap();
    }
    // The VM gets disks of its own, which outlive it.
    let own = RestoreRequest {
        disks: Some(place.join("nowhere")),
        ..RestoreRequest::new("heir")
    };
    let refused = daemon
        .snapshots()
        .restore("live", &own)
        .unwrap_err()
        .to_string();
    assert!(refused.contains("nowhere/heir-disk0.qcow2"), "{refused}");
    let own = RestoreRequest {
        disks: Some(place.to_owned()),
        ..own
    };
    daemon.snapshots().restore("live", &own).unwrap();
    daemon.vms().wait_agent("heir", patience(BOOT)).unwrap();
    check("heir");
    let mark = "systemctl stop writer; echo mine | dd of=/dev/vdb bs=4k count=1 conv=sync oflag=direct 2>&1; sync";
    lab.exec("heir", mark, limit).unwrap();
    lab.stop("heir").unwrap();
    let heir = place.join("heir-disk1.qcow2");
    let head = Command::new("qemu-img")
        .args(["dd", "-f", "qcow2", "-O", "raw", "bs=512", "count=1"])
        .args([
            format!("if={}", heir.display()),
            format!("of={}", heir.with_extension("head").display()),
        ])
        .status();
    assert!(head.unwrap().success());
    let head = std::fs::read(heir.with_extension("head")).unwrap();
    assert_eq!(&head[..5], b"mine\n");
    let refused = daemon.snapshots().restore("live", &own).unwrap_err();
    let refused = format!("{:#}", anyhow::Error::from(refused));
    assert!(refused.contains("exists"), "{refused}");
    assert!(heir.exists());

    // Data that the VM itself has written is in its own files.
    let sums = "systemctl stop writer; for disk in vdb vdc; do md5sum < /dev/$disk; done";
    let in_guest = lab.exec("plain", sums, limit).unwrap();
    lab.stop("plain").unwrap();
    for ((file, format), line) in files.iter().zip(["raw", "qcow2"]).zip(in_guest.lines()) {
        assert!(line.starts_with(&sum(file, format)), "{line}");
    }
}

#[test]
fn a_save_is_refused_after_a_disk_file_was_replaced_and_a_raw_disk_is_never_read_as_an_image() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let snapshots = lab.daemon().snapshots();
    lab.start_warm(spec("plain", lab.directory())).unwrap();
    lab.wait_ready("plain", BOOT).unwrap();
    // Another file of this name is not the one that the VM has open.
    let forged = lab.directory().join("forged.img");
    let aside = forged.with_extension("aside");
    std::fs::rename(&forged, &aside).unwrap();
    std::fs::copy(&aside, &forged).unwrap();
    let refused = snapshots.save(&SaveRequest::new("plain", "hot"));
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("was replaced after"), "{refused}");
    std::fs::rename(&aside, &forged).unwrap();
    // The guest wrote the content of the raw disk, even if it looks like an image over a file of
    // the host.
    let request = SaveRequest {
        live: true,
        keep: KeepChoice::Hot,
        ..SaveRequest::new("plain", "hot")
    };
    let saved = snapshots.save(&request).unwrap();
    assert!(saved.disks[3].backing.is_empty(), "{:?}", saved.disks[3]);
}

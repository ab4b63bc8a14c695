//! Tests of forks: VMs that continue a running VM from one instant, while that VM goes on.

use std::time::Duration;

use memfold_api::{ForkReport, ForkRequest, RestoreRequest, SaveRequest};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab, wait_for};
use memfold_snapshot::Renew;
use memfold_testkit::{dose, patience};
use memfold_units::ByteSize;

use super::disks::{CHECK_DISKS, write_to};
use super::snapshots::{MEMORY, VERIFY, rewrite_memory};
use crate::support::{self, BOOT};

const LIMIT: Duration = Duration::from_secs(300);

/// Forks of the running VM, each of which is forked again.
const FORKS: usize = 1;

/// Bytes that a guest writes before each fork.
const WRITTEN: ByteSize = ByteSize::mib(12);

/// Shell script that writes to memory and past the page cache to the disk, and prints the checksum
/// of both.
fn write(name: &str) -> String {
    let mib = WRITTEN.0 >> 20;
    format!(
        "set -e; mkdir -p /dev/shm/held; head -c {mib}M /dev/urandom > /dev/shm/held/{name}\n\
         dd if=/dev/urandom of=/var/tmp/direct-{name} bs=1M count=2 oflag=direct status=none\n{SUMS}"
    )
}

const SUMS: &str = "cat /dev/shm/held/* | md5sum; for file in /var/tmp/direct-*; do \
                    dd if=$file bs=1M iflag=direct status=none; done | md5sum";

fn start(lab: &Lab, snapshot: &str, vm: &str) {
    let request = RestoreRequest {
        renew: Renew::Network,
        ..RestoreRequest::new(vm)
    };
    lab.daemon()
        .snapshots()
        .restore(snapshot, &request)
        .unwrap();
}

/// Forks a VM; with `wait`, returns when the VM shares its memory with the new layer.
fn fork(lab: &Lab, vm: &str, wait: bool) -> ForkReport {
    let request = ForkRequest {
        wait,
        ..ForkRequest::default()
    };
    let report = lab.daemon().snapshots().fork(vm, &request);
    let report = report.unwrap();
    println!("{vm}: {report:?}");
    report
}

/// Bytes of memory that QEMU's process of a VM holds, shared pages in proportion.
fn pss(lab: &Lab, vms: &[&str]) -> u64 {
    let of = |vm: &&str| {
        let pid = lab.pid(vm).unwrap();
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
        let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
        kib.unwrap() << 10
    };
    vms.iter().map(of).sum()
}

/// Returns whether a VM maps the memory of a snapshot.
fn maps(lab: &Lab, vm: &str, snapshot: &str) -> bool {
    let pid = lab.pid(vm).unwrap();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.contains(&format!("/{snapshot}/ram"))
}

fn check(lab: &Lab, vm: &str, sums: &str) {
    let said = lab.exec(vm, VERIFY, LIMIT).unwrap();
    assert!(said.starts_with("errors 0 rounds "), "{vm}: {said}");
    assert_eq!(lab.exec(vm, SUMS, LIMIT).unwrap(), sums, "{vm}");
}

#[test]
fn vms_forked_from_a_running_vm_and_vms_forked_from_them_have_its_memory_and_its_disk() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let spec = Lab::spec("root", "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    lab.start_warm(spec).unwrap();
    lab.wait_ready("root", BOOT).unwrap();
    lab.exec("root", &rewrite_memory(), LIMIT).unwrap();
    let sums = lab.exec("root", &write("root"), LIMIT).unwrap();
    // The VM runs from no snapshot, so the first fork has all pages.
    let first = fork(&lab, "root", true);
    assert_eq!(first.parent, None);
    let before = pss(&lab, &["root"]);
    start(&lab, &first.snapshot, "child");
    lab.daemon()
        .vms()
        .wait_agent("child", patience(BOOT))
        .unwrap();
    check(&lab, "child", &sums);
    check(&lab, "root", &sums);
    // The child alone holds little memory: what both hold is there once.
    let both = pss(&lab, &["root", "child"]);
    println!(
        "PSS: {} before, {} of both",
        ByteSize(before),
        ByteSize(both)
    );
    lab.stop("root").unwrap();
    // Forks of the child, which writes before each, and of these.
    let mut expected = vec![("child".to_owned(), sums)];
    for number in 1..=FORKS {
        let now = lab
            .exec("child", &write(&format!("child-{number}")), LIMIT)
            .unwrap();
        let report = fork(&lab, "child", true);
        assert!(report.parent.is_some());
        assert!(report.own_bytes >= WRITTEN.0, "{report:?}");
        assert!(report.shared_bytes > Some(0), "{report:?}");
        let name = format!("fork-{number}");
        start(&lab, &report.snapshot, &name);
        lab.daemon()
            .vms()
            .wait_agent(&name, patience(BOOT))
            .unwrap();
        check(&lab, &name, &now);
        expected[0].1.clone_from(&now);
        let own = lab.exec(&name, &write(&name), LIMIT).unwrap();
        let again = fork(&lab, &name, false);
        assert_eq!(again.shared_bytes, None);
        // A save waits until the VM shares its memory, and is a layer on top of the fork's.
        let after = format!("{name}-after");
        let saved = lab
            .daemon()
            .snapshots()
            .save(&SaveRequest::new(&name, &after));
        let parent = saved.unwrap().parent.unwrap();
        assert_eq!(parent.name, again.snapshot);
        assert!(maps(&lab, &name, &again.snapshot));
        lab.daemon().snapshots().remove(&after).unwrap();
        let grandchild = format!("fork-{number}-again");
        start(&lab, &again.snapshot, &grandchild);
        lab.daemon()
            .vms()
            .wait_agent(&grandchild, patience(BOOT))
            .unwrap();
        check(&lab, &grandchild, &own);
        check(&lab, &name, &own);
        lab.stop(&name).unwrap();
        expected.push((grandchild, own));
    }
    for (vm, sums) in &expected {
        check(&lab, vm, sums);
    }
    // A fork can be saved under a name, and the saved VM is right without the forks.
    let snapshots = lab.daemon().snapshots();
    snapshots.save(&SaveRequest::new("child", "kept")).unwrap();
    // The disk of the VM is built on a file that would be replaced.
    let why = snapshots.compact("kept").unwrap_err().to_string();
    assert!(why.contains("in use by VM 'child'"), "{why}");
    for (vm, _) in &expected {
        lab.stop(vm).unwrap();
    }
    assert!(snapshots.compact("kept").unwrap().copied_bytes > 0);
    assert_eq!(snapshots.compact("kept").unwrap().copied_bytes, 0);
    assert_eq!(snapshots.verify("kept").unwrap().problems, [""; 0]);
    // Layers that no VM needs go away by themselves.
    let only_kept = || {
        let names = snapshots.list()?.into_iter().map(|snapshot| snapshot.name);
        Ok((names.collect::<Vec<_>>() == ["kept"]).then_some(()))
    };
    let pace = (patience(Duration::from_secs(120)), Duration::from_secs(1));
    wait_for("the forks' layers were not removed", pace, only_kept).unwrap();
    start(&lab, "kept", "last");
    lab.daemon()
        .vms()
        .wait_agent("last", patience(BOOT))
        .unwrap();
    check(&lab, "last", &expected[0].1);
}

/// Rounds after which the newest fork takes the place of the VM that is forked.
const SUCCEED_EVERY: u64 = 4;

/// Script that starts a program which rewrites files until `/run/stop` exists.
fn rewrite_files() -> String {
    support::file("rewrite.py", support::REWRITE)
        + "systemd-run -q --unit=files -p StandardOutput=file:/run/files.out \\\n\
           python3 /opt/rewrite.py /var/tmp/files 100000 forks /run/stop"
}

/// Script that ends this program, which then reads all files three ways, and prints its result.
const END_FILES: &str = "touch /run/stop
while systemctl is-active -q files; do sleep 0.1; done
cat /run/files.out";

/// Makes the programs of a guest check its memory and what they wrote past the page cache.
fn check_memory_and_disk(lab: &Lab, vm: &str, round: u64) {
    for check in [VERIFY, CHECK_DISKS] {
        let said = lab.exec(vm, check, LIMIT).unwrap();
        assert!(said.starts_with("errors 0 "), "{vm}, round {round}: {said}");
    }
}

#[test]
fn a_fork_at_a_random_moment_has_the_memory_files_and_disk_of_that_moment() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let rounds = dose("MEMFOLD_FORK_ROUNDS", 2);
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let spec = Lab::spec("root", "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    lab.start_warm(spec).unwrap();
    lab.wait_ready("root", BOOT).unwrap();
    lab.fold(true).unwrap();
    // The disk's writer uses a file, whose blocks it reads and writes past the page cache.
    let disk = "truncate -s 48M /var/tmp/direct; ".to_owned() + &write_to("/var/tmp/direct");
    for begin in [rewrite_memory(), rewrite_files(), disk] {
        lab.exec("root", &begin, LIMIT).unwrap();
    }
    let mut parent = "root".to_owned();
    for round in 1..=rounds {
        let wait = xxhash_rust::xxh3::xxh3_64(&round.to_le_bytes()) % 900;
        std::thread::sleep(Duration::from_millis(wait));
        let report = fork(&lab, &parent, round % 2 == 0);
        let child = format!("fork-{round}");
        start(&lab, &report.snapshot, &child);
        lab.daemon()
            .vms()
            .wait_agent(&child, patience(BOOT))
            .unwrap();
        check_memory_and_disk(&lab, &child, round);
        check_memory_and_disk(&lab, &parent, round);
        // The VM that is not forked again checks its files, too, and ends.
        let ends = if round % SUCCEED_EVERY == 0 {
            std::mem::replace(&mut parent, child)
        } else {
            child
        };
        let said = lab.exec(&ends, END_FILES, LIMIT).unwrap();
        assert!(
            said.starts_with("rewrite errors 0 operations "),
            "{ends}, round {round}: {said}"
        );
        lab.stop(&ends).unwrap();
    }
    let said = lab.exec(&parent, END_FILES, LIMIT).unwrap();
    assert!(said.starts_with("rewrite errors 0 "), "{parent}: {said}");
}

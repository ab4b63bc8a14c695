//! Tests of snapshots of real guests: a saved VM keeps running, and a VM restored from the snapshot
//! has the state of the instant of the save.

use std::collections::HashSet;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use memfold_api::{KeepChoice, RestoreRequest, SaveRequest};
use memfold_daemon::DaemonError;
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_snapshot::{Manifest, Renew, Renewal, SnapshotError};
use memfold_testkit::{dose, patience, skip};
use memfold_units::ByteSize;
use memfold_vm::Network;

use crate::support::{self, BOOT};

pub const MEMORY: ByteSize = ByteSize::mib(384);

/// Shell script that starts a process whose memory is in no file, and which prints the checksum of
/// this memory again and again.
const HOLDER: &str = r#"cat > /run/holder.py <<'END'
import hashlib, os, time
held = bytearray(os.urandom(48 << 20))
open("/run/before", "w").write(hashlib.sha256(held).hexdigest())
while True:
    open("/run/now.new", "w").write(hashlib.sha256(held).hexdigest() + " " + str(time.monotonic()))
    os.rename("/run/now.new", "/run/now")
    time.sleep(0.5)
END
systemd-run -q --unit=holder python3 /run/holder.py
while [ ! -s /run/now ]; do sleep 0.2; done
head -c 32 /dev/urandom | sha256sum | cut -c1-32 | tee /run/nonce > /var/tmp/nonce
echo before > /var/tmp/state; sync; cat /run/nonce"#;

/// Shell script that checks a restored guest: the same memory, a process that continues, and the
/// disk of the same instant.
const CHECK: &str = r#"set -e
one=$(cat /run/now); two=$one; left=100
# A sum over all that it holds takes emulated guests on a busy machine seconds.
while [ "$one" = "$two" ] && [ $left -gt 0 ]; do sleep 1; two=$(cat /run/now); left=$((left - 1)); done
[ "$one" != "$two" ] || { echo the process stands still; exit 1; }
[ "${two%% *}" = "$(cat /run/before)" ] || { echo memory differs; exit 1; }
cmp /run/nonce /var/tmp/nonce
cat /var/tmp/state /run/nonce"#;

/// Program that takes, writes, checks and frees memory.
pub const REWRITER: &str = include_str!("../guest/rewriter.py");

/// Returns how long programs that write in guests all the time pause after each block, in seconds:
/// `usual`, which leaves the host's cores to others, or the share of it that the soak asks for.
pub fn pause_of_writers(usual: f64) -> f64 {
    usual * dose("MEMFOLD_WRITERS_PAUSE_PERCENT", 100) as f64 / 100.0
}

/// Returns the shell script that starts the rewriter, with at most 10,000 pages.
pub fn rewrite_memory() -> String {
    let pause = pause_of_writers(0.1);
    format!(
        "cat > /run/rewriter.py <<'END'\n{REWRITER}END\n\
         systemd-run -q --unit=rewriter python3 /run/rewriter.py 10000 /var/tmp/rewritten {pause}\n\
         while [ ! -s /run/rewriter ]; do sleep 0.2; done"
    )
}

/// Shell script that makes the rewriter check all of its memory, and prints the result.
pub const VERIFY: &str = r"set -e
systemctl is-active -q rewriter || { systemctl status rewriter; exit 1; }
rm -f /run/verified; touch /run/verify
while [ -e /run/verify ]; do sleep 0.1; done
cat /run/verified";

/// Number of saves of one VM before a new VM is started, because each save makes the chain of its
/// disk longer.
const SAVES: u64 = 10;

#[test]
fn memory_that_is_constantly_allocated_written_and_freed_is_restored_as_it_was_saved() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let rounds = dose("MEMFOLD_SNAPSHOT_ROUNDS", 2);
    let limit = Duration::from_secs(300);
    let (mut free, mut kept) = (Vec::new(), 0);
    for first in (0..rounds).step_by(usize::try_from(SAVES).unwrap()) {
        let lab = Lab::new(EngineSettings::default()).unwrap();
        let spec = Lab::spec("rewriting", "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
        lab.start_warm(spec).unwrap();
        lab.wait_ready("rewriting", BOOT).unwrap();
        lab.fold(true).unwrap();
        let script = format!(
            "cat > /run/rewriter.py <<'END'\n{REWRITER}END\n\
             systemd-run -q --unit=rewriter python3 /run/rewriter.py 30000 /var/tmp/rewritten\n\
             while [ ! -s /run/rewriter ]; do sleep 0.2; done\n\
             systemctl set-property --runtime memfold-agent.service CPUQuota=15%"
        );
        // The agent is slow: between its list of free pages and the stop, many of these pages are
        // used and written to.
        lab.exec("rewriting", &script, limit).unwrap();
        for round in first..rounds.min(first + SAVES) {
            // The two differ only in the time of the save.
            let wait = xxhash_rust::xxh3::xxh3_64(&round.to_le_bytes()) % 900;
            std::thread::sleep(Duration::from_millis(wait));
            let request = SaveRequest {
                live: round % 3 != 1,
                keep: [
                    KeepChoice::Hot,
                    KeepChoice::None,
                    KeepChoice::Hot,
                    KeepChoice::All,
                ][usize::try_from(round % 4).unwrap()],
                compress: round % 2 == 0,
                ..SaveRequest::new("rewriting", format!("moment-{round}"))
            };
            let saved = lab.daemon().snapshots().save(&request).unwrap();
            assert_eq!(saved.free_kept, None);
            free.push(saved.counts.free_pages);
            assert_eq!(saved.live, request.live);
            println!(
                "moment {round}: live {}, keep {:?}, stood still for {:.0} ms, {} pages kept, {} of {} on disks, packed {:?}, {:?}",
                saved.live,
                saved.keep,
                saved.pause_ms,
                saved.kept_pages,
                saved.references.as_ref().map_or(0, |r| r.pages),
                saved.counts.saved_pages,
                saved.packed.as_ref().map(|packed| packed.bytes),
                saved.steps
            );
            kept += saved.kept_pages;
            let copy = RestoreRequest::new("copy");
            lab.daemon()
                .snapshots()
                .restore(&request.name, &copy)
                .unwrap();
            lab.daemon()
                .vms()
                .wait_agent("copy", patience(BOOT))
                .unwrap();
            for vm in ["copy", "rewriting"] {
                let said = lab.exec(vm, VERIFY, limit).unwrap();
                assert!(
                    said.starts_with("errors 0 rounds "),
                    "{vm}, moment {round}: {said}"
                );
            }
            lab.stop("copy").unwrap();
        }
    }
    println!("free pages left out {free:?}");
    assert!(kept > 0, "the guest wrote to nothing before it was copied");
    assert!(free.iter().all(|&pages| pages > 0));
}

/// Adds a block node to the VM's first disk like a save does, for a snapshot that was never
/// completed. Returns the node's file.
fn add_unused_overlay(state: &Path, vm: &str) -> PathBuf {
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos();
    let node = format!("disk0-{now:x}");
    let file = state.join("unused.qcow2");
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2"])
        .args(["-b", "/nowhere/cut/disk0.qcow2"])
        .arg(&file)
        .arg("1G")
        .status();
    assert!(made.unwrap().success());
    let arguments = serde_json::json!({
        "driver": "qcow2", "node-name": node, "backing": null,
        "file": { "driver": "file", "node-name": format!("{node}-file"), "filename": file },
    });
    let mut qmp = support::qmp(state, vm);
    qmp.execute("blockdev-add", arguments).unwrap();
    file
}

/// Returns the block nodes of the overlays of a VM's first disk.
fn disk_nodes(state: &Path, vm: &str) -> Vec<String> {
    let flat = serde_json::json!({ "flat": true });
    let mut qmp = support::qmp(state, vm);
    let nodes = qmp.execute("query-named-block-nodes", flat).unwrap();
    let names = nodes.as_array().unwrap().iter();
    names
        .filter_map(|node| Some(node["node-name"].as_str()?.to_owned()))
        .filter(|name| name.starts_with("disk0") && !name.ends_with("-file"))
        .collect()
}

/// A small file system that is mounted on a directory until this is dropped.
pub struct Small<'a>(&'a Path);

impl<'a> Small<'a> {
    pub fn mount(place: &'a Path, mib: u64) -> Self {
        std::fs::create_dir_all(place).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "memfold-test"])
            .arg(place)
            .status();
        assert!(mounted.unwrap().success());
        Self(place)
    }
}

impl Drop for Small<'_> {
    fn drop(&mut self) {
        let left = std::fs::read_dir(self.0).map_or(0, Iterator::count);
        let away = Command::new("umount").arg("--lazy").arg(self.0).status();
        if !std::thread::panicking() {
            assert!(away.unwrap().success());
            assert_eq!(left, 0, "files of a save that failed");
        }
    }
}

/// Shell script that prints the VM's identities, one in each line.
const WHO: &str = "until address=$(cat /sys/class/net/e*/address 2> /dev/null); do sleep 0.1; done
hostname; cat /etc/machine-id; echo $address";

/// Shell script that prints the key which the guest's SSH server shows to clients; it must be the
/// one in the server's file.
const SSH_KEY: &str = "set -e
served=$(ssh-keyscan -q -T 60 -t ed25519 127.0.0.1 2> /dev/null | cut -d' ' -f3)
[ \"$served\" = \"$(cut -d' ' -f2 /etc/ssh/ssh_host_ed25519_key.pub)\" ]
echo \"$served\"";

fn set_apart(lab: &Lab, vm: &str) -> Renewal {
    let end = Instant::now() + patience(BOOT);
    loop {
        let vms = lab.daemon().vms().list();
        let found = vms.iter().find(|info| info.name == vm).unwrap();
        let renewal = found.renewal.clone().expect("it was restored");
        if !renewal.pending {
            return renewal;
        }
        assert!(Instant::now() < end, "{vm} is not set apart");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Checks that a restore is refused while `first` runs, for a snapshot whose guest has neither an
/// agent nor the driver for VM generation IDs.
fn refuses_twins(lab: &Lab, name: &str) {
    let place = lab.directory().join("snapshots").join(name);
    let text = std::fs::read_to_string(place.join("manifest.json")).unwrap();
    let sum = std::fs::read(place.join("manifest.sum")).unwrap();
    let mut manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    manifest["agent"] = false.into();
    manifest["generation_id"] = false.into();
    let other = serde_json::to_string(&manifest).unwrap();
    std::fs::write(place.join("manifest.json"), &other).unwrap();
    let digest = xxhash_rust::xxh3::xxh3_128(other.as_bytes());
    std::fs::write(place.join("manifest.sum"), format!("{digest:032x}\n")).unwrap();
    let mut request = RestoreRequest::new("twin");
    let refused = lab
        .daemon()
        .snapshots()
        .restore(name, &request)
        .unwrap_err();
    assert!(matches!(
        refused,
        DaemonError::Snapshot(SnapshotError::Twin { ref other, .. }) if other == "first"
    ));
    request.force = true;
    lab.daemon().snapshots().restore(name, &request).unwrap();
    request = RestoreRequest::new("third");
    let refused = lab
        .daemon()
        .snapshots()
        .restore(name, &request)
        .unwrap_err();
    assert!(matches!(
        refused,
        DaemonError::Snapshot(SnapshotError::Twin { ref other, .. }) if other == "twin"
    ));
    lab.stop("twin").unwrap();
    std::fs::write(place.join("manifest.json"), text).unwrap();
    std::fs::write(place.join("manifest.sum"), sum).unwrap();
}

/// Saves a VM as `from-swap` while most of its RAM is in the host's swap, and checks that the VM
/// and the restored one have every byte.
fn saved_from_swap(lab: &Lab, vm: &str, expected: &str, limit: Duration) {
    let swap = match support::Swap::on(512) {
        Ok(swap) => swap,
        Err(why) => skip!("no swap: {why}"),
    };
    let (pid, _) = support::ram(lab.directory(), vm);
    support::swap_out(u32::try_from(pid).unwrap());
    let swapped = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("VmSwap:"));
        let kib = line.and_then(|l| l.split_whitespace().next()?.parse().ok());
        kib.unwrap_or(0_u64) << 10
    };
    let before = swapped();
    let request = SaveRequest {
        keep: KeepChoice::All,
        live: true,
        ..SaveRequest::new(vm, "from-swap")
    };
    let saved = lab.daemon().snapshots().save(&request).unwrap();
    println!(
        "saved with {} MiB of its RAM in swap, {} behind it: {:?}",
        before >> 20,
        swapped() >> 20,
        saved.counts
    );
    assert!(before > 64 << 20, "only {before} bytes are in swap");
    // Not all of the swapped memory is the guest's, and free memory is left out.
    assert!(saved.counts.saved_pages * 4096 > before / 2);
    let thawed = RestoreRequest::new("thawed");
    lab.daemon()
        .snapshots()
        .restore("from-swap", &thawed)
        .unwrap();
    lab.daemon()
        .vms()
        .wait_agent("thawed", patience(BOOT))
        .unwrap();
    for name in ["thawed", vm] {
        let shown = lab.exec(name, CHECK, limit).unwrap();
        assert_eq!(shown, expected, "{name}");
    }
    lab.stop("thawed").unwrap();
    swap.off();
}

/// Time limit of a command in a guest.
const LIMIT: Duration = Duration::from_secs(300);

/// Starts a VM `first` with memory that is in no file, a process that continues, and a large file
/// on its disk. Returns it with the nonce that is in both.
fn known_vm() -> Option<(support::Turn, Lab, String)> {
    let turn = support::turn_beside()?;
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let mut spec = Lab::spec("first", "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    spec.network = Network::User;
    // Tests let QEMU open files of theirs.
    spec.user = Some("root".into());
    lab.start_warm(spec).unwrap();
    lab.wait_ready("first", BOOT).unwrap();
    lab.fold(true).unwrap();
    let nonce = lab.exec("first", HOLDER, LIMIT).unwrap();
    lab.exec("first", LARGE, LIMIT).unwrap();
    Some((turn, lab, nonce))
}

fn save(lab: &Lab, name: &str, keep: KeepChoice) -> Result<Manifest, DaemonError> {
    lab.daemon().snapshots().save(&SaveRequest {
        keep,
        ..SaveRequest::new("first", name)
    })
}

/// Returns the run state of a VM that QEMU reports.
fn state(lab: &Lab, vm: &str) -> String {
    let status = support::qmp(lab.directory(), vm).query("query-status");
    status.unwrap()["status"].as_str().unwrap().to_owned()
}

#[test]
fn a_save_to_a_full_disk_fails_and_leaves_the_vm_unchanged() {
    let Some((_turn, lab, nonce)) = known_vm() else {
        return;
    };
    let shelf = lab.directory().join("snapshots");
    let _full = Small::mount(&shelf, 40);
    // The space that is free is the reserve for VMs' disks; the error names the directory.
    let filler = shelf.join("filler");
    std::fs::write(&filler, vec![1; 39 << 20]).unwrap();
    let failed = save(&lab, "warm", KeepChoice::None).unwrap_err();
    let words = format!("{:#}", anyhow::Error::from(failed));
    let refused = format!("cannot save VM 'first' to {}", shelf.display());
    assert!(
        words.contains(&refused) && words.contains("must stay free for VMs"),
        "{words}"
    );
    std::fs::remove_file(&filler).unwrap();
    let failed = save(&lab, "warm", KeepChoice::None).unwrap_err();
    let words = format!("{:#}", anyhow::Error::from(failed));
    assert!(words.contains("/ram: No space left: "), "{words}");
    assert!(lab.daemon().snapshots().list().unwrap().is_empty());
    // The save fails after the switch of disks: the VM writes to the older overlay again, and the
    // newer is gone.
    let live = SaveRequest {
        live: true,
        keep: KeepChoice::Hot,
        ..SaveRequest::new("first", "warm")
    };
    let failed = lab.daemon().snapshots().save(&live).unwrap_err();
    let words = format!("{:#}", anyhow::Error::from(failed));
    assert!(words.contains("/ram: No space left: "), "{words}");
    assert_eq!(disk_nodes(lab.directory(), "first"), ["disk0"]);
    let shown = lab.exec("first", CHECK, LIMIT).unwrap();
    assert_eq!(shown, format!("before\n{nonce}"));
}

#[test]
fn if_the_memory_of_a_vm_is_in_host_swap_a_save_loses_no_byte() {
    let Some((_turn, lab, nonce)) = known_vm() else {
        return;
    };
    saved_from_swap(&lab, "first", &format!("before\n{nonce}"), LIMIT);
}

#[test]
fn a_restored_vm_has_the_saved_state_and_the_saved_vm_keeps_running() {
    let Some((_turn, lab, nonce)) = known_vm() else {
        return;
    };
    let daemon = lab.daemon();
    let who = lab.exec("first", WHO, LIMIT).unwrap();
    let mut known: HashSet<String> = who.lines().map(str::to_owned).collect();
    assert_eq!(known.len(), 3, "{who}");
    // The VM may have been restored itself, so its kernel's messages are cleared: those of the
    // clones' kernels are checked.
    lab.exec("first", "systemctl start ssh; dmesg -C", LIMIT)
        .unwrap();
    known.insert(lab.exec("first", SSH_KEY, LIMIT).unwrap());
    let saved = save(&lab, "warm", KeepChoice::None).unwrap();
    println!(
        "saved in {:.0} ms, stood still for {:.0} ms; {} of {} pages, {} zero, {} free; {:?}",
        saved.save_ms,
        saved.pause_ms,
        saved.counts.saved_pages,
        saved.counts.pages,
        saved.counts.zero_pages,
        saved.counts.free_pages,
        saved.steps
    );
    assert_eq!(saved.free_kept, None);
    assert!(saved.counts.free_pages > 0, "{:?}", saved.counts);
    assert!(saved.agent && saved.generation_id);
    // The VM continues unchanged, with its disk.
    assert_eq!(state(&lab, "first"), "running");
    let script = format!("{CHECK}; echo after > /var/tmp/state; echo gone > /var/tmp/nonce; sync");
    let shown = lab.exec("first", &script, LIMIT).unwrap();
    assert_eq!(shown, format!("before\n{nonce}"));

    assert!(matches!(
        save(&lab, "warm", KeepChoice::All),
        Err(DaemonError::Snapshot(SnapshotError::Taken(_)))
    ));
    // A second snapshot of the same VM, whose disk has a longer chain now.
    lab.exec(
        "first",
        "cp /run/nonce /var/tmp/nonce; echo second > /var/tmp/state; sync",
        LIMIT,
    )
    .unwrap();
    // Imitates a daemon that was killed between adding an overlay and using it.
    let unused = add_unused_overlay(lab.directory(), "first");
    save(&lab, "later", KeepChoice::All).unwrap();
    assert!(!unused.exists());
    save(&lab, "latest", KeepChoice::All).unwrap();

    for (snapshot, vm, expected) in [
        ("warm", "clone-1", "before"),
        ("warm", "clone-2", "before"),
        ("latest", "clone-3", "second"),
    ] {
        let began = Instant::now();
        let request = RestoreRequest {
            renew: Renew::Identity,
            ..RestoreRequest::new(vm)
        };
        daemon.snapshots().restore(snapshot, &request).unwrap();
        println!(
            "{vm} runs after {:.0} ms",
            began.elapsed().as_secs_f64() * 1000.0
        );
        daemon.vms().wait_agent(vm, patience(BOOT)).unwrap();
        let shown = lab.exec(vm, CHECK, LIMIT).unwrap();
        assert_eq!(shown, format!("{expected}\n{nonce}"), "{vm}");
        let renewal = set_apart(&lab, vm);
        assert!(renewal.left.is_empty(), "{vm}: {renewal:?}");
        let who = lab.exec(vm, WHO, LIMIT).unwrap();
        assert!(who.contains(vm), "{who}");
        for line in who.lines() {
            assert!(known.insert(line.to_owned()), "{vm} has {line} of another");
            let told = renewal.done.iter().any(|done| done.ends_with(line));
            assert!(told, "{line}: {renewal:?}");
        }
        let key = lab.exec(vm, SSH_KEY, LIMIT).unwrap();
        assert!(known.insert(key), "{vm} has the SSH key of another");
        // The kernel has reseeded its random numbers before the agent was asked to.
        lab.exec(
            vm,
            "dmesg | grep 'crng reseeded due to virtual machine fork'",
            LIMIT,
        )
        .unwrap();
        // Data that one clone writes is its own.
        lab.exec(
            vm,
            "echo mine > /var/tmp/state; echo mine > /run/nonce; sync",
            LIMIT,
        )
        .unwrap();
    }
    assert_eq!(
        lab.exec("first", "cat /var/tmp/state", LIMIT).unwrap(),
        "second\n"
    );
    for name in ["warm", "latest"] {
        let report = daemon.snapshots().verify(name).unwrap();
        assert!(report.problems.is_empty(), "{:?}", report.problems);
        assert!(matches!(
            daemon.snapshots().remove(name),
            Err(DaemonError::Snapshot(SnapshotError::InUse { .. }))
        ));
    }
    for vm in ["clone-1", "clone-2", "clone-3"] {
        lab.stop(vm).unwrap();
    }
    refuses_twins(&lab, "warm");
}

#[test]
fn a_damaged_snapshot_is_detected_and_not_restored() {
    let Some((_turn, lab, _nonce)) = known_vm() else {
        return;
    };
    let daemon = lab.daemon();
    save(&lab, "warm", KeepChoice::None).unwrap();
    lab.exec("first", "echo second > /var/tmp/state; sync", LIMIT)
        .unwrap();
    save(&lab, "later", KeepChoice::All).unwrap();
    // A bit of a disk changes, and nothing else reveals it.
    let disk = lab.directory().join("snapshots/later/disk0.qcow2");
    let facts = std::fs::metadata(&disk).unwrap();
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&disk)
        .unwrap();
    let at = facts.len() / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    let turn = |byte: u8| {
        file.write_all_at(&[byte], at).unwrap();
        file.set_modified(facts.modified().unwrap()).unwrap();
        daemon.snapshots().verify("later").unwrap().problems
    };
    assert_eq!(
        turn(byte[0] ^ 1),
        ["disk0.qcow2 was changed since it was saved"]
    );
    assert!(turn(byte[0]).is_empty());
    let ram = lab.directory().join("snapshots/warm/ram");
    let ram = std::fs::File::options().write(true).open(ram).unwrap();
    ram.write_all_at(b"x", 5 << 20).unwrap();
    let report = daemon.snapshots().verify("warm").unwrap();
    assert_eq!(
        report.problems,
        ["ram was changed since it was saved, in its chunk 2"]
    );
    // The disk was verified when clones were started from it, but has changed since.
    let broken = RestoreRequest::new("broken");
    let refused = daemon
        .snapshots()
        .restore("warm", &broken)
        .unwrap_err()
        .to_string();
    assert!(refused.contains("in 1 of its chunks"), "{refused}");
    assert!(daemon.vms().list().iter().all(|vm| vm.name != "broken"));
}

#[test]
fn when_snapshots_of_a_running_vm_are_removed_their_disks_belong_to_the_vm_again() {
    let Some((_turn, lab, nonce)) = known_vm() else {
        return;
    };
    let daemon = lab.daemon();
    save(&lab, "warm", KeepChoice::None).unwrap();
    let script = "echo second > /var/tmp/state; sync";
    lab.exec("first", script, LIMIT).unwrap();
    save(&lab, "latest", KeepChoice::All).unwrap();
    assert!(matches!(
        daemon.snapshots().remove("warm"),
        Err(DaemonError::Snapshot(SnapshotError::BuiltOn { .. }))
    ));
    for name in ["latest", "warm"] {
        daemon.snapshots().remove(name).unwrap();
    }
    assert!(daemon.snapshots().list().unwrap().is_empty());
    assert_eq!(state(&lab, "first"), "running");
    // The snapshot on which the VM's disk is built was removed; from the next save on, its data is
    // the VM's own. This also holds if the next snapshot has the name of an earlier one.
    for name in ["again", "warm", "again"] {
        save(&lab, name, KeepChoice::All).unwrap();
        assert_eq!(disk_nodes(lab.directory(), "first").len(), 2);
        daemon
            .snapshots()
            .restore(name, &RestoreRequest::new("heir"))
            .unwrap();
        daemon.vms().wait_agent("heir", patience(BOOT)).unwrap();
        for vm in ["heir", "first"] {
            let shown = lab.exec(vm, CHECK, LIMIT).unwrap();
            assert_eq!(shown, format!("second\n{nonce}"), "{vm}");
            lab.exec(vm, CHECK_LARGE, LIMIT).unwrap();
        }
        lab.stop("heir").unwrap();
        daemon.snapshots().remove(name).unwrap();
    }
}

/// Shell script that writes a file to the disk, whose sum is in memory.
const LARGE: &str =
    "head -c 20M /dev/urandom > /var/tmp/large; sync; md5sum /var/tmp/large > /run/large.sum";
const CHECK_LARGE: &str =
    "sync; echo 3 > /proc/sys/vm/drop_caches; md5sum --quiet -c /run/large.sum";

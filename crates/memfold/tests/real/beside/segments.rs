//! Tests of segments on real guests: guests see their files unchanged, their writes stay private,
//! and shared files are in memory once.

use std::path::Path;
use std::time::{Duration, Instant};

use memfold_api::{AttachSegmentRequest, BuildRequest, RestoreRequest, SaveRequest, SegmentState};
use memfold_fold::EngineSettings;
use memfold_host::guest_images;
use memfold_lab::{DiskMode, Lab};
use memfold_ledger::VmAccount;
use memfold_vm::{SegmentSpec, VmSpec};

use super::snapshots::Small;
use crate::support::{self, BOOT, MEMORY};

const LIMIT: Duration = Duration::from_secs(300);

/// Files of the segments that are mounted over the guests' own: enough for a measurable effect, and
/// few enough to be compared within the test.
const CHOSEN: [&str; 2] = ["/usr/bin/**", "/usr/lib/x86_64-linux-gnu/*.so*"];

/// Shell script that prints the sums of all files as the guest sees them, and of the guest's own
/// files below the overlays, on a second mount of the root file system.
pub const BOTH_SUMS: &str = "set -e
mkdir -p /mnt; mountpoint -q /mnt || mount --bind / /mnt
sums() { (cd $1; find usr/bin usr/lib/x86_64-linux-gnu -maxdepth 1 -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum | md5sum); }
sums /; sums /mnt";

pub fn request(name: &str, include: &[&str]) -> BuildRequest {
    let images = guest_images().unwrap();
    BuildRequest {
        name: name.into(),
        domain: "lab".into(),
        from: vec![images["trixie-a"].disk.display().to_string()],
        include: include.iter().map(ToString::to_string).collect(),
        exclude: Vec::new(),
        top_files_bytes: None,
        for_vms: None,
        root: false,
        pinned: false,
    }
}

fn spec(name: &str, segments: &[&str], slots: u32) -> VmSpec {
    let mut spec = Lab::spec(name, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    spec.segments = segments
        .iter()
        .map(|name| SegmentSpec::new(*name))
        .collect();
    spec.segment_slots = slots;
    spec
}

fn attach(segment: &str) -> AttachSegmentRequest {
    AttachSegmentRequest {
        segment: segment.into(),
        no_lay: false,
        content: false,
        writer: false,
    }
}

fn state(lab: &Lab, vm: &str) -> Vec<(String, SegmentState)> {
    let vms = lab.daemon().vms().list();
    let vm = vms.into_iter().find(|info| info.name == vm).unwrap();
    vm.segments
        .into_iter()
        .map(|s| (s.segment, s.state))
        .collect()
}

fn wait_laid(lab: &Lab, vm: &str) {
    let end = Instant::now() + Duration::from_secs(300);
    loop {
        let now = state(lab, vm);
        if now.iter().all(|(_, state)| *state == SegmentState::Laid) {
            return;
        }
        assert!(Instant::now() < end, "{vm}: {now:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn account(lab: &Lab, vm: &str) -> VmAccount {
    let report = lab.report().unwrap().ledger;
    report
        .vms
        .into_iter()
        .find(|account| account.name == vm)
        .unwrap()
}

/// Returns the error message of a refusal.
fn refused<T: std::fmt::Debug>(result: Result<T, memfold_daemon::DaemonError>) -> String {
    result.unwrap_err().to_string()
}

fn image(lab: &Lab, reference: &str) -> std::path::PathBuf {
    let (name, generation) = reference.split_once('@').unwrap();
    lab.directory()
        .join("segments")
        .join(name)
        .join(generation)
        .join("image")
}

/// Returns the number of QEMU's memory backends that no device uses, which a failed attachment
/// would leave.
fn backends(lab: &Lab, vm: &str) -> usize {
    let answer = support::qmp(lab.directory(), vm)
        .query("query-memdev")
        .unwrap();
    answer.as_array().unwrap().len()
}

#[test]
fn vms_share_one_copy_of_segment_files_and_keep_their_writes_private() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let daemon = lab.daemon();
    let built = daemon
        .segments()
        .build(&request("system", &CHOSEN))
        .unwrap();
    assert!(built.is_new && built.segment.generation == 1 && built.segment.lay == ["/usr"]);
    println!(
        "{}: {} files, {}",
        built.segment.reference(),
        built.segment.files,
        memfold_units::ByteSize(built.segment.image_bytes)
    );
    let again = daemon
        .segments()
        .build(&request("system", &CHOSEN))
        .unwrap();
    assert!(!again.is_new && again.segment == built.segment);

    // A VM that maps the segment from its start mounts it by itself; another VM gets it while it
    // runs.
    lab.start(spec("early", &["system"], 1)).unwrap();
    lab.start_warm(spec("late", &[], 2)).unwrap();
    lab.wait_ready("early", BOOT).unwrap();
    lab.wait_ready("late", BOOT).unwrap();
    wait_laid(&lab, "early");
    assert_eq!(state(&lab, "late"), []);
    plugged_and_refused(&lab);
    let done = daemon.segments().attach("late", &attach("system")).unwrap();
    let report = done.report.unwrap();
    println!("late: {report}");
    assert_eq!(
        report["dirs"][0]["differing"], 0,
        "it was built from the same image"
    );
    assert_eq!(report["dax"], true);
    assert_eq!(done.segment.state, SegmentState::Laid);
    // A repeated request changes nothing.
    daemon.segments().attach("late", &attach("system")).unwrap();
    assert_eq!(state(&lab, "late").len(), 1);

    // Every file has the same bytes as without the segment, and none of them is in a guest's page
    // cache.
    for vm in ["early", "late"] {
        let sums = lab.exec(vm, BOTH_SUMS, LIMIT).unwrap();
        let sums: Vec<&str> = sums.lines().collect();
        assert_eq!(sums[0], sums[1], "{vm}");
        let cached = "sync; echo 3 > /proc/sys/vm/drop_caches; cat /usr/bin/* /usr/lib/x86_64-linux-gnu/*.so* > /dev/null 2>&1; awk '/^Cached:/ { print $2 }' /proc/meminfo";
        let kib: u64 = lab.exec(vm, cached, LIMIT).unwrap().trim().parse().unwrap();
        println!("{vm}: {kib} KiB cached after reading all");
        assert!(
            kib < 60 << 10,
            "{vm} has {kib} KiB cached: it doesn't read in place"
        );
    }
    one_copy(&lab);
    attacked(&lab);
    written(&lab);
    cloned(&lab);
    renewed(&lab);
}

/// Segments that cannot be attached are refused with the reason, and leave nothing in QEMU.
fn plugged_and_refused(lab: &Lab) {
    let daemon = lab.daemon();
    let before = backends(lab, "late");
    let mut foreign = request("foreign", &["/usr/bin/**"]);
    foreign.domain = "red".into();
    daemon.segments().build(&foreign).unwrap();
    let why = refused(daemon.segments().attach("late", &attach("foreign")));
    assert!(why.contains("'red'") && why.contains("'lab'"), "{why}");
    let why = refused(daemon.boots().run(spec("stranger", &["foreign"], 0)));
    assert!(why.contains("'red'"), "{why}");
    let why = refused(daemon.segments().attach("early", &attach("foreign")));
    assert!(
        why.contains("'red'"),
        "the domain is looked at first: {why}"
    );
    let why = refused(daemon.segments().attach("late", &attach("nothing")));
    assert!(why.contains("'nothing'"), "{why}");

    // The image is damaged: its digest is compared before QEMU maps it.
    daemon
        .segments()
        .build(&request("bad", &["/usr/bin/a*"]))
        .unwrap();
    let file = image(lab, "bad@1");
    unlock(&file);
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, bytes).unwrap();
    let why = refused(daemon.segments().attach("late", &attach("bad")));
    assert!(why.contains("image was changed"), "{why}");
    assert!(daemon.segments().verify("bad").unwrap().is_some());
    assert_eq!(daemon.segments().remove("bad").unwrap(), ["bad@1"]);

    // The port is taken: QEMU adds the backend and refuses the device, and the backend is removed
    // again.
    let mut qmp = support::qmp(lab.directory(), "late");
    let taken = serde_json::json!({ "driver": "virtio-rng-pci", "id": "taken", "bus": "segport0" });
    qmp.execute("device_add", taken).unwrap();
    drop(qmp);
    let why = refused(daemon.segments().attach("late", &attach("system")));
    assert!(why.contains("device_add"), "{why}");
    assert_eq!(backends(lab, "late"), before);
    assert_eq!(state(lab, "late"), []);
    let mut qmp = support::qmp(lab.directory(), "late");
    qmp.execute("device_del", serde_json::json!({ "id": "taken" }))
        .unwrap();
    let end = Instant::now() + Duration::from_secs(120);
    let there = |qmp: &mut memfold_vm::Qmp| {
        let path = serde_json::json!({ "path": "/machine/peripheral" });
        let list = qmp.execute("qom-list", path).unwrap();
        list.as_array()
            .unwrap()
            .iter()
            .any(|device| device["name"] == "taken")
    };
    while there(&mut qmp) {
        assert!(Instant::now() < end, "the guest doesn't let go of a device");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Clears the flag that protects an image against changes, as an attacker on the host would have to
/// do.
fn unlock(file: &Path) {
    let done = std::process::Command::new("chattr")
        .arg("-i")
        .arg(file)
        .status();
    assert!(done.unwrap().success());
}

/// Checks that both VMs map the same pages, each counted once.
fn one_copy(lab: &Lab) {
    let (early, late) = (account(lab, "early"), account(lab, "late"));
    println!(
        "segments: early {} of {} resident, late {} of {}",
        early.segment_pss_bytes,
        early.segment_resident_bytes,
        late.segment_pss_bytes,
        late.segment_resident_bytes
    );
    for account in [&early, &late] {
        assert!(account.segment_resident_bytes.0 > 20 << 20);
        assert!(account.segment_pss_bytes.0 < account.segment_resident_bytes.0 * 7 / 10);
    }
    let host = lab.report().unwrap().ledger.host;
    assert!(
        host.saved_by_segments_bytes > 10 << 20,
        "{}",
        host.saved_by_segments_bytes
    );
    let list = lab.daemon().segments().list().unwrap();
    let system = list
        .iter()
        .find(|info| info.segment.name == "system")
        .unwrap();
    assert_eq!(system.users, ["early", "late"]);
    assert!(system.resident_bytes <= system.segment.image_bytes);
    assert_eq!(system.problem, None);
}

/// Tests a guest that writes to the device, and a host whose image is written to, cut or replaced.
fn attacked(lab: &Lab) {
    let daemon = lab.daemon();
    let sum = |vm: &str| {
        lab.exec(
            vm,
            "md5sum /usr/bin/python3* /usr/lib/x86_64-linux-gnu/libc.so.6",
            LIMIT,
        )
        .unwrap()
    };
    let right = sum("late");
    let file = image(lab, "system@1");
    let bytes = blake(&file);
    // A write to the device is refused; a guest that removes this protection loses its writes.
    let write = "dd if=/dev/urandom of=/dev/pmem0 bs=4096 seek=300 count=16 conv=notrunc,fsync 2>&1; echo code $?";
    let said = lab.exec("early", write, LIMIT).unwrap();
    println!("early writes to the device: {said}");
    assert!(said.ends_with("code 1\n"), "{said}");
    let write = format!("blockdev --setrw /dev/pmem0; {write}; blockdev --setro /dev/pmem0");
    let said = lab.exec("early", &write, LIMIT);
    println!("and makes it writable before: {said:?}");
    // The guests' kernels report no problem, except a message of Linux 6.12 about any EROFS with
    // DAX when it ages pages (`get_pte_pfn` of mm/vmscan.c), which it prints once.
    let trouble = "dmesg | grep -E 'BUG:|Oops|WARNING:' | grep -v get_pte_pfn; true";
    for vm in ["early", "late"] {
        assert_eq!(lab.exec(vm, trouble, LIMIT).unwrap(), "", "{vm}");
    }
    assert_eq!(sum("late"), right, "a guest's write reached another VM");
    assert_eq!(blake(&file), bytes, "a guest's write reached the image");
    lab.exec("late", "true", LIMIT).unwrap();

    // The file system's flag keeps everybody from writing, also root.
    let cut = std::fs::File::options().write(true).open(&file);
    assert!(cut.is_err(), "the image can be opened for writing");
    assert!(
        std::fs::remove_file(&file).is_err()
            && std::fs::rename(&file, file.with_extension("x")).is_err()
    );
    // An attacker who clears the flag can replace the file. VMs keep the file that they map, and no
    // new VM gets it.
    unlock(&file);
    let kept = file.with_extension("kept");
    std::fs::rename(&file, &kept).unwrap();
    std::fs::write(
        &file,
        vec![0; usize::try_from(std::fs::metadata(&kept).unwrap().len()).unwrap()],
    )
    .unwrap();
    let list = daemon.segments().list().unwrap();
    let system = list
        .iter()
        .find(|info| info.segment.name == "system")
        .unwrap();
    assert!(
        system
            .problem
            .as_ref()
            .is_some_and(|why| why.contains("replaced")),
        "{system:?}"
    );
    let why = refused(daemon.boots().run(spec("new", &["system"], 0)));
    assert!(why.contains("changed after the build"), "{why}");
    assert_eq!(sum("late"), right);
    std::fs::rename(&kept, &file).unwrap();
    assert_eq!(daemon.segments().verify("system").unwrap(), None);
}

fn blake(file: &Path) -> String {
    let sum = std::process::Command::new("sha256sum")
        .arg(file)
        .output()
        .unwrap();
    String::from_utf8(sum.stdout).unwrap()
}

/// Checks that writes of a guest go to its own disk, stay when the segment is detached, and are
/// invisible to other guests.
fn written(lab: &Lab) {
    let write = "set -e
echo mine > /usr/bin/own
echo changed > /usr/bin/yes.new && mv /usr/bin/yes.new /usr/bin/yes
rm /usr/bin/who
mkdir /usr/lib/x86_64-linux-gnu/mine && cp /usr/bin/ls /usr/lib/x86_64-linux-gnu/mine/
chmod 700 /usr/bin/uptime
sync";
    lab.exec("late", write, LIMIT).unwrap();
    let look = "cat /usr/bin/own /usr/bin/yes; test ! -e /usr/bin/who && echo gone; cmp /usr/bin/ls /usr/lib/x86_64-linux-gnu/mine/ls && echo same; stat -c %a /usr/bin/uptime";
    let wanted = "mine\nchanged\ngone\nsame\n700\n";
    assert_eq!(lab.exec("late", look, LIMIT).unwrap(), wanted);
    let other = lab
        .exec(
            "early",
            "ls /usr/bin/own 2>&1; test -e /usr/bin/who && echo there",
            LIMIT,
        )
        .unwrap();
    assert!(
        other.contains("No such file") && other.ends_with("there\n"),
        "{other}"
    );
    let done = lab.daemon().segments().detach("late", "system").unwrap();
    println!("late, taken off: {}", done.report.unwrap());
    assert_eq!(lab.exec("late", look, LIMIT).unwrap(), wanted);
    let mounts = lab
        .exec("late", "grep overlay /proc/mounts | wc -l", LIMIT)
        .unwrap();
    assert_eq!(mounts.trim(), "0");
    // The segment is attached again: files that the guest changed stay its own.
    let done = lab
        .daemon()
        .segments()
        .attach("late", &attach("system"))
        .unwrap();
    println!("late, laid again: {}", done.report.unwrap());
    assert_eq!(lab.exec("late", look, LIMIT).unwrap(), wanted);
}

/// Saves and clones a VM with segments: its clones map them too, and a segment stays as long as the
/// snapshot needs it.
fn cloned(lab: &Lab) {
    let daemon = lab.daemon();
    let saved = daemon
        .snapshots()
        .save(&SaveRequest::new("late", "warm"))
        .unwrap();
    assert_eq!(
        saved.spec.segments.len(),
        1,
        "the one that was attached while it ran"
    );
    lab.stop("late").unwrap();
    daemon
        .snapshots()
        .restore("warm", &RestoreRequest::new("late"))
        .unwrap();
    daemon.vms().wait_agent("late", BOOT).unwrap();
    wait_laid(lab, "late");
    let look = "cat /usr/bin/own; md5sum /usr/bin/python3* | head -1";
    let again = lab.exec("late", look, LIMIT).unwrap();
    assert!(again.starts_with("mine\n"), "{again}");
    assert!(account(lab, "late").segment_resident_bytes.0 > 0);
    let why = refused(daemon.segments().remove("system"));
    assert!(
        why.contains("VM early") && why.contains("snapshot warm"),
        "{why}"
    );
}

/// Builds a new generation: VMs switch to it while they run, and the old one is removed with its
/// last user.
fn renewed(lab: &Lab) {
    let daemon = lab.daemon();
    let write = AttachSegmentRequest {
        writer: true,
        ..attach("system")
    };
    let why = refused(daemon.segments().attach("late", &write));
    assert!(why.contains("VM early") && !why.contains("late"), "{why}");
    lab.stop("early").unwrap();
    // Only one VM writes the segment; the files that its guest sees become the next generation.
    daemon.segments().attach("late", &write).unwrap();
    let list = daemon.segments().list().unwrap();
    assert!(
        list.iter()
            .any(|info| info.writer.as_deref() == Some("late"))
    );
    let why = refused(daemon.boots().run(spec("other", &["system"], 0)));
    assert!(why.contains("written by VM 'late'"), "{why}");
    let mut next = request("system", &CHOSEN);
    next.exclude = vec!["/usr/bin/perl*".into()];
    let why = refused(daemon.segments().build(&next));
    assert!(why.contains("written by VM 'late'"), "{why}");
    let outside = BuildRequest {
        name: "../outside".into(),
        from: vec!["vm:late".into()],
        ..next.clone()
    };
    let why = refused(daemon.segments().build(&outside));
    assert!(why.contains("outside"), "{why}");
    let began = Instant::now();
    let from_guest = BuildRequest {
        from: vec!["vm:late".into()],
        ..next.clone()
    };
    let built = daemon.segments().build(&from_guest).unwrap();
    println!(
        "built of what the guest sees after {:?}: {:?}",
        began.elapsed(),
        built.segment
    );
    assert_eq!(built.segment.reference(), "system@2");
    assert_eq!(built.segment.from, ["vm:late"]);
    let done = daemon.segments().attach("late", &attach("system")).unwrap();
    let report = done.report.unwrap();
    println!("late, moved over: {report}");
    assert_eq!(report["dirs"][0]["differing"], 0, "they are its own files");
    let disks = lab
        .exec("late", "ls /sys/block | grep -c vd", LIMIT)
        .unwrap();
    assert_eq!(disks.trim(), "1", "the disk for copying is left");
    assert_eq!(
        state(lab, "late"),
        [
            ("system@1".to_owned(), SegmentState::TakenOff),
            ("system@2".to_owned(), SegmentState::Laid)
        ]
    );
    let why = refused(daemon.segments().detach("late", "system@1"));
    assert!(why.contains("'system@2'"), "{why}");
    let look = "cat /usr/bin/own; perl -e 'print 6*7'";
    assert_eq!(lab.exec("late", look, LIMIT).unwrap(), "mine\n42");
    daemon.snapshots().remove("warm").unwrap_err();
    // The VM keeps both devices, and so does a VM that is restored from its snapshot.
    let saved = daemon
        .snapshots()
        .save(&SaveRequest::new("late", "moved"))
        .unwrap();
    assert_eq!(saved.spec.segments.len(), 2);
    lab.stop("late").unwrap();
    daemon
        .snapshots()
        .restore("moved", &RestoreRequest::new("late"))
        .unwrap();
    daemon.vms().wait_agent("late", BOOT).unwrap();
    assert_eq!(lab.exec("late", look, LIMIT).unwrap(), "mine\n42");
    // The VM of this name that was the writer has ended.
    let list = daemon.segments().list().unwrap();
    assert!(list.iter().all(|info| info.writer.is_none()), "{list:?}");
    lab.stop("late").unwrap();
    daemon.snapshots().remove("moved").unwrap();
    daemon.snapshots().remove("warm").unwrap();
    // The writer has ended, so any build is possible again.
    daemon.segments().build(&next).unwrap();
    let names = |list: Vec<memfold_segment::SegmentInfo>| -> Vec<String> {
        list.iter().map(|info| info.segment.reference()).collect()
    };
    // Each build, attachment and end of a VM removes unused generations.
    lab.start(spec("last", &["system"], 0)).unwrap();
    lab.stop("last").unwrap();
    let end = Instant::now() + Duration::from_secs(120);
    while names(daemon.segments().list().unwrap()).contains(&"system@1".to_owned()) {
        assert!(Instant::now() < end, "the old generation stays");
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(daemon.segments().remove("system").unwrap(), ["system@3"]);
}

#[test]
fn a_vm_boots_from_a_root_segment_and_writes_to_its_own_disk() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    // The state of a daemon in `/run` is also on a tmpfs.
    let pinned = lab.directory().join("pinned");
    let _memory = Small::mount(&pinned, 2048);
    let mut whole = request("debian", &[]);
    whole.root = true;
    whole.pinned = true;
    let built = lab.daemon().segments().build(&whole).unwrap().segment;
    assert!(built.root && built.lay.is_empty());
    let mut spec = spec("root", &["debian"], 0);
    spec.segments[0].root = true;
    lab.start(spec).unwrap();
    lab.wait_ready("root", BOOT).unwrap();
    assert_eq!(
        state(&lab, "root"),
        [("debian@1".to_owned(), SegmentState::Root)]
    );
    let mounts = lab
        .exec(
            "root",
            "findmnt -no FSTYPE /; grep pmem /proc/mounts; cat /proc/cmdline; free -m",
            LIMIT,
        )
        .unwrap();
    println!("{mounts}");
    assert!(mounts.starts_with("overlay\n"), "{mounts}");
    let run = "set -e
systemctl start apache2
curl -fs http://127.0.0.1/ | grep -q Debian
test -u /usr/bin/su
echo kept > /etc/kept; echo more >> /etc/passwd
cat /etc/kept; awk '/^Cached:/ { print $2 }' /proc/meminfo";
    let said = lab.exec("root", run, LIMIT).unwrap();
    let cached: u64 = said.lines().last().unwrap().trim().parse().unwrap();
    println!(
        "{cached} KiB cached in the guest, {} of segments",
        account(&lab, "root").segment_resident_bytes
    );
    assert!(said.starts_with("kept\n") && cached < 100 << 10, "{said}");
    let write =
        "dd if=/dev/zero of=/dev/pmem0 bs=4096 count=1 conv=notrunc,fsync 2>&1; echo code $?";
    let said = lab.exec("root", write, LIMIT).unwrap();
    assert!(said.ends_with("code 1\n"), "{said}");
    let list = lab.daemon().segments().list().unwrap();
    assert_eq!(
        (list[0].protection.as_str(), list[0].users.len()),
        ("immutable", 1)
    );
    assert!(list[0].resident_bytes > 0);
    let pinned = pinned.join("debian@1");
    // The image is in memory, and cannot be truncated while the VM uses it.
    let place = rustix::fs::statfs(&pinned).unwrap();
    assert_eq!(place.f_type, 0x0102_1994, "not on a tmpfs");
    assert!(
        std::fs::OpenOptions::new()
            .write(true)
            .open(&pinned)
            .is_err()
    );
    let segment = account(&lab, "root");
    assert_eq!(segment.segment_shmem_bytes, segment.segment_pss_bytes);
    lab.stop("root").unwrap();
    // No VM maps the image any more, so it takes no memory.
    let end = Instant::now() + Duration::from_secs(120);
    while pinned.exists() {
        assert!(Instant::now() < end, "{} stays", pinned.display());
        std::thread::sleep(Duration::from_millis(100));
    }
}

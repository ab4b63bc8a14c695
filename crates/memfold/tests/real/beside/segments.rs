//! Tests of segments on real guests: guests see their files unchanged, their writes stay private,
//! and shared files are in memory once.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memfold_api::{AttachSegmentRequest, BuildRequest, RestoreRequest, SaveRequest, SegmentState};
use memfold_fold::EngineSettings;
use memfold_host::guest_images;
use memfold_lab::{DiskMode, Lab};
use memfold_ledger::VmAccount;
use memfold_testkit::{patience, wait_until};
use memfold_vm::{SegmentSpec, VmDirectory, VmSpec};

use super::snapshots::{MEMORY, Small};
use crate::support::{self, BOOT};

const LIMIT: Duration = Duration::from_secs(300);

/// Ports for segments of VMs that get segments while they run. Tests with the same number restore
/// the same guest.
pub const SLOTS: u32 = 4;

/// Shell script that prints the sums of a few files that are in the segment.
const SOME_SUMS: &str = "md5sum /usr/bin/python3.* /usr/bin/b*";

/// Files of the segments that are mounted over the guests' own, 86 MiB: enough for a measurable
/// effect, and few enough to be compared within the test.
const CHOSEN: [&str; 2] = ["/usr/bin/[!x]*", "/usr/lib/x86_64-linux-gnu/libc*.so*"];

/// Files of the segments of the other tests, 28 MiB. Building from a directory with only these
/// files takes little time; building from an image unpacks the whole image.
const FEW: [&str; 4] = [
    "/usr/bin/[a-f]*",
    "/usr/bin/{ls,who,yes,uptime}",
    "/usr/bin/python3*",
    "/usr/bin/perl*",
];

/// Shell script that prints the sums of the chosen files as the guest sees them, and of the guest's
/// own files below the overlays, on a second mount of the root file system.
const BOTH_SUMS: &str = "set -e
mkdir -p /mnt; mountpoint -q /mnt || mount --bind / /mnt
sums() { (cd $1; find usr/bin/[!x]* usr/lib/x86_64-linux-gnu/libc*.so* -type f -print0 | xargs -0 md5sum | md5sum); }
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

/// Copies programs of the guest's image to a directory below `state`, with their modes and times:
/// those of [`FEW`].
pub fn programs(state: &Path) -> PathBuf {
    let place = state.join("programs");
    let to = place.join("usr/bin");
    std::fs::create_dir_all(&to).unwrap();
    let images = guest_images().unwrap();
    let debugfs = |request: &str| {
        let mut command = std::process::Command::new("debugfs");
        let done = command
            .args(["-R", request])
            .arg(&images["trixie-a"].disk)
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
        String::from_utf8(done.stdout).unwrap()
    };
    // Lines are `/INODE/MODE/USER/GROUP/NAME/SIZE/`; the mode of a regular file begins with 10.
    let listed = debugfs("ls -p /usr/bin");
    let entries = listed.lines().map(|line| line.split('/').collect());
    for entry in entries {
        let entry: Vec<&str> = entry;
        let (Some(mode), Some(name)) = (entry.get(2), entry.get(5)) else {
            continue;
        };
        let is_chosen = name.starts_with(|first| ('a'..='f').contains(&first))
            || ["ls", "who", "yes", "uptime"].contains(name)
            || name.starts_with("python3")
            || name.starts_with("perl");
        if mode.starts_with("10") && is_chosen {
            debugfs(&format!(
                "dump -p /usr/bin/{name} {}",
                to.join(name).display()
            ));
        }
    }
    place
}

/// Returns a request for a segment of [`FEW`] files from the lab's copies of programs.
fn few(lab: &Lab, name: &str) -> BuildRequest {
    BuildRequest {
        from: vec![lab.directory().join("programs").display().to_string()],
        ..request(name, &FEW)
    }
}

/// Returns the description of a VM with segments, and with ports for more of them.
pub fn spec(name: &str, segments: &[&str], slots: u32) -> VmSpec {
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
    let end = Instant::now() + patience(Duration::from_secs(300));
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

fn image(lab: &Lab, reference: &str) -> PathBuf {
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

/// Starts a lab with the segment `system` of the chosen files, and restored VMs that can get
/// segments while they run.
fn lab_with(vms: &[&str]) -> Lab {
    let lab = Lab::new(EngineSettings::default()).unwrap();
    for name in vms {
        lab.start_warm(spec(name, &[], SLOTS)).unwrap();
    }
    programs(lab.directory());
    lab.daemon().segments().build(&few(&lab, "system")).unwrap();
    for name in vms {
        lab.wait_ready(name, BOOT).unwrap();
    }
    lab
}

/// Attaches the segment `system` to running VMs, and checks that its files are mounted.
fn attach_to(lab: &Lab, vms: &[&str]) {
    for name in vms {
        let done = lab.daemon().segments().attach(name, &attach("system"));
        assert_eq!(done.unwrap().segment.state, SegmentState::Laid, "{name}");
    }
}

#[test]
fn vms_that_mount_a_segment_read_their_files_unchanged_from_one_copy_on_the_host() {
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

    // A VM that maps the segment from its start mounts it by itself; another VM gets it while it
    // runs.
    lab.start(spec("early", &["system"], 1)).unwrap();
    lab.start_warm(spec("late", &[], SLOTS)).unwrap();
    lab.wait_ready("early", BOOT).unwrap();
    lab.wait_ready("late", BOOT).unwrap();
    wait_laid(&lab, "early");
    assert_eq!(state(&lab, "late"), []);
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
        let cached = "cached() { awk '/^Cached:/ { print $2 }' /proc/meminfo; }
sync; echo 3 > /proc/sys/vm/drop_caches; cached
find /usr/bin/[!x]* /usr/lib/x86_64-linux-gnu/libc*.so* -type f -print0 | xargs -0 cat > /dev/null; cached";
        let said = lab.exec(vm, cached, LIMIT).unwrap();
        let kib: Vec<i64> = said.lines().map(|line| line.parse().unwrap()).collect();
        println!("{vm}: {kib:?} KiB cached before and after reading all files of the segment");
        assert!(
            kib[1] - kib[0] < 16 << 10,
            "{vm} has {kib:?} KiB cached: it doesn't read in place"
        );
    }
    one_copy(&lab);
}

#[test]
fn a_segment_that_cannot_be_attached_is_refused_with_a_reason_and_leaves_nothing_in_qemu() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = lab_with(&["late"]);
    let daemon = lab.daemon();
    let before = backends(&lab, "late");
    let mut foreign = few(&lab, "foreign");
    foreign.domain = "red".into();
    daemon.segments().build(&foreign).unwrap();
    let why = refused(daemon.segments().attach("late", &attach("foreign")));
    assert!(why.contains("'red'") && why.contains("'lab'"), "{why}");
    let why = refused(daemon.boots().run(spec("stranger", &["foreign"], 0)));
    assert!(why.contains("'red'"), "{why}");
    // This VM has no place for another segment, but its domain is looked at first.
    let full = spec("full", &["system"], 0);
    daemon.boots().run(full).unwrap();
    let why = refused(daemon.segments().attach("full", &attach("foreign")));
    assert!(why.contains("'red'"), "{why}");
    lab.stop("full").unwrap();
    let why = refused(daemon.segments().attach("late", &attach("nothing")));
    assert!(why.contains("'nothing'"), "{why}");

    // The image is damaged: its digest is compared before QEMU maps it.
    daemon.segments().build(&few(&lab, "bad")).unwrap();
    let file = image(&lab, "bad@1");
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
    assert_eq!(backends(&lab, "late"), before);
    assert_eq!(state(&lab, "late"), []);
    let mut qmp = support::qmp(lab.directory(), "late");
    qmp.execute("device_del", serde_json::json!({ "id": "taken" }))
        .unwrap();
    wait_until("the guest releases the device", BOOT, || {
        let path = serde_json::json!({ "path": "/machine/peripheral" });
        let list = qmp.execute("qom-list", path).unwrap();
        let mut devices = list.as_array().unwrap().iter();
        devices.all(|device| device["name"] != "taken")
    });
    drop(qmp);
    attach_to(&lab, &["late"]);
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

#[test]
fn if_a_guest_writes_to_its_segment_the_image_and_other_vms_are_unchanged() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let vms = ["early", "late"];
    let lab = lab_with(&vms);
    attach_to(&lab, &vms);
    let sum = |vm: &str| lab.exec(vm, SOME_SUMS, LIMIT).unwrap();
    let right = sum("late");
    let file = image(&lab, "system@1");
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
}

#[test]
fn a_segment_image_cannot_be_changed_and_after_its_replacement_no_new_vm_gets_it() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = lab_with(&["late"]);
    let daemon = lab.daemon();
    attach_to(&lab, &["late"]);
    let right = lab.exec("late", SOME_SUMS, LIMIT).unwrap();
    let file = image(&lab, "system@1");
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
    assert_eq!(lab.exec("late", SOME_SUMS, LIMIT).unwrap(), right);
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

#[test]
fn what_a_guest_writes_over_a_segment_is_its_own_and_outlives_detaching_and_restoring() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let vms = ["early", "late"];
    let lab = lab_with(&vms);
    attach_to(&lab, &vms);
    let write = "set -e
echo mine > /usr/bin/own
echo changed > /usr/bin/yes.new && mv /usr/bin/yes.new /usr/bin/yes
rm /usr/bin/who
mkdir /usr/bin/mine && cp /usr/bin/ls /usr/bin/mine/
chmod 700 /usr/bin/uptime
sync";
    lab.exec("late", write, LIMIT).unwrap();
    let look = "cat /usr/bin/own /usr/bin/yes; test ! -e /usr/bin/who && echo gone; cmp /usr/bin/ls /usr/bin/mine/ls && echo same; stat -c %a /usr/bin/uptime";
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
    cloned(&lab);
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
    daemon.vms().wait_agent("late", patience(BOOT)).unwrap();
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

#[test]
fn one_vm_writes_a_new_generation_of_a_segment_and_the_old_one_is_removed_with_its_last_user() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let vms = ["early", "late"];
    let lab = lab_with(&vms);
    let daemon = lab.daemon();
    attach_to(&lab, &vms);
    lab.exec("late", "echo mine > /usr/bin/own && sync", LIMIT)
        .unwrap();
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
    let mut next = few(&lab, "system");
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
        state(&lab, "late"),
        [
            ("system@1".to_owned(), SegmentState::TakenOff),
            ("system@2".to_owned(), SegmentState::Laid)
        ]
    );
    let why = refused(daemon.segments().detach("late", "system@1"));
    assert!(why.contains("'system@2'"), "{why}");
    let look = "cat /usr/bin/own; perl -e 'print 6*7'";
    assert_eq!(lab.exec("late", look, LIMIT).unwrap(), "mine\n42");
    // The VM keeps both devices, and so does a VM that is restored from its snapshot.
    let saved = daemon
        .snapshots()
        .save(&SaveRequest::new("late", "moved"))
        .unwrap();
    assert_eq!(saved.spec.segments.len(), 2);
    // A stop removes the VM's files, maybe before the daemon looks which segments the VM had.
    let listed = VmDirectory::of(lab.directory(), "late").segments();
    std::fs::remove_file(listed).unwrap();
    lab.stop("late").unwrap();
    daemon
        .snapshots()
        .restore("moved", &RestoreRequest::new("late"))
        .unwrap();
    daemon.vms().wait_agent("late", patience(BOOT)).unwrap();
    assert_eq!(lab.exec("late", look, LIMIT).unwrap(), "mine\n42");
    // The VM of this name that was the writer has ended.
    let list = daemon.segments().list().unwrap();
    assert!(list.iter().all(|info| info.writer.is_none()), "{list:?}");
    lab.stop("late").unwrap();
    daemon.snapshots().remove("moved").unwrap();
    // The writer has ended, so any build is possible again.
    daemon.segments().build(&next).unwrap();
    let names = |list: Vec<memfold_segment::SegmentInfo>| -> Vec<String> {
        list.iter().map(|info| info.segment.reference()).collect()
    };
    // Each build, attachment and end of a VM removes unused generations.
    lab.start(spec("last", &["system"], 0)).unwrap();
    lab.stop("last").unwrap();
    let end = Instant::now() + patience(Duration::from_secs(120));
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
    let end = Instant::now() + patience(Duration::from_secs(120));
    while pinned.exists() {
        assert!(Instant::now() < end, "{} stays", pinned.display());
        std::thread::sleep(Duration::from_millis(100));
    }
}

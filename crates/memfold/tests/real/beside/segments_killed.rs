//! Tests of daemons that are killed, and of disks that are full, while segments are built, copied,
//! attached and removed. Each segment that is listed must be complete, no other file may be left
//! over, and the guest's files must be unchanged.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memfold_api::{
    AttachSegmentRequest, AttachedSegment, BuildRequest, BuildResult, Client, SegmentState, VmInfo,
};
use memfold_lab::{DiskMode, Lab};
use memfold_segment::SegmentInfo;
use memfold_testkit::{dose, wait_until};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::Value;

use super::segments::{SLOTS, programs, request};
use super::snapshots::MEMORY;
use crate::served::{Random, Served, exec};
use crate::support::{self, BOOT};

const VM: &str = "cut";

/// Returns the number of times that a daemon is killed in each part of the test.
fn deaths() -> u64 {
    dose("MEMFOLD_SEGMENT_KILLS", 2)
}

/// Files of the segments: few, so that there is time for many operations.
const CHOSEN: [&str; 1] = ["/usr/bin/[a-f]*"];

/// Shell script that prints the sums of these files as the guest sees them, and of the guest's own
/// files below the overlays, on a second mount of the root file system.
const BOTH_SUMS: &str = "set -e
mkdir -p /mnt; mountpoint -q /mnt || mount --bind / /mnt
sums() { (cd $1; find usr/bin/[a-f]* -type f -print0 | xargs -0 md5sum | md5sum); }
sums /; sums /mnt";

/// A small disk for segments, which can be filled.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn new(place: PathBuf) -> Self {
        std::fs::create_dir(&place).unwrap();
        mount(
            "tmpfs",
            &place,
            "tmpfs",
            MountFlags::empty(),
            Some(c"size=640m,mode=700"),
        )
        .unwrap();
        Self(place)
    }

    /// Fills the disk except for `left` MiB. Dropping the result frees the space.
    fn fill(&self, left: u64) -> Filler {
        let facts = rustix::fs::statvfs(&self.0).unwrap();
        let length = facts.f_bavail * facts.f_frsize - (left << 20);
        let path = self.0.join("filler");
        let file = std::fs::File::create(&path).unwrap();
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, length).unwrap();
        Filler(path)
    }

    /// Returns the names of files on the disk, also below directories of segments.
    fn names(&self) -> BTreeSet<String> {
        let below = |path: &Path| -> Vec<PathBuf> {
            let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).collect()
        };
        let all = below(&self.0).into_iter().flat_map(|top| {
            let inner = below(&top);
            std::iter::once(top).chain(inner)
        });
        let relative = |path: PathBuf| path.strip_prefix(&self.0).unwrap().display().to_string();
        // The number of a segment's last generation stays.
        all.filter(|path| path.extension().is_none_or(|end| end != "last"))
            .map(relative)
            .collect()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

struct Filler(PathBuf);

impl Drop for Filler {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn of_programs(name: &str, programs: &Path) -> BuildRequest {
    BuildRequest {
        from: vec![programs.display().to_string()],
        ..request(name, &CHOSEN)
    }
}

fn list(client: &Client) -> Vec<SegmentInfo> {
    client.get("/v1/segments").unwrap()
}

fn build(client: &Client, request: &BuildRequest) -> Result<BuildResult, String> {
    let built = client.post("/v1/segments", request);
    built.map_err(|error| format!("{error:#}"))
}

fn remove(client: &Client, name: &str) -> Result<Vec<String>, String> {
    let removed = client.delete(&format!("/v1/segments/{name}"));
    removed.map_err(|error| format!("{error:#}"))
}

fn attach(client: &Client, name: &str) -> Result<AttachedSegment, String> {
    let request = AttachSegmentRequest {
        segment: name.into(),
        no_lay: false,
        content: false,
        writer: false,
    };
    let done = client.post(&format!("/v1/vms/{VM}/segments"), &request);
    done.map_err(|error| format!("{error:#}"))
}

fn detach(client: &Client, name: &str) {
    let place = format!("/v1/vms/{VM}/segments/{name}");
    let _: AttachedSegment = client.delete(&place).unwrap();
}

fn vm(client: &Client) -> VmInfo {
    let list: Vec<VmInfo> = client.get("/v1/vms").unwrap();
    list.into_iter().find(|info| info.name == VM).unwrap()
}

/// Waits until a new daemon has noticed a condition.
#[track_caller]
fn wait(what: &str, done: impl Fn() -> bool) {
    wait_until(what, BOOT, done);
}

/// Checks that all listed segments are complete, and that the disk contains nothing else.
fn shelf_is_clean(client: &Client, disk: &SmallDisk) {
    let mut wanted = BTreeSet::new();
    for info in list(client) {
        let manifest = &info.segment;
        let place = format!("/v1/segments/{}/verify", manifest.reference());
        assert_eq!(client.post::<_, Option<String>>(&place, &()).unwrap(), None);
        assert_eq!(info.problem, None);
        assert_eq!(info.protection, "immutable", "{}", manifest.reference());
        wanted.insert(manifest.name.clone());
        wanted.insert(format!("{}/{}", manifest.name, manifest.generation));
    }
    assert_eq!(disk.names(), wanted);
}

/// Kills the daemon after `wait`, while `work` sends it a request, and starts the next one.
fn killed<T: Send>(
    served: &mut Served,
    client: &Client,
    pause: impl FnOnce(),
    work: impl FnOnce(&Client) -> T + Send,
) -> T {
    let answer = std::thread::scope(|scope| {
        let working = scope.spawn(|| work(client));
        pause();
        served.kill();
        working.join().unwrap()
    });
    served.start();
    served.answers();
    wait("the agent is back", || vm(client).agent.is_some());
    answer
}

fn builds(
    served: &mut Served,
    client: &Client,
    (disk, programs): (&SmallDisk, &Path),
    random: &mut Random,
) {
    let asked = |name: &str| of_programs(name, programs);
    // The first build reads the files from the disk, and takes longer than those that are cut.
    build(client, &asked("first")).unwrap();
    let began = Instant::now();
    let right = build(client, &asked("right")).unwrap().segment;
    let span = u64::try_from(began.elapsed().as_millis()).unwrap();
    println!("a build takes {span} ms: {} files", right.files);
    let mut cut = 0;
    for death in 0..deaths() {
        let asked = asked(&format!("built{death}"));
        let pause = || {
            let first = Duration::from_millis(span * death / deaths());
            std::thread::sleep(first + random.below_ms(span / deaths() + 1));
        };
        cut += u32::from(killed(served, client, pause, |c| build(c, &asked)).is_err());
        shelf_is_clean(client, disk);
        let again = build(client, &asked).unwrap().segment;
        assert_eq!(again.generation, 1);
        assert_eq!(again.files, right.files, "the same input");
    }
    println!("{cut} of {} builds were cut", deaths());
    assert!(cut > 0);
    // Less is free than the reserve, which VMs may need.
    let before = disk.names();
    let filler = disk.fill(3);
    let why = build(client, &asked("full")).unwrap_err();
    // The error names the disk of the segments, not the source.
    let draft = ".full.draft";
    assert!(
        why.contains("would leave less than") && why.contains(draft),
        "{why}"
    );
    drop(filler);
    assert_eq!(disk.names(), before);
    shelf_is_clean(client, disk);
}

fn copies(served: &mut Served, client: &Client, disk: &SmallDisk, random: &mut Random) {
    let asked = BuildRequest {
        from: vec![format!("vm:{VM}")],
        ..request("copied", &CHOSEN)
    };
    let is_plugged = || {
        let path = serde_json::json!({ "path": "/machine/peripheral" });
        let devices = support::qmp(&disk.0.with_file_name(""), VM)
            .execute("qom-list", path)
            .unwrap();
        let devices = devices.as_array().unwrap();
        devices.iter().any(|device| device["name"] == "copy-out")
    };
    for _ in 0..2 {
        let pause = || {
            wait("a disk to copy to is there", is_plugged);
            std::thread::sleep(random.below_ms(500));
        };
        let cut = killed(served, client, pause, |c| build(c, &asked));
        assert!(cut.is_err());
        shelf_is_clean(client, disk);
        wait("the disk to copy to is gone", || !is_plugged());
    }
    // Less is free than the reserve: no disk is plugged, and the guest keeps running.
    let filler = disk.fill(24);
    let why = build(client, &asked).unwrap_err();
    assert!(why.contains("free above its reserve"), "{why}");
    drop(filler);
    shelf_is_clean(client, disk);
    assert!(!is_plugged());
    let status = support::qmp(&disk.0.with_file_name(""), VM)
        .query("query-status")
        .unwrap();
    assert_eq!(status["status"], "running");
    build(client, &asked).unwrap();
    // Copies that dead daemons began end by themselves.
    let left = "mount | grep -c copy-out; ls /run/memfold | grep -c copy-out; true";
    wait("nothing is left in the guest", || {
        exec(client, VM, left).stdout == "0\n0\n"
    });
}

fn attaches(served: &mut Served, client: &Client, random: &mut Random) {
    let sums = exec(client, VM, BOTH_SUMS).stdout;
    // The first attachment takes longer than the others, because the guest reads programs from its
    // disk.
    attach(client, "right").unwrap();
    detach(client, "right");
    let began = Instant::now();
    attach(client, "right").unwrap();
    let span = u64::try_from(began.elapsed().as_millis()).unwrap();
    println!("attaching takes {span} ms");
    let laid = |name: &str| {
        let reference = format!("{name}@1");
        let segments = vm(client).segments;
        segments
            .iter()
            .any(|s| s.segment == reference && s.state == SegmentState::Laid)
    };
    // The next daemon asks the guest which segments are mounted.
    killed(served, client, || (), |_| ());
    wait("'right' is known to be laid", || laid("right"));
    detach(client, "right");
    let mut cut = 0;
    for death in 0..deaths() {
        let name = format!("built{death}");
        let pause = || {
            let first = Duration::from_millis(span * death / deaths());
            std::thread::sleep(first + random.below_ms(span / deaths() + 1));
        };
        cut += u32::from(killed(served, client, pause, |c| attach(c, &name)).is_err());
        assert_eq!(exec(client, VM, BOTH_SUMS).stdout, sums);
        attach(client, &name).unwrap();
        assert!(laid(&name));
        assert_eq!(exec(client, VM, BOTH_SUMS).stdout, sums);
        detach(client, &name);
    }
    println!("{cut} of {} attachments were cut", deaths());
    assert!(cut > 0);
    // There are as many devices as segments, so none was plugged in twice.
    let devices = exec(client, VM, "ls /dev/pmem* | wc -l").stdout;
    assert_eq!(devices.trim(), (deaths() + 1).to_string());
    let why = remove(client, "right").unwrap_err();
    assert!(why.contains(&format!("VM {VM}")), "{why}");
}

#[test]
fn after_daemon_kills_and_full_disks_no_segment_is_incomplete_and_no_guest_file_is_lost() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::Builder::new()
        .prefix("memfold-segments.")
        .tempdir()
        .unwrap();
    let state = directory.path();
    let disk = SmallDisk::new(state.join("segments"));
    let mut served = Served::new(state, &[VM]);
    served.start();
    let client = served.answers();
    let mut spec = Lab::spec(VM, "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    spec.segment_slots = SLOTS.max(u32::try_from(deaths()).unwrap() + 2);
    served.run_warm(&spec);
    wait("the guest is there", || vm(&client).agent.is_some());
    let seed = u64::from(std::process::id()) << 20 | 1;
    println!("seed {seed}");
    let mut random = Random(seed);
    builds(&mut served, &client, (&disk, &programs(state)), &mut random);
    copies(&mut served, &client, &disk, &mut random);
    attaches(&mut served, &client, &mut random);
    client
        .post::<_, Value>(
            &format!("/v1/vms/{VM}/stop"),
            &serde_json::json!({ "timeout_s": 0.0 }),
        )
        .unwrap();
    // A segment is removed completely or not at all.
    for _ in 0..deaths() {
        let Some(info) = list(&client).pop() else {
            break;
        };
        let reference = info.segment.reference();
        std::thread::scope(|scope| {
            let removing = scope.spawn(|| remove(&client, &reference));
            std::thread::sleep(random.below_ms(4));
            served.kill();
            let _ = removing.join().unwrap();
        });
        served.start();
        served.answers();
        shelf_is_clean(&client, &disk);
    }
    for info in list(&client) {
        remove(&client, &info.segment.reference()).unwrap();
    }
    assert_eq!(disk.names(), BTreeSet::new());
}

//! Measures for the study `snapshots`: saves and restores one VM in each of several ways (memfold's
//! and QEMU's), and records times and sizes.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use memfold_api::{KeepChoice, RestoreRequest, SaveRequest};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_snapshot::{Keep, Manifest, Progress, Shelf};
use memfold_units::{ByteSize, PAGE_SIZE};
use memfold_vm::{DiskSpec, VmSpec};
use rustix::fs::{Advice, fadvise};

use crate::loop_disk::{self, LoopDisk};
use crate::qemu_way::{self, Form, Way};
use crate::random::Random;
use crate::warmth::image_bytes;

const BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// Time limit of one operation in a guest.
const LIMIT: Duration = Duration::from_secs(900);

const VM: &str = "saved";

/// Shell script that starts a program in the guest. The program keeps `USED` MiB of bytes in
/// memory, and writes their checksum to `/run/held`, again at each SIGUSR1.
const HOLD: &str = r#"cat > /run/hold.py <<'END'
import hashlib, os, signal
held = bytearray(os.urandom(1 << 20) * USED)
for page in range(0, len(held), 4096):
    held[page:page + 8] = (page + 1).to_bytes(8, "little")
def tell(*_):
    open("/run/held.new", "w").write(hashlib.sha256(held).hexdigest())
    os.rename("/run/held.new", "/run/held")
signal.signal(signal.SIGUSR1, tell)
tell()
while True:
    signal.pause()
END
systemd-run -q --unit=hold python3 /run/hold.py
while [ ! -s /run/held ]; do sleep 0.2; done; cat /run/held"#;

const CHECK: &str = "rm -f /run/held; systemctl kill -s USR1 hold; while [ ! -s /run/held ]; do sleep 0.1; done; cat /run/held";

/// Shell script that reads all files of the second disk, and prints the size of the guest's page
/// cache in KiB.
const FILL: &str = "mkdir -p /run/data && mount -o ro /dev/vdb /run/data && cat /run/data/* > /dev/null; sync; awk '/^(Buffers|Cached):/ { sum += $2 } END { print sum }' /proc/meminfo";

/// Shell script that reads all files of the second disk again.
const FILL_AGAIN: &str = "cat /run/data/* > /dev/null; sync";

/// Shell script that starts a program which writes to memory without end.
const WRITE: &str = "systemd-run -q --unit=write sh -c 'while :; do dd if=/dev/urandom of=/dev/shm/written bs=1M count=32 2> /dev/null; done'; while [ ! -s /dev/shm/written ]; do sleep 0.1; done";

/// Name of the snapshot that is saved live. The next constant: number of live saves.
const LIVE: &str = "live";
const LIVE_SAVES: u32 = 5;

/// File name of the disk image whose files fill the guest's page cache.
const DATA: &str = "data.img";

/// Size of each file that fills the guest's page cache.
const FILE: ByteSize = ByteSize::mib(128);

/// Throughput of the slow disk, as in the original study: 70 MB/s.
const STUDY_DISK_BYTES_PER_S: u64 = 70_000_000;

/// A way to save and restore a VM that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Arm {
    /// QEMU's `migrate file:` with mapped-ram and multifd.
    Qemu,
    /// QEMU's `migrate file:` as a stream.
    QemuStream,
    /// QEMU's `savevm`.
    QemuSavevm,
    /// memfold's default, `snapshot save --keep auto`.
    Auto,
    /// memfold's `snapshot save --keep hot`.
    Hot,
    /// memfold's `snapshot save --keep none`.
    None,
}

impl Arm {
    /// Returns the name of the way to save in the study's results.
    pub const fn key(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::QemuStream => "qemu_stream",
            Self::QemuSavevm => "qemu_savevm",
            Self::Auto => "auto",
            Self::Hot => "hot",
            Self::None => "none",
        }
    }

    /// Returns the layout of the file if the way is QEMU's `migrate`.
    const fn form(self) -> Option<Form> {
        match self {
            Self::Qemu => Some(Form::MappedRam),
            Self::QemuStream => Some(Form::Stream),
            _ => None,
        }
    }
}

/// One VM that the study saves, and how it is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub memory: ByteSize,
    /// Memory that a program in the guest uses, in MiB.
    pub used_mib: u64,
    /// Number of times that each way to save is measured.
    pub rounds: usize,
    /// Whether the VM's files are on a disk as slow as that of the original study (70 MB/s).
    pub is_study_disk: bool,
    /// Whether only QEMU's mapped-ram and memfold's `auto` and `none` are measured, beside live
    /// saves.
    pub is_brief: bool,
    /// Guest image of the VM.
    pub image: &'static str,
}

impl Case {
    /// Returns the ways to save that are measured in turn in each round.
    fn arms(&self) -> &'static [Arm] {
        if self.is_study_disk {
            return &[Arm::Qemu, Arm::QemuStream, Arm::Auto];
        }
        if self.is_brief {
            return &[Arm::Qemu, Arm::Auto, Arm::None];
        }
        &[Arm::Qemu, Arm::QemuStream, Arm::Hot, Arm::Auto, Arm::None]
    }
}

/// Measurements of one VM.
pub struct Measured {
    pub case: Case,
    pub cached_kib: u64,
    /// Time that this host's kernel takes to drop one page of its own page cache, in microseconds.
    pub host_drop_us: f64,
    /// Measurements of each way to save, in the order of the rounds.
    pub ways: BTreeMap<Arm, Vec<Way>>,
    /// Manifest of the last snapshot that each of memfold's ways has saved.
    pub saved: BTreeMap<Arm, Manifest>,
    /// Seconds in which another daemon reads and verifies a snapshot before its first restore, by
    /// the way that saved the snapshot.
    pub check_s: BTreeMap<Arm, f64>,
    /// Time that the guest took to drop its page cache at each save by `none`, in milliseconds.
    pub drops_ms: Vec<f64>,
    /// Manifests of the live saves of the VM, while a program in its guest writes to memory.
    pub live: Vec<Manifest>,
    /// Number of times that the memory of the program in the guest was checked. The next field:
    /// number of checks that found other bytes than before.
    pub checks: u64,
    pub wrong: u64,
}

impl Measured {
    /// Returns how long this host's kernel would take to drop as much page cache as the guest had,
    /// in seconds.
    pub fn host_drop_s(&self) -> f64 {
        self.host_drop_us * (self.cached_kib * 1024 / PAGE_SIZE) as f64 / 1e6
    }

    fn check(&mut self, is_right: bool) {
        self.checks += 1;
        self.wrong += u64::from(!is_right);
    }
}

/// A running VM that the study saves, with its files.
struct Bench {
    lab: Lab,
    spec: VmSpec,
    /// Checksum of the memory of the program in the guest.
    held: String,
}

impl Bench {
    /// Boots the VM, and fills its guest's page cache. Also returns the size of this page cache in
    /// KiB.
    fn start(case: &Case) -> anyhow::Result<(Self, u64)> {
        let lab = Lab::new(EngineSettings::default())?;
        // It goes with the laboratory, also when that is interrupted.
        let data = lab.directory().join(DATA);
        make_data(&data, case.memory).with_context(|| format!("cannot make {}", data.display()))?;
        let mut spec = Lab::spec(VM, case.image, case.memory, DiskMode::Buffered)?;
        let mut disk = DiskSpec::new(&data);
        disk.read_only = true;
        spec.disks.push(disk);
        lab.boot(vec![spec.clone()], BOOT_TIMEOUT)?;
        let held = lab.exec(VM, &HOLD.replace("USED", &case.used_mib.to_string()), LIMIT)?;
        let cached = lab.exec(VM, FILL, LIMIT)?;
        let cached_kib = cached.trim().parse();
        let cached_kib = cached_kib.context("cannot parse the size of the guest's page cache")?;
        Ok((Self { lab, spec, held }, cached_kib))
    }

    /// Reads the data disk, so that the host's page cache contains it, as after the guest has read
    /// its files. QEMU drops the disk from the host's page cache after a migration (option
    /// `drop-cache` of its driver `file`).
    fn cache_on_host(&self) -> anyhow::Result<()> {
        let mut data = File::open(self.lab.directory().join(DATA))?;
        std::io::copy(&mut data, &mut std::io::sink())?;
        Ok(())
    }

    fn file(&self, arm: Arm, end: &str) -> PathBuf {
        self.lab.directory().join(format!("{}.{end}", arm.key()))
    }

    fn exec(&self, vm: &str, script: &str) -> anyhow::Result<String> {
        self.lab.exec(vm, script, LIMIT)
    }

    fn save(&self, arm: Arm, round: usize) -> anyhow::Result<(Way, Option<Manifest>)> {
        if let Some(form) = arm.form() {
            let (image, disk) = (self.file(arm, "img"), self.file(arm, "qcow2"));
            return Ok((qemu_way::save(&self.lab, VM, form, &image, &disk)?, None));
        }
        let name = format!("{}-{round}", arm.key());
        let request = SaveRequest {
            keep: match arm {
                Arm::Hot => KeepChoice::Hot,
                Arm::None => KeepChoice::None,
                _ => KeepChoice::Auto,
            },
            ..SaveRequest::new(VM, &name)
        };
        let began = Instant::now();
        let manifest = self.lab.daemon().snapshots().save(&request)?;
        let way = Way {
            save_s: began.elapsed().as_secs_f64(),
            pause_s: manifest.pause_ms / 1000.0,
            restore_s: f64::NAN,
            bytes: image_bytes(&self.lab.directory().join("snapshots").join(name))?,
        };
        Ok((way, Some(manifest)))
    }

    /// Restores the VM as one of the ways has saved it, checks the program's memory, and ends the
    /// VM. Returns the seconds until the VM ran, and whether the memory was right.
    fn restore(&self, arm: Arm, round: usize, like: &Manifest) -> anyhow::Result<(f64, bool)> {
        let mut spec = self.spec.clone();
        spec.name = "restored".into();
        let seconds = if let Some(form) = arm.form() {
            let (image, disk) = (self.file(arm, "img"), self.file(arm, "qcow2"));
            qemu_way::restore(&self.lab, spec, like, form, &image, &disk)?
        } else if arm == Arm::QemuSavevm {
            qemu_way::restore_inside(&self.lab, spec, &self.file(arm, "qcow2"))?
        } else {
            let began = Instant::now();
            let request = RestoreRequest::new("restored");
            let name = format!("{}-{round}", arm.key());
            self.lab.daemon().snapshots().restore(&name, &request)?;
            began.elapsed().as_secs_f64()
        };
        Ok((seconds, self.check("restored")?))
    }

    fn check(&self, vm: &str) -> anyhow::Result<bool> {
        self.lab.daemon().vms().wait_agent(vm, BOOT_TIMEOUT)?;
        let is_right = self.exec(vm, CHECK)? == self.held;
        self.lab.stop(vm)?;
        Ok(is_right)
    }

    /// Saves the VM several times while it runs and writes to memory. The last snapshot remains, as
    /// [`LIVE`].
    fn save_live(&self) -> anyhow::Result<Vec<Manifest>> {
        self.exec(VM, WRITE)?;
        let mut saved = Vec::new();
        for round in 1..=LIVE_SAVES {
            let is_last = round == LIVE_SAVES;
            let number = if is_last {
                String::new()
            } else {
                format!("-{round}")
            };
            let name = format!("{LIVE}{number}");
            let request = SaveRequest {
                live: true,
                keep: KeepChoice::None,
                ..SaveRequest::new(VM, name)
            };
            saved.push(self.lab.daemon().snapshots().save(&request)?);
        }
        self.exec(VM, "systemctl stop write")?;
        Ok(saved)
    }
}

/// Saves and restores the VM of `case` in all ways, and returns the measurements.
pub fn measure(case: Case) -> anyhow::Result<Measured> {
    let (bench, cached_kib) = Bench::start(&case)?;
    let lab = &bench.lab;
    let slow = |bytes_per_s| {
        if !case.is_study_disk {
            return Ok(());
        }
        loop_disk::limit(lab.directory(), bytes_per_s)
    };
    let host_drop_us = drop_on_host(lab.directory())
        .context("cannot measure how fast the host drops its page cache")?;
    let mut measured = Measured {
        case,
        cached_kib,
        host_drop_us,
        ways: BTreeMap::new(),
        saved: BTreeMap::new(),
        check_s: BTreeMap::new(),
        drops_ms: Vec::new(),
        live: Vec::new(),
        checks: 0,
        wrong: 0,
    };
    for round in 0..case.rounds {
        for &arm in case.arms() {
            bench.cache_on_host()?;
            slow(STUDY_DISK_BYTES_PER_S)?;
            let (way, manifest) = bench.save(arm, round)?;
            slow(0)?;
            measured.ways.entry(arm).or_default().push(way);
            if let Some(manifest) = manifest {
                if arm == Arm::None {
                    measured.drops_ms.push(manifest.steps.drop_ms);
                }
                if manifest.keep == Keep::None {
                    bench.exec(VM, FILL_AGAIN)?;
                }
                measured.saved.insert(arm, manifest);
            }
        }
    }
    let held = bench.exec(VM, CHECK)?;
    measured.check(held == bench.held);
    if !case.is_study_disk {
        measured.live = bench.save_live()?;
        bench.exec(VM, FILL_AGAIN)?;
    }
    if !case.is_study_disk && !case.is_brief {
        // The last one: what it saves stays in the disk's overlay.
        let disk = bench.file(Arm::QemuSavevm, "qcow2");
        let way = qemu_way::save_inside(lab, VM, &disk)?;
        measured.ways.insert(Arm::QemuSavevm, vec![way]);
    }
    lab.stop(VM)?;
    if !case.is_study_disk {
        let live = RestoreRequest::new("live");
        lab.daemon().snapshots().restore(LIVE, &live)?;
        measured.check(bench.check("live")?);
    }
    slow(STUDY_DISK_BYTES_PER_S)?;
    restore_all(&bench, &mut measured)?;
    for (&arm, manifest) in &measured.saved {
        let began = Instant::now();
        let shelf = Shelf::open(&lab.directory().join("snapshots"));
        shelf.checked_image(manifest, &Progress::default())?;
        measured.check_s.insert(arm, began.elapsed().as_secs_f64());
    }
    Ok(measured)
}

/// Restores the VM from each save, and records the times.
fn restore_all(bench: &Bench, measured: &mut Measured) -> anyhow::Result<()> {
    let like = measured.saved.get(&Arm::Auto).cloned();
    let like = like.context("no snapshot was saved that could be restored")?;
    for round in 0..measured.case.rounds {
        for (&arm, ways) in &mut measured.ways {
            if let Some(way) = ways.get_mut(round) {
                let (seconds, is_right) = bench.restore(arm, round, &like)?;
                way.restore_s = seconds;
                measured.checks += 1;
                measured.wrong += u64::from(!is_right);
            }
        }
    }
    Ok(())
}

/// Makes an ext4 image with files of random bytes, as large as a VM's memory. No two pages of the
/// files are equal, and they cannot be compressed.
fn make_data(image: &Path, memory: ByteSize) -> anyhow::Result<()> {
    // Room for the file system itself.
    let size = ByteSize(memory.0 + memory.0 / 8 + (64 << 20));
    let disk = LoopDisk::make(image, size, &image.with_extension("mounted"))?;
    let mut random = Random::default();
    for number in 0..memory.0 / FILE.0 {
        let file = File::create(disk.place().join(format!("{number:03}")))?;
        random.write(FILE.0, file)?;
    }
    drop(disk);
    Ok(File::open(image)?.sync_all()?)
}

/// Measures how long this host's kernel takes to drop one page of its page cache, in microseconds.
/// A guest's kernel takes as long if the guest is not emulated. The pages belong to a file that no
/// process maps, and are cached as single pages, as Linux 6.12 in a guest caches ext4 and disks.
fn drop_on_host(place: &Path) -> anyhow::Result<f64> {
    const BYTES: u64 = 512 << 20;
    let file = tempfile::tempfile_in(place)?;
    let mut bytes = vec![1; 1 << 20];
    for at in (0..BYTES).step_by(bytes.len()) {
        file.write_all_at(&bytes, at)?;
    }
    file.sync_all()?;
    let drop_all = || fadvise(&file, 0, None, Advice::DontNeed);
    drop_all()?;
    // Without reading ahead, which would cache larger pieces.
    fadvise(&file, 0, None, Advice::Random)?;
    for at in (0..BYTES).step_by(bytes.len()) {
        file.read_at(&mut bytes, at)?;
    }
    let began = Instant::now();
    drop_all()?;
    Ok(began.elapsed().as_secs_f64() * 1e6 / (BYTES / PAGE_SIZE) as f64)
}

//! Starts guests for tests in a second. The first guest of each *shape* (virtual hardware and root
//! disk) boots and is saved. Later guests of the shape are restored from this guest's state after
//! the boot.
//!
//! ```text
//!   first guest of a shape     boots; shell on its console; disks flushed; stop; `migrate file:STATE`; quit
//!                              SHAPE/root.qcow2   what it wrote to its root disk
//!                              SHAPE/state        its RAM and devices, in QEMU's migration format
//!   every guest                starts with `-incoming defer` over a temporary overlay of SHAPE/root.qcow2,
//!                              then `migrate-incoming file:SHAPE/state`
//! ```
//!
//! QEMU reads the RAM into plain anonymous memory, so folding, KSM, balloon and snapshots treat
//! these guests like booted ones. memfold's own clones would differ, because their RAM is mapped
//! from an image (docs/decisions/0036).
//!
//! A restored guest must see the same hardware as the saved guest. So the shape is the VM's
//! description without the settings that only the host sees (name, trust domain, user, cache mode,
//! merging). In the first guest, disks other than the root disk are blank, and none of their pages
//! stay in its page cache.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use memfold_host::{QemuFacts, image_directory};
use memfold_testkit::patience;
use memfold_vm::{CacheMode, DiskFormat, DiskSpec, Qmp, Vm, VmDirectory, VmSpec};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};

use crate::wait::{last_words, migrate, wait_for};

/// Environment variable with the directory of saved guests. If the variable is not set, the
/// directory is `warm` in memfold's cache directory, where the next run finds the saved guests.
pub const WARM_VARIABLE: &str = "MEMFOLD_LAB_WARM";

/// Environment variable with a file to which each start of a guest is appended: `booted` or
/// `restored`, name, seconds. `scripts/test` counts these lines.
pub const GUESTS_VARIABLE: &str = "MEMFOLD_LAB_GUESTS";

/// Version of the files' layout; files of older versions are not read.
const LAYOUT: u32 = 1;

/// Longest time of the first guest's boot.
const BOOT: Duration = Duration::from_secs(240);

/// Longest time that QEMU may take to write or read a state.
const TRANSFER: Duration = Duration::from_secs(120);

/// Prompt of the shell on a guest's console.
const PROMPT: &[u8] = b":~# ";

/// What the first guest runs before it is saved: waits until everything is started, and forgets
/// what it read of blank disks.
const SETTLE: &str = "systemctl is-system-running --wait; for disk in /dev/vd?; do case $disk in */vda) ;; *) blockdev --flushbufs $disk ;; \
     esac; done; sync; echo settled-$((40 + 2))";

/// Output that shows that [`SETTLE`] has finished.
const SETTLED: &[u8] = b"settled-42";

/// The saved state of a guest, from which guests with the same hardware are restored without a
/// boot.
#[derive(Debug)]
pub struct Warm {
    state: PathBuf,
}

/// Returns why guests with this description cannot be restored and must boot; `None`: they can be
/// restored.
fn must_boot(spec: &VmSpec) -> Option<&'static str> {
    let (arguments, segments) = (&spec.qemu_args, &spec.segments);
    let is_kept = spec.disks.first().is_none_or(|disk| !disk.snapshot);
    let reasons = [
        ("the VM has its own QEMU arguments", !arguments.is_empty()),
        (
            "the VM maps segments from its boot on",
            !segments.is_empty(),
        ),
        ("the VM is saved right after its boot", spec.boot_snapshot),
        ("its root disk is not a temporary overlay", is_kept),
    ];
    let mut reasons = reasons.into_iter();
    reasons.find_map(|(why, holds)| holds.then_some(why))
}

/// Returns the description without settings that only the host sees.
fn shape(spec: &VmSpec) -> VmSpec {
    let mut shape = spec.clone();
    let plain = VmSpec::new("warm", spec.memory);
    shape.name = plain.name;
    shape.domain = plain.domain;
    shape.merge = plain.merge;
    shape.user = plain.user;
    shape.fold = false;
    for disk in &mut shape.disks {
        // Whether there is a write cache is the guest's to see.
        if disk.cache.write_cache() {
            disk.cache = CacheMode::default();
        }
        disk.aio = DiskSpec::new("/").aio;
    }
    shape
}

/// Runs `qemu-img`, and returns its output.
fn qemu_img(options: &[&str], files: &[&Path]) -> anyhow::Result<Vec<u8>> {
    let mut command = Command::new("qemu-img");
    let done = command.args(options).args(files).output();
    let done = done.context("cannot run qemu-img")?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "qemu-img failed: {}", said.trim());
    Ok(done.stdout)
}

/// Returns a disk's size in bytes, as the guest sees it.
fn virtual_bytes(disk: &DiskSpec) -> anyhow::Result<u64> {
    let driver = disk.format().driver();
    let facts = qemu_img(
        &["info", "-U", "--output=json", "-f", driver],
        &[&disk.path],
    )?;
    let facts: Value = serde_json::from_slice(&facts)?;
    let bytes = facts["virtual-size"].as_u64();
    bytes.with_context(|| format!("qemu-img tells no size of {}", disk.path.display()))
}

/// Returns a key for everything that the guest sees, 16 hexadecimal digits. The root image's name
/// changes with its content.
fn key(shape: &VmSpec) -> anyhow::Result<String> {
    let qemu = QemuFacts::probe()?;
    let mut others = Vec::new();
    let mut seen = shape.clone();
    for disk in seen.disks.iter_mut().skip(1) {
        others.push(virtual_bytes(disk)?);
        disk.path = "/".into();
    }
    let (version, machine) = (qemu.version, qemu.machine);
    let seen = serde_json::to_string(&seen)?;
    let text = format!("{LAYOUT} {version:?} {machine} {others:?} {seen}");
    let hash = xxhash_rust::xxh3::xxh3_64(text.as_bytes());
    Ok(format!("{hash:016x}"))
}

fn directory() -> anyhow::Result<PathBuf> {
    let place = match std::env::var_os(WARM_VARIABLE) {
        Some(place) => Ok(place.into()),
        None => image_directory().map(|images| images.join("warm")),
    };
    let place: PathBuf = place.context("cannot find a directory for saved guests")?;
    std::fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    Ok(place)
}

impl Warm {
    /// Changes a VM description so that QEMU waits for the saved state of a guest with the same
    /// hardware. If no such state is saved, a guest boots first, and is saved. After starting QEMU,
    /// the caller must call [`Warm::load`]. Returns `None` if the guest must boot itself; the
    /// reason is printed on standard error.
    pub fn prepare(spec: &mut VmSpec) -> anyhow::Result<Option<Self>> {
        if let Some(why) = must_boot(spec) {
            eprintln!("guest '{}' boots: {why}", spec.name);
            return Ok(None);
        }
        let shape = shape(spec);
        let place = directory()?.join(key(&shape)?);
        // Others that want the same guest wait until it is there.
        let lock = File::create(place.with_extension("lock"))?;
        flock(&lock, FlockOperation::LockExclusive)?;
        if !place.exists() {
            boot_and_save(shape, &place)?;
        }
        drop(lock);
        spec.disks[0].path = place.join("root.qcow2");
        spec.disks[0].format = Some(DiskFormat::Qcow2);
        // Its snapshots keep these arguments, and a second `-incoming defer` means what one does.
        spec.qemu_args = ["-incoming", "defer"].map(str::to_owned).into();
        let state = place.join("state");
        Ok(Some(Self { state }))
    }

    /// Loads the saved state into QEMU, and lets the guest run. QEMU must have been started with
    /// the description from [`Warm::prepare`].
    pub fn load(&self, vm: &VmDirectory) -> anyhow::Result<()> {
        let began = Instant::now();
        let mut qmp = Qmp::connect(&vm.qmp(), Duration::from_secs(60))?;
        migrate(
            &mut qmp,
            "migrate-incoming",
            &self.state,
            patience(TRANSFER),
        )
        .with_context(|| format!("cannot restore '{}'", vm.name()))?;
        // It was saved standing still, and QEMU keeps to that.
        qmp.query("cont")?;
        note_guest("restored", &vm.name(), began.elapsed());
        Ok(())
    }
}

/// Appends a booted or restored guest to the file named by [`GUESTS_VARIABLE`], if it is set, and
/// reports it on standard error.
pub(crate) fn note_guest(how: &str, name: &str, took: Duration) {
    let Some(path) = std::env::var_os(GUESTS_VARIABLE) else {
        return;
    };
    eprintln!("guest '{name}' {how} in {:.1} s", took.as_secs_f64());
    let line = format!("{how}\t{name}\t{:.2}\n", took.as_secs_f64());
    let file = File::options().append(true).create(true).open(path);
    if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
        eprintln!("cannot count guest '{name}': {error}");
    }
}

/// Boots a guest and saves it in `place`, which appears only when it is complete.
fn boot_and_save(mut spec: VmSpec, place: &Path) -> anyhow::Result<()> {
    let began = Instant::now();
    let draft = place.with_extension("draft");
    if draft.exists() {
        std::fs::remove_dir_all(&draft)?;
    }
    std::fs::create_dir(&draft)?;
    // QEMU's sockets want a short path.
    let state = tempfile::Builder::new().prefix("memfold-warm.").tempdir()?;
    let root = draft.join("root.qcow2");
    let base = spec.disks[0].path.clone();
    let driver = spec.disks[0].format().driver();
    let over = ["create", "-q", "-f", "qcow2", "-F", driver, "-b"];
    qemu_img(&over, &[&base, &root])?;
    spec.disks[0] = DiskSpec {
        format: Some(DiskFormat::Qcow2),
        snapshot: false,
        path: root,
        ..spec.disks[0].clone()
    };
    for (number, disk) in spec.disks.iter_mut().enumerate().skip(1) {
        let blank = state.path().join(format!("blank{number}"));
        let bytes = virtual_bytes(disk)?.to_string();
        let driver = disk.format().driver();
        qemu_img(&["create", "-q", "-f", driver], &[&blank, bytes.as_ref()])?;
        disk.format = Some(disk.format());
        disk.path = blank;
    }
    let vm = memfold_vm::start(state.path(), spec)?;
    let directory = VmDirectory::of(state.path(), vm.name());
    let saved = settle(&directory).and_then(|()| save(&vm, &draft.join("state")));
    let ended = vm.stop(Duration::ZERO);
    saved?;
    ended?;
    std::fs::rename(&draft, place)?;
    note_guest("booted", "first of its shape", began.elapsed());
    Ok(())
}

/// Waits for the shell on a guest's console, and runs [`SETTLE`] in it.
fn settle(vm: &VmDirectory) -> anyhow::Result<()> {
    let mut console =
        UnixStream::connect(vm.console()).context("cannot connect to the guest's console")?;
    console.set_read_timeout(Some(Duration::from_millis(200)))?;
    let mut said = Vec::new();
    let mut wait = |words: &[u8], console: &mut UnixStream| {
        // Reading waits, too.
        wait_for(
            "the guest did not boot",
            (patience(BOOT), Duration::ZERO),
            || {
                // What was said before anybody listened is in the log.
                let logged = std::fs::read(vm.console_log()).unwrap_or_default();
                let is_in = |text: &[u8]| text.windows(words.len()).any(|part| part == words);
                if is_in(&said) || is_in(&logged) {
                    return Ok(Some(()));
                }
                let mut some = [0; 4096];
                match console.read(&mut some) {
                    Ok(0) => bail!("QEMU closed the guest's console before the guest had booted"),
                    // An error means that nothing was said.
                    read => said.extend_from_slice(&some[..read.unwrap_or(0)]),
                }
                Ok(None)
            },
        )
        .with_context(|| format!("the guest's last console output:\n{}", last_words(vm)))
    };
    wait(PROMPT, &mut console)?;
    console.write_all(format!("{SETTLE}\n").as_bytes())?;
    wait(SETTLED, &mut console)
}

fn save(vm: &Vm, state: &Path) -> anyhow::Result<()> {
    let mut qmp = vm.qmp()?;
    qmp.query("stop")?;
    // QEMU's own limit is 128 MiB/s.
    let limits = json!({ "max-bandwidth": 1_u64 << 40 });
    qmp.execute("migrate-set-parameters", limits)?;
    migrate(&mut qmp, "migrate", state, patience(TRANSFER)).context("cannot save the guest")
}

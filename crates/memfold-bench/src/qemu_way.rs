//! Saves and restores VMs in QEMU's own ways, so that studies can compare them with memfold's
//! snapshots: `migrate file:`, as a stream or with mapped-ram and multifd (2 channels), and
//! `savevm`. The VM is stopped meanwhile. As with memfold, a save ends when all data is on disk.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use memfold_lab::{Lab, migrate, wait_for};

use memfold_daemon::DaemonError;
use memfold_snapshot::{Manifest, SnapshotError};
use memfold_vm::{DiskFormat, DiskSpec, Incoming, LaunchError, Qmp, Vm, VmDirectory, VmSpec};

/// Time limit of one operation of QEMU.
const LIMIT: Duration = Duration::from_secs(900);

/// Pause between two queries of QEMU's progress.
const PAUSE: Duration = Duration::from_millis(2);

/// Layout of a VM's RAM in the file to which QEMU migrates the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// mapped-ram: each page at a fixed offset, written by two threads (multifd).
    MappedRam,
    /// The stream that QEMU would send to another host in a migration.
    Stream,
}

/// Bandwidth limit for QEMU's migration in bytes a second, which no disk reaches.
const NO_LIMIT: u64 = 1 << 50;

/// Name of the state that `savevm` saves.
const TAG: &str = "saved";

/// Measurements of one save of a VM, and of its restore.
#[derive(Clone, Copy, Debug, Default)]
pub struct Way {
    /// Time of the save, in seconds: from the command until all data is on disk.
    pub save_s: f64,
    /// Time for which the VM was stopped during the save, in seconds.
    pub pause_s: f64,
    /// Time of the restore, in seconds: until the restored VM runs.
    pub restore_s: f64,
    /// Bytes on disk that the saved state takes.
    pub bytes: u64,
}

fn monitor(lab: &Lab, vm: &str) -> anyhow::Result<Qmp> {
    let socket = VmDirectory::of(lab.directory(), vm).qmp();
    // While `savevm` writes RAM, QEMU does not answer.
    Ok(Qmp::connect(&socket, LIMIT)?)
}

fn prepare_migration(qmp: &mut Qmp, form: Form) -> anyhow::Result<()> {
    let capability = |name| json!({ "capability": name, "state": form == Form::MappedRam });
    let both = [capability("mapped-ram"), capability("multifd")];
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": both }))?;
    // By default, QEMU limits itself to 128 MiB a second, which is meant for networks. libvirt
    // removes this limit for files, too.
    let parameters = json!({ "multifd-channels": 2, "max-bandwidth": NO_LIMIT });
    qmp.execute("migrate-set-parameters", parameters)?;
    Ok(())
}

/// Saves a VM with QEMU's command `migrate`: its state to the file `image`, and the content of its
/// first disk (an overlay) at that instant to the file `disk`.
pub fn save(lab: &Lab, vm: &str, form: Form, image: &Path, disk: &Path) -> anyhow::Result<Way> {
    let mut qmp = monitor(lab, vm)?;
    prepare_migration(&mut qmp, form)?;
    let began = Instant::now();
    qmp.query("stop")?;
    migrate(&mut qmp, "migrate", image, LIMIT)?;
    let pause_s = began.elapsed().as_secs_f64();
    File::open(image)?.sync_all()?;
    let save_s = began.elapsed().as_secs_f64();
    let (_, overlay) = overlay(&mut qmp)?;
    std::fs::copy(&overlay, disk).with_context(|| format!("cannot copy {}", overlay.display()))?;
    qmp.query("cont")?;
    Ok(Way {
        save_s,
        pause_s,
        restore_s: 0.0,
        bytes: std::fs::metadata(image)?.blocks() * 512,
    })
}

/// Returns the node of the VM's first disk, and the file to which it writes.
fn overlay(qmp: &mut Qmp) -> anyhow::Result<(String, PathBuf)> {
    let disks = qmp.query("query-block")?;
    let mut disks = disks.as_array().into_iter().flatten();
    let top = disks.find_map(|disk| {
        let inserted = &disk["inserted"];
        let is_overlay = inserted["drv"] == "qcow2";
        inserted["node-name"].as_str().filter(|_| is_overlay)
    });
    let top = top.context("no disk of the VM has a qcow2 overlay")?;
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let file = nodes.as_array().into_iter().flatten().find(|node| {
        let name = node["node-name"].as_str().unwrap_or_default();
        // The node of the first disk, or of an overlay that a save has put over it.
        name == "overlay-file0" && top == "disk0" || name == format!("{top}-file")
    });
    let file = file.and_then(|node| node["file"].as_str());
    let file = file.with_context(|| format!("QEMU does not report the file of {top}: {nodes}"))?;
    Ok((top.to_owned(), file.into()))
}

/// Saves a VM with QEMU's `savevm`, which writes its state into the overlay of its first disk.
/// `disk` becomes another name (hard link) of this overlay file.
pub fn save_inside(lab: &Lab, vm: &str, disk: &Path) -> anyhow::Result<Way> {
    let mut qmp = monitor(lab, vm)?;
    let (node, file) = overlay(&mut qmp)?;
    std::fs::hard_link(&file, disk).with_context(|| format!("cannot link {}", file.display()))?;
    let before = std::fs::metadata(disk)?.blocks();
    let began = Instant::now();
    let orders = json!({ "job-id": TAG, "tag": TAG, "vmstate": node, "devices": [node] });
    work(&mut qmp, "snapshot-save", &orders)?;
    let pause_s = began.elapsed().as_secs_f64();
    File::open(disk)?.sync_all()?;
    let save_s = began.elapsed().as_secs_f64();
    Ok(Way {
        save_s,
        pause_s,
        restore_s: 0.0,
        bytes: (std::fs::metadata(disk)?.blocks() - before) * 512,
    })
}

/// Starts a job named [`TAG`] in QEMU, and waits for its end.
fn work(qmp: &mut Qmp, command: &str, orders: &Value) -> anyhow::Result<()> {
    qmp.execute(command, orders.clone())?;
    wait_for("QEMU's job did not end", (LIMIT, PAUSE), || {
        let jobs = qmp.query("query-jobs")?;
        let mut all = jobs.as_array().into_iter().flatten();
        let job = all.find(|job| job["id"] == TAG);
        let job = job.with_context(|| format!("QEMU lost the VM's save or load job: {jobs}"))?;
        ensure!(job["error"].is_null(), "QEMU: {job}");
        Ok((job["status"] == "concluded").then_some(()))
    })?;
    qmp.execute("job-dismiss", json!({ "id": TAG }))?;
    Ok(())
}

/// Starts the VM `spec` and restores the state that [`save_inside`] has saved in `disk`. Returns
/// the seconds until the VM runs.
pub fn restore_inside(lab: &Lab, mut spec: VmSpec, disk: &Path) -> anyhow::Result<f64> {
    spec.qemu_args.push("-S".into());
    use_disk(&mut spec, disk);
    run(lab, spec, memfold_vm::start, |qmp| {
        // Name of a disk without an overlay, as 'vm run' chooses it.
        let node = "disk0";
        let orders = json!({ "job-id": TAG, "tag": TAG, "vmstate": node, "devices": [node] });
        work(qmp, "snapshot-load", &orders)
    })
}

fn use_disk(spec: &mut VmSpec, disk: &Path) {
    let cache = spec.disks[0].cache;
    spec.disks[0] = DiskSpec::new(disk);
    (spec.disks[0].format, spec.disks[0].cache) = (Some(DiskFormat::Qcow2), cache);
}

/// Starts the VM `spec` and restores the state that [`save`] has saved. The machine type is that of
/// memfold's snapshot `like` of the same VM. Returns the seconds until the VM runs.
pub fn restore(
    lab: &Lab,
    mut spec: VmSpec,
    like: &Manifest,
    form: Form,
    image: &Path,
    disk: &Path,
) -> anyhow::Result<f64> {
    // Unlike memfold's own device state, QEMU's stream contains this section.
    let configuration = ["-global", "migration.send-configuration=on"];
    spec.qemu_args.extend(configuration.map(String::from));
    use_disk(&mut spec, disk);
    let incoming = Incoming {
        qemu: like.qemu,
        machine: like.machine.clone(),
        accel: like.accel.clone(),
        arriving: false,
    };
    let never = memfold_vm::Cancel::default();
    let start = |state: &Path, spec| memfold_vm::start_unless(&never, state, spec, Some(&incoming));
    run(lab, spec, start, |qmp| {
        prepare_migration(qmp, form)?;
        migrate(qmp, "migrate-incoming", image, LIMIT)
    })
}

/// Starts a VM, loads its state, and lets it run. Returns the seconds that this took.
fn run(
    lab: &Lab,
    spec: VmSpec,
    start: impl FnOnce(&Path, VmSpec) -> Result<Vm, LaunchError>,
    load: impl FnOnce(&mut Qmp) -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    let began = Instant::now();
    let mut ran = 0.0;
    lab.daemon().vms().launch(spec, |state, spec, _| {
        let vm = start(state, spec)?;
        let go_on = || {
            // QEMU does not answer while it reads RAM, so this connection has a long time limit.
            let directory = vm.directory();
            let directory = directory.context("the VM has no directory with a QMP socket")?;
            let mut qmp = Qmp::connect(&directory.daemon_qmp(), LIMIT)?;
            load(&mut qmp)?;
            qmp.query("cont")?;
            anyhow::Ok(())
        };
        if let Err(error) = go_on() {
            let _ = vm.stop(Duration::ZERO);
            return Err(DaemonError::from(SnapshotError::Qemu(format!("{error:#}"))));
        }
        ran = began.elapsed().as_secs_f64();
        Ok(vm)
    })?;
    ensure!(ran > 0.0, "no time was taken");
    Ok(ran)
}

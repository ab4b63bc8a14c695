//! QEMU's own way to save a VM and restore it, which memfold's is compared with: `migrate file:` with mapped-ram and multifd
//! (2 channels), the VM stopped meanwhile.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::json;

use super::lab::Lab;
use crate::daemon::DaemonError;
use crate::snapshot::{Manifest, SnapshotError};
use crate::vm::{DiskFormat, DiskSpec, Incoming, Qmp, Vm, VmDirectory, VmSpec};

/// Time for one thing that QEMU does.
const LIMIT: Duration = Duration::from_secs(900);

/// One way to save and restore, measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct Way {
    /// Seconds from the command until the VM goes on.
    pub save_s: f64,
    /// Seconds that the VM stood still.
    pub pause_s: f64,
    /// Seconds until the restored VM runs.
    pub restore_s: f64,
    /// Bytes on disk.
    pub bytes: u64,
}

fn monitor(lab: &Lab, vm: &str) -> anyhow::Result<Qmp> {
    let socket = VmDirectory::of(lab.directory(), vm).qmp();
    Ok(Qmp::connect(&socket, Duration::from_secs(10))?)
}

fn prepare_migration(qmp: &mut Qmp) -> anyhow::Result<()> {
    let on = |name| json!({ "capability": name, "state": true });
    qmp.execute(
        "migrate-set-capabilities",
        json!({ "capabilities": [on("mapped-ram"), on("multifd")] }),
    )?;
    qmp.execute("migrate-set-parameters", json!({ "multifd-channels": 2 }))?;
    Ok(())
}

/// Saves a VM whose first disk is an overlay to `image`, and that disk, as it is at that instant, to `disk`.
pub fn save(lab: &Lab, vm: &str, image: &Path, disk: &Path) -> anyhow::Result<Way> {
    let mut qmp = monitor(lab, vm)?;
    prepare_migration(&mut qmp)?;
    let began = Instant::now();
    qmp.query("stop")?;
    qmp.execute(
        "migrate",
        json!({ "uri": format!("file:{}", image.display()) }),
    )?;
    wait_migrated(&mut qmp, "query-migrate", &["completed"])?;
    let save_s = began.elapsed().as_secs_f64();
    // Not counted, and no burden for the next save.
    File::open(image)?.sync_all()?;
    let overlay = overlay(&mut qmp)?;
    std::fs::copy(&overlay, disk).with_context(|| format!("cannot copy {}", overlay.display()))?;
    qmp.query("cont")?;
    Ok(Way {
        save_s,
        pause_s: save_s,
        restore_s: 0.0,
        bytes: std::fs::metadata(image)?.blocks() * 512,
    })
}

fn wait_migrated(qmp: &mut Qmp, query: &str, wanted: &[&str]) -> anyhow::Result<()> {
    let end = Instant::now() + LIMIT;
    loop {
        let answer = qmp.query(query)?;
        match answer["status"].as_str() {
            Some(status) if wanted.contains(&status) => return Ok(()),
            Some("failed" | "cancelled") => bail!("QEMU: {answer}"),
            _ if Instant::now() > end => bail!("QEMU: {answer}"),
            _ => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// The file that the VM's first disk writes to.
fn overlay(qmp: &mut Qmp) -> anyhow::Result<PathBuf> {
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let file = nodes
        .as_array()
        .into_iter()
        .flatten()
        .find(|node| node["node-name"] == "overlay-file0")
        .and_then(|node| node["file"].as_str());
    Ok(file.context("QEMU doesn't tell the VM's overlay")?.into())
}

/// Restores what [`save`] has saved as the VM of `spec`, on a machine like that of memfold's own snapshot `like`; seconds until it runs.
pub fn restore(
    lab: &Lab,
    mut spec: VmSpec,
    like: &Manifest,
    image: &Path,
    disk: &Path,
) -> anyhow::Result<f64> {
    // Ours leaves that section of the stream out.
    let configuration = ["-global", "migration.send-configuration=on"];
    spec.qemu_args.extend(configuration.map(String::from));
    let cache = spec.disks[0].cache;
    spec.disks[0] = DiskSpec::new(disk);
    (spec.disks[0].format, spec.disks[0].cache) = (Some(DiskFormat::Qcow2), cache);
    let incoming = Incoming {
        qemu: like.qemu,
        machine: like.machine.clone(),
        accel: like.accel.clone(),
    };
    let began = Instant::now();
    let mut ran = 0.0;
    lab.daemon().launch(spec, |state, spec| {
        let vm = crate::vm::start_incoming(state, spec, &incoming)?;
        let loaded = load(&vm, image).map(|()| ran = began.elapsed().as_secs_f64());
        if let Err(error) = loaded {
            let _ = vm.stop(Duration::ZERO);
            return Err(DaemonError::from(SnapshotError::Qemu(format!("{error:#}"))));
        }
        Ok(vm)
    })?;
    ensure!(ran > 0.0, "no time was taken");
    Ok(ran)
}

fn load(vm: &Vm, image: &Path) -> anyhow::Result<()> {
    // It answers nobody while it reads RAM.
    let socket = vm.directory().context("no directory")?.daemon_qmp();
    let mut qmp = Qmp::connect(&socket, LIMIT)?;
    prepare_migration(&mut qmp)?;
    qmp.execute(
        "migrate-incoming",
        json!({ "uri": format!("file:{}", image.display()) }),
    )?;
    wait_migrated(
        &mut qmp,
        "query-status",
        &["paused", "running", "prelaunch"],
    )?;
    qmp.query("cont")?;
    Ok(())
}

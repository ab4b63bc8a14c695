//! Checks, before a VM is saved, that QEMU's hardware still is the hardware in the VM's
//! description, and that QEMU can save the state of all its devices.
//!
//! Unlike QEMU's own migration, `xen-save-devices-state` ignores migration blockers, so they are
//! checked here. Devices that were hot-plugged are not in the description, and an unknown writable
//! disk would continue to change after the snapshot.

use std::time::{Duration, Instant};

use memfold_vm::{Qmp, VmSpec, seed_disk};
use serde_json::{Value, json};

use super::error::SnapshotError;

/// Returns why a VM with this answer to a query cannot be saved.
type Check<'a> = &'a dyn Fn(&Value) -> Option<String>;

/// Longest wait for a VM that is stopped for a moment, and how often it is looked at.
const MOMENT: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(20);

/// Checks that the VM runs, and that QEMU and a snapshot can hold all of its hardware. The error
/// says what prevents a save.
pub fn check(qmp: &mut Qmp, spec: &VmSpec) -> Result<(), SnapshotError> {
    wait_while_paused(qmp)?;
    let checks: [(&str, Check<'_>); 5] = [
        ("query-status", &not_running),
        ("query-migrate", &blocked),
        ("query-tpm", &tpm),
        ("query-block", &|disks| foreign_disk(disks, spec)),
        ("query-memory-devices", &plugged_memory),
    ];
    for (query, problem) in checks {
        if let Some(why) = problem(&qmp.query(query)?) {
            return Err(SnapshotError::Impossible(why));
        }
    }
    plugged_device(qmp)
}

/// Waits until a VM runs that is stopped for a moment, because pages of it are being folded.
fn wait_while_paused(qmp: &mut Qmp) -> Result<(), SnapshotError> {
    let end = Instant::now() + MOMENT;
    while qmp.query("query-status")?["status"] == "paused" && Instant::now() < end {
        std::thread::sleep(LOOK);
    }
    Ok(())
}

fn not_running(status: &Value) -> Option<String> {
    let now = status["status"].as_str().unwrap_or("unknown");
    let what = match now {
        "running" => return None,
        "io-error" => {
            "the host's disk was full or failed when the guest wrote; free space, then run 'memfold vm resume'"
        }
        "paused" => "run 'memfold vm resume' first",
        _ => "wait until the VM runs",
    };
    Some(format!("the VM stands still (QEMU says '{now}'): {what}"))
}

fn blocked(migration: &Value) -> Option<String> {
    let reasons = migration["blocked-reasons"].as_array()?;
    let reasons: Vec<&str> = reasons.iter().filter_map(Value::as_str).collect();
    (!reasons.is_empty()).then(|| {
        format!(
            "QEMU cannot save this VM's devices: {}; start the VM without them",
            reasons.join("; ")
        )
    })
}

/// Returns whether a device in the answer to `query-block` is one of the description's disks, or
/// the seed disk that the description contains.
pub(super) fn is_known(device: &Value, spec: &VmSpec) -> bool {
    let path = device["qdev"].as_str().unwrap_or_default();
    let seed = seed_disk::DEVICE;
    let is_seed = path == seed || path.contains(&format!("/{seed}/"));
    (spec.cloud_init.is_some() && is_seed)
        || (0..spec.disks.len()).any(|disk| spec.is_disk(disk, path))
}

/// Returns whether a device is firmware flash. The contents of flash are also in RAM, and its file
/// is copied (`written_files`). In a copy of a VM that memfold did not start, flash has no file.
pub(super) fn is_flash(device: &Value, spec: &VmSpec) -> bool {
    let text = |key: &str| device[key].as_str().unwrap_or_default();
    let file = device["inserted"]["file"].as_str().unwrap_or_default();
    (text("device").contains("pflash") || text("qdev").contains("/system.flash"))
        && (file.starts_with('/') || spec.foreign.is_some())
}

/// Describes a writable disk that is not in the description, if there is one.
fn foreign_disk(devices: &Value, spec: &VmSpec) -> Option<String> {
    let mut devices = devices.as_array()?.iter().filter(|device| {
        device["inserted"].is_object()
            && device["inserted"]["ro"] != true
            && !is_known(device, spec)
            && !is_flash(device, spec)
    });
    let device = devices.next()?;
    let names = ["device", "qdev"].map(|key| device[key].as_str().unwrap_or_default());
    let foreign = names.into_iter().find(|name| !name.is_empty());
    let foreign = foreign.unwrap_or("without a name");
    Some(format!(
        "the VM has a disk that is not in its description ('{foreign}') and would not be part of the snapshot; start the VM with that disk as --disk, or read-only"
    ))
}

/// Describes the VM's TPM, if there is one. The TPM's state is in another process or in hardware,
/// which a second VM cannot have.
fn tpm(tpms: &Value) -> Option<String> {
    let tpm = tpms.as_array()?.first()?;
    let id = tpm["id"].as_str().unwrap_or("without a name");
    Some(format!(
        "the VM has a TPM ('{id}'), whose state is in another process (swtpm) and would not be part of the snapshot; start the VM without a TPM"
    ))
}

/// Describes hot-plugged RAM, if there is any. Segments do not count: they are separate files,
/// which a restored VM maps again.
fn plugged_memory(devices: &Value) -> Option<String> {
    let plugged = devices
        .as_array()?
        .iter()
        .find(|device| device["type"] != "virtio-pmem" && device["data"]["hotplugged"] == true)?;
    let plugged = plugged["data"]["id"].as_str().unwrap_or("without a name");
    Some(format!(
        "memory was plugged into the running VM (device '{plugged}'), and a VM of the snapshot would lack it; unplug it, or start the VM with more memory"
    ))
}

fn plugged_device(qmp: &mut Qmp) -> Result<(), SnapshotError> {
    for path in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let list = qmp.execute("qom-list", json!({ "path": path }))?;
        for device in list.as_array().into_iter().flatten() {
            let Some(name) = device["name"].as_str() else {
                continue;
            };
            let number = name.strip_prefix("seg").unwrap_or_default();
            let is_child = |kind: &str| kind.starts_with("child<");
            if number.parse::<u32>().is_ok() || !device["type"].as_str().is_some_and(is_child) {
                continue;
            }
            let property = json!({ "path": format!("{path}/{name}"), "property": "hotplugged" });
            let asked = qmp.execute("qom-get", property);
            // An object without this property is not a device.
            if asked.is_ok_and(|is_plugged| is_plugged == true) {
                return Err(SnapshotError::Impossible(format!(
                    "device '{name}' was plugged into the running VM, and a VM of the snapshot would lack it; unplug it (QMP: device_del)"
                )));
            }
        }
    }
    Ok(())
}

/// Refuses device memory other than segments, because it would not be saved.
pub(super) fn check_memory(spec: &VmSpec, qmp: &mut Qmp) -> Result<(), SnapshotError> {
    let blocks = memfold_vm::ram::read_blocks(qmp)?;
    let blocks = blocks.iter();
    let unnamed = blocks.filter(|b| b.name.is_empty() && b.used_bytes > 0);
    if unnamed.count() > spec.segments.len() {
        return Err(SnapshotError::Impossible(
            "the VM maps device memory that is not a memfold segment, which QEMU would not save either".into(),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_monitor;
    use memfold_units::ByteSize;
    use memfold_vm::DiskSpec;

    #[test]
    fn a_vm_that_is_stopped_for_a_moment_is_waited_for() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("qmp");
        let mut states = ["none", "paused", "paused", "running"].into_iter();
        let server = fake_monitor::serve(&path, move |_| {
            Some(json!({ "return": { "status": states.next().unwrap() } }))
        });
        let mut qmp = Qmp::connect(&path, Duration::from_secs(10)).unwrap();
        wait_while_paused(&mut qmp).unwrap();
        drop(qmp);
        assert_eq!(server.join().unwrap().len(), 4, "it was not waited for");
    }

    #[test]
    fn a_save_names_hardware_that_a_snapshot_cannot_contain() {
        assert_eq!(not_running(&json!({ "status": "running" })), None);
        let full = not_running(&json!({ "status": "io-error" })).unwrap();
        assert!(full.contains("free space"), "{full}");
        assert_eq!(blocked(&json!({})), None);
        let why = blocked(&json!({ "blocked-reasons": ["a thing", "another"] })).unwrap();
        assert!(why.contains("a thing; another"), "{why}");
        let segment = json!([{ "type": "virtio-pmem", "data": { "id": "seg0" } }]);
        assert_eq!(plugged_memory(&segment), None);
        let dimm = json!([{ "type": "dimm", "data": { "id": "dimm1", "hotplugged": true } }]);
        assert!(plugged_memory(&dimm).unwrap().contains("'dimm1'"));
        let from_start =
            json!([{ "type": "dimm", "data": { "id": "dimm0", "hotplugged": false } }]);
        assert_eq!(plugged_memory(&from_start), None);
    }

    #[test]
    fn a_save_refuses_a_writable_disk_that_is_not_in_the_description_of_the_vm() {
        let file = json!({ "ro": false });
        let fine = json!([
            { "device": "", "qdev": "/machine/peripheral/vd0/virtio-backend", "inserted": file },
            { "device": "", "qdev": "vd1", "inserted": file },
            { "device": "cd", "qdev": "cd", "inserted": { "ro": true } },
            { "device": "ide2-cd0", "qdev": "x" },
            { "device": "pflash1", "inserted": { "ro": false, "file": "/vars" } },
            { "device": "", "qdev": "/machine/system.flash1", "inserted": { "ro": false, "file": "/vars" } },
            { "device": "drive-efidisk0", "qdev": "/machine/system.flash1", "inserted": { "ro": false, "file": "/vars" } },
        ]);
        let with = |disks: usize| {
            let mut spec = VmSpec::new("a", ByteSize::mib(64));
            spec.disks = (0..disks).map(|n| DiskSpec::new(format!("/{n}"))).collect();
            spec
        };
        assert_eq!(foreign_disk(&fine, &with(2)), None);
        assert!(foreign_disk(&fine, &with(1)).unwrap().contains("'vd1'"));
        let foreign = json!([{ "device": "data", "qdev": "/machine/peripheral-anon/device[3]/virtio-backend", "inserted": file }]);
        assert!(foreign_disk(&foreign, &with(1)).unwrap().contains("'data'"));
        let elsewhere = json!([{ "device": "pflash1", "inserted": { "ro": false, "file": "nbd+unix:///?socket=/s" } }]);
        assert!(
            foreign_disk(&elsewhere, &with(0))
                .unwrap()
                .contains("'pflash1'")
        );
        assert_eq!(tpm(&json!([])), None);
        assert!(
            tpm(&json!([{ "id": "tpm0", "model": "tpm-crb" }]))
                .unwrap()
                .contains("'tpm0'")
        );
    }
}

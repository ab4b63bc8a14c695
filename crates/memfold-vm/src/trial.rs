//! Tests whether QEMU starts with a copied command line: starts such a QEMU paused, compares its
//! devices with those of the original, and kills it.
//!
//! ```text
//!   words of the copy + files as disks, empty, as large --> QEMU -S --> same devices, RAM blocks, media? --> writes its device state --> killed
//! ```
//! No file of the original VM is opened for writing, no guest code runs, and guest RAM is never
//! accessed. So a save, while the VM still runs, reports errors that otherwise only a restore would
//! find.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use memfold_host::qemu::QemuFacts;
use memfold_units::ByteSize;
use serde_json::{Value, json};

use super::command_line::arguments;
use super::directory::VmDirectory;
use super::launch::{log_tail, qemu_command, reap};
use super::qmp::Qmp;
use super::ram::{self, RamError};
use super::spec::{DiskFormat, DiskSpec, VmSpec};

/// Timeout of QEMU's start, and of each answer of its monitor.
const START_TIMEOUT: Duration = Duration::from_secs(30);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

const NAME: &str = "try";

/// A started QEMU, which is killed when this value is dropped.
struct Started(Option<Child>);

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // This fails only if QEMU has ended.
            let _ = child.kill();
            reap(child);
        }
    }
}

/// Parts of a QEMU that a second QEMU must have, too: devices, RAM blocks, media.
#[derive(Debug)]
pub struct MachineParts {
    devices: Counts,
    blocks: Counts,
    /// Answer to `query-block`.
    media: Value,
}

impl MachineParts {
    /// Reads the parts of a running QEMU.
    pub fn of(qmp: &mut Qmp) -> Result<Self, RamError> {
        let blocks = ram::read_blocks(qmp)?.into_iter();
        let named = blocks.filter(|block| !block.name.is_empty() && block.used_bytes > 0);
        let named = named.map(|block| {
            let length = ByteSize(block.used_bytes);
            (format!("'{}' ({length})", block.name), 1)
        });
        Ok(Self {
            devices: devices(&qmp.human("info qtree")?),
            blocks: named.collect(),
            media: qmp.query("query-block")?,
        })
    }

    /// Returns the entry of a disk in the answer to `query-block`.
    fn medium(&self, spec: &VmSpec, disk: usize) -> Option<&Value> {
        let mut devices = self.media.as_array()?.iter();
        let device = devices.find(|device| {
            let at = device["qdev"].as_str().unwrap_or_default();
            spec.is_disk(disk, at)
        });
        device?.get("inserted").filter(|medium| medium.is_object())
    }

    /// Returns the differences between this machine and `other`, as text.
    fn differences(&self, other: &Self, spec: &VmSpec) -> Vec<String> {
        let mut found = Vec::new();
        compare("device", &self.devices, &other.devices, &mut found);
        compare("RAM block", &self.blocks, &other.blocks, &mut found);
        let disks = (0..spec.disks.len()).filter(|disk| other.medium(spec, *disk).is_none());
        found.extend(disks.map(|disk| format!("disk {disk} would not be in the VM's drive")));
        found
    }
}

/// Starts a QEMU with `spec` as a restore would, and kills it. The error says why QEMU does not
/// start, or how the machine differs from `wanted`.
pub fn start_once(spec: &VmSpec, wanted: &MachineParts) -> Result<(), String> {
    let place = tempfile::Builder::new()
        .prefix("memfold-try.")
        .tempdir()
        .map_err(|error| format!("cannot create the directory for a trial start: {error}"))?;
    let directory = VmDirectory::of(place.path(), NAME);
    let failed = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
    directory
        .create()
        .map_err(|error| failed("cannot create the directory for a trial start", &error))?;
    let spec = with_empty_disks(spec, wanted, place.path())
        .map_err(|error| failed("cannot create the disks for a trial start", &error))?;
    let qemu = QemuFacts::probe().map_err(|error| failed("cannot use QEMU", &error))?;
    let log = File::create(directory.qemu_log());
    let child = log
        .and_then(|log| qemu_command(&qemu.program, log))
        .map_err(|error| error.to_string())?
        .arg("-S")
        .args(arguments(&spec, "", "", &directory, &[]))
        .current_dir(directory.path())
        .spawn()
        .map_err(|error| failed("cannot use QEMU", &error))?;
    let mut started = Started(Some(child));
    let mut tried = wait_for_monitor(&mut started, &directory)?;
    let parts = MachineParts::of(&mut tried).map_err(|error| failed("QEMU's monitor", &error))?;
    let differences = wanted.differences(&parts, &spec);
    if !differences.is_empty() {
        return Err(format!(
            "the machine would differ: {}",
            differences.join("; ")
        ));
    }
    // This command makes QEMU crash if it has certain devices; this VM has none of them.
    let nowhere = json!({ "filename": "/dev/null", "live": false });
    tried
        .execute("xen-save-devices-state", nowhere)
        .map(drop)
        .map_err(|error| failed("QEMU cannot save the VM's devices", &error))
}

fn wait_for_monitor(started: &mut Started, directory: &VmDirectory) -> Result<Qmp, String> {
    let end = Instant::now() + START_TIMEOUT;
    let said = |what: String| match log_tail(directory) {
        words if words.is_empty() => what,
        words => format!("{} ({what})", words.replace('\n', "; ")),
    };
    loop {
        let ended = started.0.as_mut().map(Child::try_wait).transpose();
        match ended.map(Option::flatten) {
            Ok(None) => {}
            Ok(Some(status)) => return Err(said(status.to_string())),
            Err(error) => return Err(said(error.to_string())),
        }
        // The socket exists once QEMU listens, and QEMU answers once it has created its devices.
        if directory.qmp().exists() {
            let left = end.saturating_duration_since(Instant::now());
            match Qmp::connect(
                &directory.qmp(),
                left.max(Duration::from_millis(100)).min(ANSWER_TIMEOUT),
            ) {
                Ok(qmp) => return Ok(qmp),
                Err(error) if Instant::now() >= end => return Err(said(error.to_string())),
                Err(_) => {}
            }
        }
        if Instant::now() >= end {
            let limit = START_TIMEOUT.as_secs();
            return Err(said(format!("QEMU did not answer within {limit} s")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the description with empty files in place of its disks.
fn with_empty_disks(spec: &VmSpec, wanted: &MachineParts, place: &Path) -> std::io::Result<VmSpec> {
    let mut spec = spec.clone();
    NAME.clone_into(&mut spec.name);
    for number in 0..spec.disks.len() {
        let path = place.join(format!("disk{number}"));
        let medium = wanted.medium(&spec, number);
        let size = medium.and_then(|medium| medium["image"]["virtual-size"].as_u64());
        File::create(&path)?.set_len(size.unwrap_or(1 << 30))?;
        let read_only = spec.disks[number].read_only;
        spec.disks[number] = DiskSpec::new(path);
        spec.disks[number].format = Some(DiskFormat::Raw);
        spec.disks[number].read_only = read_only;
    }
    if let Some(foreign) = &mut spec.foreign {
        for disk in &mut foreign.disks {
            disk.node.clone_from(&disk.drive);
        }
    }
    Ok(spec)
}

type Counts = BTreeMap<String, usize>;

fn compare(what: &str, before: &Counts, after: &Counts, found: &mut Vec<String>) {
    for (name, number) in before {
        if after.get(name).unwrap_or(&0) < number {
            found.push(format!("{what} {name} would be missing"));
        }
    }
    for (name, number) in after {
        if before.get(name).unwrap_or(&0) < number {
            found.push(format!("{what} {name} would be new"));
        }
    }
}

/// Counts the devices in the output of `info qtree`, by lines such as `dev: e1000, id "net0"`.
fn devices(tree: &str) -> Counts {
    let mut counts = Counts::new();
    for line in tree.lines() {
        if let Some(device) = line.trim_start().strip_prefix("dev: ") {
            *counts.entry(device.replace(", id \"\"", "")).or_default() += 1;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_additional_devices_of_a_trial_start_are_named() {
        let before =
            devices("  dev: e1000, id \"n\"\n    x = 1\n  dev: VGA, id \"\"\n  dev: VGA, id \"\"");
        let after = devices("  dev: VGA, id \"\"\n  dev: isa-serial, id \"\"");
        let mut found = Vec::new();
        compare("device", &before, &after, &mut found);
        assert_eq!(
            found,
            [
                "device VGA would be missing",
                "device e1000, id \"n\" would be missing",
                "device isa-serial would be new",
            ]
        );
    }
}

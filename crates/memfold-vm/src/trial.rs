//! Tests, when a VM that memfold did not start is saved, whether QEMU starts with memfold's copy of
//! the VM's command line: starts such a QEMU paused, compares its devices with those of the
//! original, and kills it.
//!
//! ```text
//!   words of the copy + files as disks, empty, as large --> QEMU -S --> same devices, RAM blocks, media? --> writes its device state --> killed
//! ```
//! No file of the original VM is opened for writing, no guest code runs, and guest RAM is never
//! accessed. Because the test runs when the snapshot is saved, the operator learns of errors while
//! the original VM still runs, and not at a restore.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use memfold_host::qemu::QemuFacts;
use memfold_units::ByteSize;
use serde_json::{Value, json};

use super::command_line::arguments;
use super::directory::VmDirectory;
use super::launch::{Cancel, LaunchError, qemu_command, reap, wait_for_monitor};
use super::qemu_user::QemuUser;
use super::qmp::Qmp;
use super::ram::{self, RamError};
use super::spec::{DiskFormat, DiskSpec, VmSpec};

/// Timeout of each answer of QEMU's monitor.
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

/// Devices, RAM blocks and media of a QEMU, which a second QEMU for the same VM must have, too.
#[derive(Debug)]
pub struct MachineParts {
    devices: Counts,
    blocks: Counts,
    /// Answer to `query-block`.
    media: Value,
}

impl MachineParts {
    /// Reads devices, RAM blocks and media of a running QEMU.
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

/// Starts a paused QEMU for the VM description `spec`, compares its devices with `wanted`, and
/// kills it. The error says why QEMU does not start, or how its devices differ.
pub fn start_once(spec: &VmSpec, wanted: &MachineParts) -> Result<(), String> {
    let failed = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
    let no_directory = |error| failed("cannot create the directory for a trial start", &error);
    let place = tempfile::Builder::new().prefix("memfold-try.").tempdir();
    let place = place.map_err(no_directory)?;
    let directory = VmDirectory::of(place.path(), NAME);
    directory.create().map_err(no_directory)?;
    let spec = with_empty_disks(spec, wanted, place.path())
        .map_err(|error| failed("cannot create the disks for a trial start", &error))?;
    let qemu = QemuFacts::probe().map_err(|error| failed("cannot use QEMU", &error))?;
    let user = QemuUser::choose(&spec).map_err(|error| memfold_host::chain(&error))?;
    let log = File::create(directory.qemu_log());
    let child = log
        .and_then(|log| qemu_command(&qemu.program, log))
        .map_err(|error| error.to_string())?
        .arg("-S")
        .args(arguments(&spec, "", "", &directory, &[], user))
        .current_dir(directory.path())
        .spawn()
        .map_err(|error| failed("cannot use QEMU", &error))?;
    let mut started = Started(Some(child));
    let child = started.0.as_mut().ok_or("QEMU was not started")?;
    let monitor = wait_for_monitor(child, &directory, ANSWER_TIMEOUT, &Cancel::default());
    let mut tried = monitor.map_err(|error| match error {
        LaunchError::Start { what, output } if output.is_empty() => what,
        LaunchError::Start { what, output } => format!("{} ({what})", output.replace('\n', "; ")),
        error => error.to_string(),
    })?;
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

/// Returns the description with empty files in place of its disks.
fn with_empty_disks(spec: &VmSpec, wanted: &MachineParts, place: &Path) -> std::io::Result<VmSpec> {
    let mut spec = spec.clone();
    NAME.clone_into(&mut spec.name);
    for number in 0..spec.disks.len() {
        let path = place.join(format!("disk{number}"));
        let medium = wanted.medium(&spec, number);
        let size = medium.and_then(|medium| medium["image"]["virtual-size"].as_u64());
        File::create(&path)?.set_len(size.unwrap_or(1 << 30))?;
        spec.disks[number] = DiskSpec {
            format: Some(DiskFormat::Raw),
            read_only: spec.disks[number].read_only,
            ..DiskSpec::new(path)
        };
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
    for (from, to, change) in [(before, after, "missing"), (after, before, "new")] {
        let fewer = from
            .iter()
            .filter(|(name, number)| to.get(*name).unwrap_or(&0) < number);
        found.extend(fewer.map(|(name, _)| format!("{what} {name} would be {change}")));
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
    fn devices_that_a_copy_of_a_vm_would_lack_or_have_in_addition_are_named() {
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

//! Rebooting a VM: its guest does it, or the VM goes back to what it was right after a boot.
//!
//! ```text
//!   vm run --boot-snapshot   agent answers -> systemd says that all is started -> snapshot NAME-boot
//!   vm reboot --from-boot-snapshot   VM ended, NAME-boot restored under its name: no firmware, no kernel, no services
//! ```

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::machine::Machine;
use super::{Daemon, DaemonError};
use crate::api::{BootSnapshot, RebootRequest, RestoreRequest, SaveRequest, VmInfo};
use crate::snapshot::{Manifest, restore};

/// How long a guest may take to start all that it starts, once its agent runs.
const BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// What a guest runs to say that all is started. A unit that failed is no reason to wait, nor is an init that isn't systemd.
const BOOTED: &str = "timeout 280 systemctl is-system-running --wait > /dev/null 2>&1 || true";

/// What differs from boot to boot.
const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";

/// The guest reboots when it has answered.
const REBOOT: &str = "(sleep 0.3; systemctl reboot) > /dev/null 2>&1 &";

/// How long a guest may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Name of the snapshot of a VM right after its boot.
fn snapshot_of(vm: &str) -> String {
    format!("{vm}-boot")
}

impl Daemon {
    /// Saves a VM that boots, as soon as it is up.
    pub(super) fn save_when_booted(self: &Arc<Self>, machine: &Arc<Machine>) {
        machine.set_boot_snapshot(BootSnapshot::Pending);
        let (weak, watched) = (Arc::downgrade(self), Arc::downgrade(machine));
        let work = move || {
            while let (Some(daemon), Some(machine)) = (weak.upgrade(), watched.upgrade()) {
                // Not kept alive by a guest that never answers.
                if machine.wait_agent(Duration::from_secs(1)).is_err() {
                    continue;
                }
                let saved = daemon.save_booted(&machine);
                if let Err(error) = &saved {
                    warn!(
                        vm = machine.name(),
                        error = error as &dyn std::error::Error,
                        "not saved after its boot"
                    );
                }
                machine.set_boot_snapshot(saved.map_or_else(
                    |error| BootSnapshot::Failed(error.to_string()),
                    |()| BootSnapshot::Ready,
                ));
                return;
            }
        };
        let spawned = std::thread::Builder::new()
            .name("booted".into())
            .spawn(work);
        if let Err(error) = spawned {
            machine.set_boot_snapshot(BootSnapshot::Failed(error.to_string()));
        }
    }

    fn save_booted(&self, machine: &Machine) -> Result<(), DaemonError> {
        machine.run(BOOTED, BOOT_TIMEOUT)?;
        let name = snapshot_of(machine.name());
        // Of an earlier VM of this name.
        if self.shelf.path(&name)?.exists() {
            self.remove_snapshot(&name)?;
        }
        self.save_snapshot(&SaveRequest::new(machine.name(), name))?;
        Ok(())
    }

    /// What a VM that this daemon has taken over, or restored, has of it.
    pub(super) fn find_boot_snapshot(&self, machine: &Machine) {
        if machine.vm().spec().is_some_and(|spec| spec.boot_snapshot) {
            machine.set_boot_snapshot(match self.boot_snapshot(machine) {
                Ok(_) => BootSnapshot::Ready,
                Err(error) => BootSnapshot::Failed(error.to_string()),
            });
        }
    }

    /// The snapshot of a VM right after its boot, if that is what it is.
    fn boot_snapshot(&self, machine: &Machine) -> Result<Manifest, DaemonError> {
        let name = snapshot_of(machine.name());
        let none = |why: &str| {
            DaemonError::BadRequest(format!(
                "there is no snapshot of '{}' right after its boot: {why}",
                machine.name()
            ))
        };
        if !self.shelf.path(&name)?.exists() {
            return Err(none(
                "start the VM with --boot-snapshot, and wait until 'vm list --json' says that it is ready",
            ));
        }
        let manifest = self.shelf.manifest(&name)?;
        let restored = restore::users(&self.shelf, &name)?.contains(&machine.pid());
        // The record is written when QEMU starts, and again when a snapshot freezes disks; the description only then.
        let started_s = machine
            .vm()
            .directory()
            .and_then(|directory| std::fs::metadata(directory.spec()).ok())
            .and_then(|facts| u64::try_from(facts.mtime()).ok());
        let is_ours = started_s.is_some_and(|started_s| started_s <= manifest.created_s);
        if manifest.vm != machine.name() || !(restored || is_ours) {
            return Err(none(&format!(
                "'{name}' is of another VM, or of an earlier one of this name"
            )));
        }
        Ok(manifest)
    }

    /// Reboots a VM.
    pub fn reboot(
        self: &Arc<Self>,
        name: &str,
        request: &RebootRequest,
        timeout: Duration,
    ) -> Result<VmInfo, DaemonError> {
        let machine = self.machine(name)?;
        if request.from_boot_snapshot {
            self.go_back(&machine)
        } else {
            reboot_guest(&machine, timeout)?;
            Ok(machine.info())
        }
    }

    fn go_back(self: &Arc<Self>, machine: &Machine) -> Result<VmInfo, DaemonError> {
        let manifest = self.boot_snapshot(machine)?;
        let name = machine.name();
        // All that can be known to fail, before anything ends.
        restore::spec(&self.shelf, &manifest, name)?;
        self.shelf.checked_ram(&manifest)?;
        self.stop_vm(name, Duration::ZERO)?;
        let request = RestoreRequest {
            // Who else runs from it did so before.
            force: true,
            ..RestoreRequest::new(name)
        };
        let info = self.restore(&manifest.name, &request)?;
        info!(vm = name, "as it was right after its boot");
        Ok(info)
    }
}

/// Has the guest reboot, and waits until its agent is back.
fn reboot_guest(machine: &Machine, timeout: Duration) -> Result<(), DaemonError> {
    let end = Instant::now() + timeout;
    let boot_id = |limit| machine.run(BOOT_ID, limit).map(|answer| answer.stdout);
    let before = boot_id(ANSWER_TIMEOUT)?;
    machine.run(REBOOT, ANSWER_TIMEOUT)?;
    loop {
        std::thread::sleep(Duration::from_millis(500));
        // No answer: it is on its way.
        if boot_id(Duration::from_secs(2)).is_ok_and(|now| now != before) {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(DaemonError::BadRequest(format!(
                "the guest of '{}' was told to reboot and isn't back after {} s",
                machine.name(),
                timeout.as_secs()
            )));
        }
    }
}

//! Boots and reboots of VMs. For a reboot, the guest's systemd restarts the guest, or the daemon
//! restores the VM from its boot snapshot.
//!
//! ```text
//!   vm run --boot-snapshot   agent answers -> systemd says that all is started -> snapshot NAME-boot
//!   vm reboot --from-boot-snapshot   VM ended, NAME-boot restored under its name: no firmware, no kernel, no services
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{BootSnapshot, RebootRequest, RestoreRequest, SaveRequest, Sizing, VmInfo};
use memfold_host::chain;
use memfold_snapshot::{Manifest, restore};
use memfold_vm::{AgentError, Definition, LaunchError, VmDirectory, VmSpec};
use memfold_wire::order::GuestOrder;
use tracing::{info, warn};

use crate::boot_snapshot::{self, mark, name_of};
use crate::boot_work;
use crate::error::DaemonError;
use crate::machine::settings::Settings;
use crate::machine::{Machine, is_disconnected, text};
use crate::mechanisms::Mechanisms;
use crate::snapshots::{SaveKind, Snapshots};
use crate::threads;
use crate::vms::Vms;

/// Time limit for the guest's systemd to start all units, counted from the first answer of the
/// guest's agent.
const BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// Time limit for a short command in the guest, and for the removal of an ended VM from the
/// daemon's table.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts and reboots VMs, and saves boot snapshots.
#[derive(Debug)]
pub struct Boots {
    pub(crate) below: Arc<Mechanisms>,
    pub(crate) vms: Arc<Vms>,
    pub(crate) snapshots: Arc<Snapshots>,
}

impl Boots {
    /// Starts a VM.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Braked`] while the brake is on.
    pub fn run(self: &Arc<Self>, spec: VmSpec) -> Result<VmInfo, DaemonError> {
        self.below.debt.admit(&spec.name, 0, false)?.started();
        self.run_despite_brake(spec)
    }

    /// Starts a VM even while the brake is on.
    pub fn run_despite_brake(self: &Arc<Self>, spec: VmSpec) -> Result<VmInfo, DaemonError> {
        check_segments(&spec)?;
        // Snapshots whose files the description names are not removed until QEMU runs.
        let named = restore::named_by(&self.below.snapshots, &spec).into_iter();
        let named = named.map(|name| self.below.snapshot_locks.begin(&name));
        let _named = named.collect::<Result<Vec<_>, _>>()?;
        let boots = spec.boot_snapshot;
        let name = spec.name.clone();
        let info = self.vms.launch(spec, |state, spec, cancel| {
            let vm = memfold_vm::start_unless(cancel, state, spec, None)?;
            self.vms.share_kernel(&vm);
            Ok(vm)
        })?;
        // If the VM has ended already, nothing is saved.
        let Ok(machine) = self.below.registry.machine(&name) else {
            return Ok(info);
        };
        boot_work::enable_swap(&machine);
        boot_work::lay_segments(&machine, boots);
        if boots {
            self.save_when_booted(&machine);
        }
        Ok(machine.info())
    }

    /// Checks a VM's description without starting the VM. Makes paths absolute, and records the
    /// formats of disks.
    pub(crate) fn check(&self, definition: &mut Definition) -> Result<(), DaemonError> {
        check_segments(&definition.vm)?;
        definition.validate().map_err(LaunchError::from)?;
        // The segments are checked and not kept: until the VM starts, they may be removed.
        drop(self.below.segments.take(&mut definition.vm.clone())?);
        Ok(())
    }

    /// Saves the boot snapshot of a VM on a thread, as soon as the guest has booted.
    fn save_when_booted(self: &Arc<Self>, machine: &Arc<Machine>) {
        machine.set_boot_snapshot(BootSnapshot::Pending);
        boot_work::mark(machine, VmDirectory::boot_snapshot_pending);
        let weak = Arc::downgrade(self);
        let begun = machine.on_agent("booted", Duration::MAX, move |machine| {
            let Some(boots) = weak.upgrade() else {
                return true;
            };
            machine.set_boot_snapshot(match boots.save_booted(machine) {
                Ok(()) => BootSnapshot::Ready,
                // The guest has probably rebooted.
                Err(DaemonError::Agent(error)) if is_disconnected(&error) => return false,
                Err(error) => {
                    warn!(
                        vm = machine.name(),
                        error = &error as &dyn std::error::Error,
                        "cannot save the VM's boot snapshot; fix the cause and start the VM again"
                    );
                    BootSnapshot::Failed(error.to_string())
                }
            });
            boot_work::unmark(machine, VmDirectory::boot_snapshot_pending);
            true
        });
        if let Err(error) = begun {
            machine.set_boot_snapshot(BootSnapshot::Failed(error.to_string()));
            boot_work::unmark(machine, VmDirectory::boot_snapshot_pending);
        }
    }

    fn save_booted(&self, machine: &Machine) -> Result<(), DaemonError> {
        let booted = machine.run(GuestOrder::WaitBooted, BOOT_TIMEOUT)?;
        if booted.code != 0 {
            let state = text(&booted.stdout);
            return Err(DaemonError::BadRequest(format!(
                "the guest did not start everything: systemd says '{state}'"
            )));
        }
        // A segment that cannot be mounted in the guest is shown in the list of VMs.
        boot_work::lay(machine);
        let name = name_of(machine.name());
        // A boot snapshot of an earlier VM of this name is removed. A snapshot that a user has
        // saved under this name stays.
        let is_old =
            |manifest: Manifest| manifest.vm == machine.name() && manifest.of_boot.is_some();
        if self.below.snapshots.manifest(&name).is_ok_and(is_old) {
            self.snapshots.remove(&name)?;
        }
        self.snapshots.save_as(
            &SaveRequest::new(machine.name(), name),
            &SaveKind::Boot(mark(machine)),
        )?;
        Ok(())
    }

    /// Reboots a VM: its guest reboots, or the daemon restores the VM from its boot snapshot, as
    /// `request` says. `timeout` limits the time of the guest's reboot.
    pub fn reboot(
        self: &Arc<Self>,
        name: &str,
        request: &RebootRequest,
        timeout: Duration,
    ) -> Result<VmInfo, DaemonError> {
        let machine = self.below.registry.machine(name)?;
        if request.from_boot_snapshot {
            self.go_back(&machine)
        } else {
            reboot_guest(&machine, timeout)?;
            Ok(machine.info())
        }
    }

    fn go_back(self: &Arc<Self>, machine: &Machine) -> Result<VmInfo, DaemonError> {
        let manifest = boot_snapshot::of(&self.below.snapshots, machine)?;
        let name = machine.name();
        let _saving = machine.save_right_unless_saved()?;
        // The snapshot is checked before the VM is stopped.
        restore::spec(&self.below.snapshots, &manifest, name)?;
        let progress = self.below.snapshot_locks.begin(&manifest.name)?;
        self.below.snapshots.checked_image(&manifest, &progress)?;
        let settings = machine.settings();
        let sizing = self.below.rightsizing.sizing(machine);
        // Another VM may have this name by now, so this code stops the machine instead of looking
        // the name up.
        machine.stop(Duration::ZERO)?;
        threads::wait_until(ANSWER_TIMEOUT, Duration::from_millis(5), || {
            let now = self.below.registry.machine(name);
            !now.is_ok_and(|now| now.id() == machine.id())
        });
        let request = RestoreRequest {
            // Other VMs that run from the snapshot already did so before.
            force: true,
            // The VM ran before the reboot; if the brake refused its start, the VM would be lost.
            despite_brake: true,
            ttl_s: settings.ttl_s,
            ..RestoreRequest::new(name)
        };
        let restored = self.snapshots.restore(&manifest.name, &request).map_err(|error| {
            DaemonError::BadRequest(format!(
                "VM '{name}' was ended, but could not be restored: {}; retry with 'memfold snapshot restore {} --as {name}'",
                chain(&error),
                manifest.name
            ))
        })?;
        // These may have been changed since the save.
        let machine = self.below.registry.machine(&restored.name)?;
        let set = self.set(&machine, settings.fold, settings.resume_when_room, sizing);
        set.map_err(|error| {
            DaemonError::BadRequest(format!(
                "VM '{name}' runs from its boot snapshot, but without the settings that it had: {}; set them with 'memfold vm set {name}'",
                chain(&error)
            ))
        })?;
        info!(vm = name, "VM restored from its boot snapshot");
        Ok(machine.info())
    }

    /// Gives a restored VM settings and limits that the saved VM may not have had.
    pub(crate) fn set(
        &self,
        machine: &Machine,
        fold: bool,
        resume_when_room: bool,
        sizing: Sizing,
    ) -> Result<(), DaemonError> {
        let _alone = self.below.rightsizing.one_change();
        let before = machine.settings();
        let settings = Settings {
            fold: fold && machine.vm().has_library(),
            resume_when_room,
            ..before
        };
        if settings != before {
            machine.change_settings(settings)?;
        }
        self.below.rightsizing.replace_sizing(machine, sizing)
    }
}

/// Refuses a description that names a segment twice.
fn check_segments(spec: &VmSpec) -> Result<(), DaemonError> {
    let twice = memfold_vm::segments::twice(spec);
    twice.map_or(Ok(()), |name| {
        let why = format!("segments: '{name}' is named twice");
        Err(DaemonError::BadRequest(why))
    })
}

/// Makes the guest reboot, and waits until its agent reports a new boot id.
fn reboot_guest(machine: &Machine, timeout: Duration) -> Result<(), DaemonError> {
    let end = Instant::now() + timeout;
    let boot = |limit| {
        let answer = machine.run(GuestOrder::BootId, limit)?;
        let whole = answer.code == 0 && !answer.stdout.is_empty();
        Ok::<_, AgentError>(whole.then_some(answer.stdout))
    };
    // Without a boot id before, any would be a new one.
    let before = boot(ANSWER_TIMEOUT)?.ok_or_else(|| {
        DaemonError::BadRequest(format!(
            "the guest of '{}' does not tell its boot id (/proc/sys/kernel/random/boot_id)",
            machine.name()
        ))
    })?;
    // Tells the guest to reboot, and returns whether it has answered. It may end its agent before.
    let tell = || match machine.run(GuestOrder::Reboot, ANSWER_TIMEOUT) {
        Ok(done) if done.code != 0 => Err(DaemonError::BadRequest(format!(
            "the guest of '{}' has no systemctl to reboot with",
            machine.name()
        ))),
        Ok(_) => Ok(true),
        Err(AgentError::Lost | AgentError::Timeout { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    };
    let mut is_told = tell()?;
    loop {
        std::thread::sleep(Duration::from_millis(500));
        // No answer means that the guest is rebooting.
        if let Ok(Some(now)) = boot(Duration::from_secs(2)) {
            if before != now {
                return Ok(());
            }
            if !is_told {
                is_told = tell()?;
            }
        }
        if Instant::now() > end {
            return Err(DaemonError::BadRequest(format!(
                "the guest of '{}' was told to reboot, and its agent has not answered after {} s",
                machine.name(),
                timeout.as_secs()
            )));
        }
    }
}

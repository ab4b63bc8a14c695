//! Starts VMs from snapshots. Also records a snapshot's working set, the pages that a VM touches
//! first after a restore. Later restores load these pages in advance.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use memfold_api::{RestoreRequest, VmInfo};
use memfold_snapshot::identity::{Plan, Renew};
use memfold_snapshot::manifest::DEVICES;
use memfold_snapshot::restore::{OwnDisks, PageSource};
use memfold_snapshot::working_set::{self, WorkingSet};
use memfold_snapshot::{Manifest, SnapshotError, restore};
use memfold_transfer::StreamedSnapshot;
use memfold_units::PAGE_SIZE;
use memfold_vm::{Incoming, LaunchError, MacAddress, Qmp, Vm, VmSpec};
use rustix::process::Pid;
use tracing::{debug, info};

use crate::boot_snapshot;
use crate::error::{DaemonError, refused};
use crate::locks::TwinRight;
use crate::machine::Machine;
use crate::segments::in_guest::recall_segments;
use crate::snapshots::Snapshots;
use crate::snapshots::streams::{DiskServer, NewVm};
use crate::threads;

/// Longest wait for another restore of a guest that cannot renew its identity.
const TWIN_PATIENCE: Duration = Duration::from_secs(60);

/// Pause until a VM that is being saved is looked at again.
const SAVE_LASTS: Duration = Duration::from_secs(1);

impl Snapshots {
    /// Returns the name of a VM that has this snapshot's identity: a VM restored from the snapshot,
    /// or the saved VM itself if it still runs.
    fn twin(&self, manifest: &Manifest) -> Result<Option<String>, DaemonError> {
        let pids = restore::users(&self.below.snapshots, &manifest.name)?;
        let machines = self.below.registry.machines();
        let named = |pid: &Pid| match machines.iter().find(|m| m.pid() == *pid) {
            Some(machine) => machine.name().to_owned(),
            None => format!("of process {}", pid.as_raw_nonzero()),
        };
        let restored = pids.first().map(named);
        let is_saved = |m: &&Arc<Machine>| m.name() == manifest.vm && !m.has_exited();
        let saved = || machines.iter().find(is_saved);
        Ok(restored.or_else(|| saved().map(|m| m.name().to_owned())))
    }

    /// Starts a VM from a snapshot.
    ///
    /// # Errors
    ///
    /// Among others: [`SnapshotError::Twin`] if the guest cannot renew its identity and another VM
    /// has the same identity; [`DaemonError::Braked`] while the brake is on.
    pub fn restore(
        self: &Arc<Self>,
        snapshot: &str,
        request: &RestoreRequest,
    ) -> Result<VmInfo, DaemonError> {
        // The lock prevents the removal and replacement of the snapshot, so all files belong to one
        // save.
        let progress = self.below.snapshot_locks.begin(snapshot)?;
        let stream = self.streamed(snapshot);
        let (manifest, mut spec) = if let Some(stream) = &stream {
            self.spec_of_stream(stream, request)?
        } else {
            let manifest = self.below.snapshots.manifest(snapshot)?;
            let spec = restore::spec(&self.below.snapshots, &manifest, &request.vm)?;
            (manifest, spec)
        };
        // The name is checked before the disks are copied, which takes long.
        memfold_vm::check_name("name", &request.vm).map_err(LaunchError::from)?;
        if self.below.registry.contains(&request.vm) {
            return Err(DaemonError::NameTaken(request.vm.clone()));
        }
        restore::choose_host_ends(&mut spec, &request.forwards)?;
        renew_outside_guest(&mut spec, request.renew);
        spec.ttl_s = request.ttl_s;
        let held = manifest.counts.saved_pages.saturating_mul(PAGE_SIZE);
        let admitted = self
            .below
            .debt
            .admit(&request.vm, held, request.despite_brake)?;
        let own_disks = match &request.disks {
            Some(place) => OwnDisks::make((&self.below.snapshots, &mut spec), place, &progress)?,
            None => OwnDisks::default(),
        };
        // One restore at a time, so that each restore sees the VM of the other.
        let _alone = if manifest.tells_twins_apart() {
            None
        } else {
            let alone = TwinRight::try_take(|| self.twins.try_lock_for(TWIN_PATIENCE));
            Some(alone.ok_or_else(others_are_restored)?)
        };
        if !manifest.tells_twins_apart() && !request.force {
            if let Some(other) = self.twin(&manifest)? {
                let name = snapshot.to_owned();
                return Err(SnapshotError::Twin { name, other }.into());
            }
        }
        let plan =
            Plan::new(request.renew, request.keep_clock, &spec).map_err(|error| no_plan(&error))?;
        let image = match &stream {
            Some(stream) => stream.image().clone(),
            None => self.below.snapshots.checked_image(&manifest, &progress)?,
        };
        let incoming = Incoming {
            qemu: manifest.qemu,
            machine: manifest.machine.clone(),
            accel: manifest.accel.clone(),
            arriving: stream.is_some(),
        };
        let launched = self.vms.launch(spec, |state, mut spec, cancel| {
            // The name is this VM's by now: another VM's socket must not be replaced.
            let server = stream.as_ref();
            let server = server.map(|stream| self.serve_disks(stream, &mut spec));
            let server = server.transpose()?;
            let start = || memfold_vm::start_unless(cancel, state, spec, Some(&incoming));
            let (vm, synced) = match &stream {
                Some(_) => (start(), Ok(())),
                None => self.sync_beside(&manifest, start),
            };
            let vm = vm?;
            self.vms.share_kernel(&vm);
            let noted = vm.directory().map_or(Ok(()), |place| plan.write(place));
            let fill = |mut qmp: Qmp| {
                if let (Some(stream), Some(server)) = (&stream, server) {
                    return self.fill_from_stream(&vm, &mut qmp, &manifest, (stream, server));
                }
                let devices = self.below.snapshots.devices(&manifest)?;
                restore::fill(&vm, &mut qmp, &manifest, &devices, (&image, None))
            };
            let filled = synced
                .and_then(|()| noted.map_err(|error| no_plan(&error)))
                .and_then(|()| own_disks.give(vm.user()))
                .and_then(|()| Ok(vm.daemon_qmp()?))
                .and_then(fill);
            match filled {
                Ok(()) => Ok(vm),
                Err(error) => Err(half_restored(&vm, error)),
            }
        });
        drop(image);
        if launched.is_err() {
            self.below.snapshots.let_go();
        }
        let info = launched.inspect(|_| self.note_started(snapshot))?;
        admitted.started();
        own_disks.keep();
        let Ok(machine) = self.below.registry.machine(&request.vm) else {
            // The VM has ended already. Its image may have been in use here, so unused files are
            // removed now.
            self.below.snapshots.let_go();
            return Ok(info);
        };
        boot_snapshot::find(&self.below.snapshots, &machine);
        recall_segments(&machine);
        self.below.rightsizing.note_restored(&machine);
        // Reading the working set ahead would make pages urgent that the guest does not wait for.
        if stream.is_none() {
            self.mind_working_set(machine.clone(), manifest, request.prefetch);
        }
        Ok(machine.info())
    }

    /// Starts a VM's QEMU by calling `start`. Meanwhile, a layer that forks start from is synced to
    /// the disk. Returns the results of both.
    fn sync_beside<T>(
        &self,
        manifest: &Manifest,
        start: impl FnOnce() -> T,
    ) -> (T, Result<(), SnapshotError>) {
        thread::scope(|scope| {
            let synced = scope.spawn(|| self.below.snapshots.sync_layer(manifest));
            let started = start();
            let synced = synced.join().unwrap_or_else(|panic| resume_unwind(panic));
            (started, synced)
        })
    }

    /// Fills a VM that was just started from a snapshot which is being fetched, and notes that the
    /// rest is brought to it.
    fn fill_from_stream(
        &self,
        vm: &Vm,
        qmp: &mut Qmp,
        manifest: &Manifest,
        (stream, server): (&StreamedSnapshot, DiskServer),
    ) -> Result<(), SnapshotError> {
        let layout = vm.layout(qmp)?;
        let first_pages = stream.wait_first();
        debug!(
            vm = vm.name(),
            first_pages, "pages that VMs touch first are here"
        );
        let source = NewVm {
            stream,
            link: Arc::default(),
        };
        let image = (stream.image(), Some(&source as &dyn PageSource));
        let devices = stream.devices().map_err(not_read)?;
        restore::fill(vm, qmp, manifest, &devices, image)?;
        let noted = self.note_streaming(vm, &layout, stream, server, source.link);
        noted.map_err(|error| not_noted(&error))
    }

    /// Returns the manifest of a snapshot that is being fetched, and the description of a VM that
    /// will run from it.
    fn spec_of_stream(
        &self,
        stream: &StreamedSnapshot,
        request: &RestoreRequest,
    ) -> Result<(Manifest, VmSpec), DaemonError> {
        stream.note_start();
        let manifest = stream.manifest().clone();
        if request.disks.is_some() {
            return Err(SnapshotError::Busy(format!(
                "snapshot '{}' is still being fetched, so its disks cannot be copied yet; leave out the directory for disks, or wait until the snapshot is complete",
                manifest.name
            ))
            .into());
        }
        let place = self.below.snapshots.path(&manifest.name)?;
        let spec = restore::unchecked_spec(&place, &manifest, &request.vm);
        Ok((manifest, spec))
    }

    /// Prefetches the snapshot's working set for a restored VM, or records the working set if none
    /// is known. Both happen on a thread while the VM runs.
    fn mind_working_set(&self, machine: Arc<Machine>, manifest: Manifest, prefetch: bool) {
        let Ok(place) = self.below.snapshots.path(&manifest.name) else {
            return;
        };
        let known = WorkingSet::read(&place, &manifest.sums.xxh3_128);
        if known.is_some() && !prefetch {
            return;
        }
        let registry = Arc::downgrade(&self.below.registry);
        let work = move || {
            if let Some(set) = known {
                let places = working_set::places(&manifest, &machine.layout());
                match set.prefetch(machine.pid(), &places) {
                    Ok(pages) => info!(
                        vm = machine.name(),
                        pages, "pages that the restored VM needs first (its working set) loaded"
                    ),
                    Err(error) => {
                        debug!(vm = machine.name(), %error, "cannot load all pages that the restored VM needs first (its working set)");
                    }
                }
                return;
            }
            let (id, name) = (machine.id(), machine.name().to_owned());
            // Dropped, so that this waiting thread does not keep the VM's data.
            drop(machine);
            let began = Instant::now();
            // The pages touched by then. `None`: the VM has ended.
            let touched = |after: Duration| {
                loop {
                    thread::sleep(after.saturating_sub(began.elapsed()));
                    let machine = registry.upgrade().and_then(|all| all.machine(&name).ok());
                    let machine = machine.filter(|machine| machine.id() == id)?;
                    // During a save, all of the VM's pages may look accessed.
                    if let Some(_saving) = machine.try_save() {
                        let places = working_set::places(&manifest, &machine.layout());
                        let image = &manifest.sums.xxh3_128;
                        return Some(WorkingSet::of(machine.pid(), image, &places));
                    }
                    thread::sleep(SAVE_LASTS);
                }
            };
            let [soon, all] = working_set::TIMES;
            let Some((soonest, set)) = touched(soon).and_then(|soon| Some((soon, touched(all)?)))
            else {
                return;
            };
            let found = set.and_then(|set| Ok(set.with_soonest(soonest?)));
            match found.and_then(|set| set.write(&place).map(|()| set)) {
                Ok(set) => info!(
                    vm = name,
                    snapshot = manifest.name,
                    bytes = set.bytes(),
                    "pages that the restored VM touched first (its working set) recorded"
                ),
                Err(error) => {
                    debug!(vm = name, %error, "cannot record which pages the restored VM touched first (its working set)");
                }
            }
        };
        if let Err(error) = threads::begin("working-set", work) {
            debug!(%error, "cannot start the thread that loads or records the restored VM's working set");
        }
    }
}

/// Kills a VM that is only half restored, and returns the error with what its QEMU said.
fn half_restored(vm: &Vm, error: SnapshotError) -> DaemonError {
    // The log is removed with the VM's directory, so it is read first.
    let said = vm.directory().map(memfold_vm::log_tail).unwrap_or_default();
    let _ = vm.stop(Duration::ZERO);
    let error = match error {
        SnapshotError::Qemu(why) if !said.is_empty() => {
            SnapshotError::Qemu(format!("{why}; it said: {said}"))
        }
        other => other,
    };
    error.into()
}

/// Gives a VM the identities that are outside its guest: MAC address and seed disk.
fn renew_outside_guest(spec: &mut VmSpec, renew: Renew) {
    if renew >= Renew::Network && spec.mac.is_some() {
        // The agent gives the guest's card this address, too.
        spec.mac = Some(MacAddress::of_vm(&spec.name));
    }
    let seed = spec.cloud_init.as_mut().and_then(|of| of.seed.as_mut());
    if let (Some(seed), Renew::Identity) = (seed, renew) {
        seed.rename(&spec.name);
    }
}

fn others_are_restored() -> DaemonError {
    refused(
        "another VM is being restored whose guest cannot be set apart from this one",
        "wait until the restore ends, or stop that VM if its QEMU hangs",
    )
}

fn no_plan(error: &std::io::Error) -> SnapshotError {
    SnapshotError::Impossible(format!("cannot give the VM its own identity: {error}"))
}

fn not_read(source: std::io::Error) -> SnapshotError {
    let path = DEVICES.into();
    SnapshotError::Files { path, source }
}

fn not_noted(error: &std::io::Error) -> SnapshotError {
    SnapshotError::Impossible(format!(
        "cannot note in the VM's directory that its snapshot is being fetched: {error}"
    ))
}

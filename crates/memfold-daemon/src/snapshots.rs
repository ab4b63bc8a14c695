//! Saves, restores, lists and removes snapshots of the daemon's VMs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use memfold_api::{CompactReport, RekeyReport, RekeyRequest};
use memfold_host::chain;
use memfold_snapshot::save::Subject;
use memfold_snapshot::{
    Manifest, Progress, SnapshotError, SnapshotInfo, Step, compact, rekey, restore, save,
};
use parking_lot::Mutex;
use rustix::process::Pid;
use tracing::info;

use crate::error::DaemonError;
use crate::machine::Machine;
use crate::mechanisms::Mechanisms;
use crate::vms::Vms;

mod candidates;
mod choose;
mod fork;
mod hold;
mod needed;
mod parent;
mod restore_vm;
mod save_kind;
mod save_vm;
mod streaming;
mod streams;
mod transfer;
mod verify;

pub(crate) use self::save_kind::SaveKind;
use self::streams::Streams;
pub(crate) use self::verify::clear_trials;

/// Service that saves, restores, lists and removes the snapshots of this host.
#[derive(Debug)]
pub struct Snapshots {
    below: Arc<Mechanisms>,
    vms: Arc<Vms>,
    /// Held while a VM is restored whose guest cannot renew its identity.
    twins: Mutex<()>,
    /// Throughput of the disk with the snapshot directory, in bytes a second, and when it was
    /// measured.
    disk_speed: Mutex<Option<(Instant, f64)>>,
    /// Threads that make forked VMs share their memory, by the VMs' names.
    sharing: Mutex<BTreeMap<String, JoinHandle<()>>>,
    /// Layers of forks from which this daemon has started VMs.
    started: Mutex<BTreeSet<String>>,
    /// Why the last unused layer of forks could not be removed, as it was logged.
    unremovable: Mutex<String>,
    streams: Streams,
}

impl Snapshots {
    pub(crate) fn new(below: Arc<Mechanisms>, vms: Arc<Vms>) -> Self {
        Self {
            below,
            vms,
            twins: Mutex::default(),
            disk_speed: Mutex::default(),
            sharing: Mutex::default(),
            started: Mutex::default(),
            unremovable: Mutex::default(),
            streams: Streams::default(),
        }
    }

    /// Returns the progress of the most recent operation on a snapshot; `None` if no operation uses
    /// it.
    pub fn progress(&self, name: &str) -> Option<Step> {
        self.below.snapshot_locks.now(name)
    }

    /// Returns all snapshots of this host, each with the VMs that run from it.
    pub fn list(&self) -> Result<Vec<SnapshotInfo>, DaemonError> {
        let shelf = &self.below.snapshots;
        let names = shelf.names().map_err(|source| SnapshotError::Files {
            path: shelf.root().to_owned(),
            source,
        })?;
        let in_maps = names
            .iter()
            .map(|name| restore::in_maps(shelf, name).unwrap_or_default());
        let users = restore::users_of_each(&in_maps.collect::<Vec<_>>())?;
        let infos = names.iter().zip(&users);
        let mut infos: Vec<_> = infos.map(|(name, pids)| self.info(name, pids)).collect();
        // A VM of a layer maps the images of the layer's parents, too.
        for layer in 0..infos.len() {
            let mut below = infos[layer].parent.clone();
            let users = infos[layer].users.clone();
            // A manifest may say anything, so the walk down is bounded.
            for _ in 0..names.len() {
                let at = below.as_ref();
                let Some(at) = at.and_then(|name| names.iter().position(|n| n == name)) else {
                    break;
                };
                infos[at].users.retain(|vm| !users.contains(vm));
                below.clone_from(&infos[at].parent);
            }
        }
        let streamed = self.streamed_infos().into_iter();
        infos.extend(streamed.filter(|info| !names.contains(&info.name)));
        infos.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(infos)
    }

    fn info(&self, name: &str, pids: &[Pid]) -> SnapshotInfo {
        let manifest = self.below.snapshots.manifest(name);
        let problem = manifest.as_ref().err().map(ToString::to_string);
        let manifest = manifest.as_ref().ok();
        let machines = self.below.registry.machines();
        let users = machines.iter().filter(|m| pids.contains(&m.pid()));
        let disk_bytes = self.below.snapshots.disk_bytes(name).unwrap_or(0);
        SnapshotInfo {
            name: name.to_owned(),
            domain: manifest.and_then(|m| m.domain.clone()),
            vm: manifest.map_or_else(String::new, |m| m.vm.clone()),
            created_s: manifest.map_or(0, |m| m.created_s),
            memory_bytes: manifest.map_or(0, |m| m.memory().0),
            disk_bytes,
            parent: manifest.and_then(|m| Some(m.parent.as_ref()?.name.clone())),
            parent_bytes: manifest.map_or(0, Manifest::parent_bytes),
            fork: manifest.is_some_and(|m| m.fork),
            key: manifest.and_then(|m| Some(m.encryption.as_ref()?.key.clone())),
            users: users.map(|m| m.name().to_owned()).collect(),
            problem,
        }
    }

    /// Returns the manifest of a snapshot: the description of the saved VM and its files.
    pub fn manifest(&self, name: &str) -> Result<Manifest, DaemonError> {
        if let Some(stream) = self.streamed(name) {
            return Ok(stream.manifest().clone());
        }
        Ok(self.below.snapshots.manifest(name)?)
    }

    /// Returns the manifest of a snapshot for users who may not know the secrets of its VM: without
    /// the user data of the VM's seed disk.
    pub fn public_manifest(&self, name: &str) -> Result<Manifest, DaemonError> {
        let mut manifest = self.manifest(name)?;
        let seed = manifest.spec.cloud_init.as_mut();
        if let Some(seed) = seed.and_then(|of| of.seed.as_mut()) {
            seed.user_data = format!("{} bytes, not shown", seed.user_data.len());
        }
        Ok(manifest)
    }

    /// Removes a snapshot.
    ///
    /// # Errors
    ///
    /// [`SnapshotError::InUse`] if a VM runs from the snapshot or names its files,
    /// [`SnapshotError::Named`] if a definition does, [`SnapshotError::BuiltOn`] if other snapshots
    /// need it.
    pub fn remove(&self, name: &str) -> Result<(), DaemonError> {
        self.remove_unused_forks_of(name);
        self.remove_one(name)
    }

    fn remove_one(&self, name: &str) -> Result<(), DaemonError> {
        self.refuse_if_defined(name)?;
        self.stop_stream(name)?;
        let _removal = self.below.snapshot_locks.remove(name)?;
        self.refuse_if_used(name)?;
        let saved = self.below.snapshots.manifest(name);
        match &saved {
            Ok(saved) => self.disks_taken_back(name, &saved.vm)?,
            // The damaged manifest does not say which VM may write above the snapshot's disks.
            Err(_) => self.disks_taken_back_by_users(name)?,
        }
        self.below.snapshots.remove(name)?;
        // The snapshot may have been the last user of an old segment generation.
        for segment in saved.map(|saved| saved.spec.segments).unwrap_or_default() {
            self.below.segments.drop_old(segment.base_name());
        }
        Ok(())
    }

    /// Makes a layer complete, so that it needs no other snapshot.
    ///
    /// # Errors
    ///
    /// [`SnapshotError::BuiltOn`] if other snapshots are built on it, [`SnapshotError::Open`] if a
    /// process uses files that would be replaced: a VM that runs from the layer, or whose disk is
    /// built on it.
    pub fn compact(&self, name: &str) -> Result<CompactReport, DaemonError> {
        let alone = self.below.snapshot_locks.remove(name)?;
        self.make_complete(name, &alone)
    }

    /// Makes a layer complete. The caller has locked the layer for the exchange of its files.
    fn make_complete(&self, name: &str, progress: &Progress) -> Result<CompactReport, DaemonError> {
        let shelf = &self.below.snapshots;
        let mut manifest = shelf.manifest(name)?;
        let mut copied_bytes = 0;
        if !compact::is_complete(shelf, &manifest)? {
            self.refuse_if_built_on(name)?;
            self.refuse_if_open(&manifest)?;
            let made = compact::compact(shelf, &manifest, progress)?;
            (manifest, copied_bytes) = (made.manifest, made.copied_bytes);
            info!(snapshot = name, copied_bytes, "layer made complete");
        }
        Ok(CompactReport {
            name: name.to_owned(),
            copied_bytes,
            own_bytes: manifest.own_bytes(),
            disk_bytes: shelf.disk_bytes(name).unwrap_or(0),
        })
    }

    /// Encrypts the data key of a snapshot with another key of the daemon. VMs that run from the
    /// snapshot go on.
    ///
    /// # Errors
    ///
    /// As of [`rekey::rekey`].
    pub fn rekey(&self, name: &str, request: &RekeyRequest) -> Result<RekeyReport, DaemonError> {
        let _alone = self.below.snapshot_locks.remove(name)?;
        let shelf = &self.below.snapshots;
        let (manifest, key) = (shelf.manifest(name)?, request.key_name.as_str());
        let old_key = rekey::rekey(shelf, &manifest, key)?;
        if let Some(old_key) = old_key.as_deref() {
            info!(snapshot = name, old_key, key, "key of snapshot changed");
        }
        Ok(RekeyReport {
            name: name.to_owned(),
            key: key.to_owned(),
            old_key,
        })
    }

    /// Removes a snapshot, after all layers that need it were made complete.
    pub fn remove_and_merge(&self, name: &str) -> Result<(), DaemonError> {
        self.remove_unused_forks_of(name);
        // Nothing is copied for a snapshot that cannot be removed afterwards.
        self.refuse_if_defined(name)?;
        self.refuse_if_in_vms(name)?;
        let on = |name: &str| restore::built_on(&self.below.snapshots, name);
        let layers = on(name)?;
        for layer in &layers {
            self.refuse_if_open(&self.below.snapshots.manifest(layer)?)?;
        }
        let progress = self.below.snapshot_locks.begin(name)?;
        let mut left = layers.len();
        while left > 0 {
            // One that no other is built on; a complete one is in the list no more.
            let others = on(name)?;
            let top = others
                .iter()
                .find(|other| on(other).is_ok_and(|on| on.is_empty()));
            let Some(top) = top else { break };
            let _alone = self.below.snapshot_locks.remove(top)?;
            self.make_complete(top, &progress)?;
            left -= 1;
        }
        drop(progress);
        self.remove(name)
    }

    /// Does the same as [`Self::disks_taken_back`] for each VM that has a disk of the snapshot
    /// open.
    fn disks_taken_back_by_users(&self, name: &str) -> Result<(), DaemonError> {
        for pid in restore::disk_users(&self.below.snapshots, name)? {
            let machines = self.below.registry.machines();
            let Some(machine) = machines.iter().find(|machine| machine.pid() == pid) else {
                return Err(SnapshotError::Busy(format!(
                    "process {} has a disk of snapshot '{name}' open, and this daemon has no VM in that process. The snapshot's manifest cannot be read, so nothing tells which VM needs the disk. Wait until 'memfold vm list' shows the VM, or end the process; if it is a QEMU, its guest ends",
                    pid.as_raw_nonzero()
                ))
                .into());
            };
            self.disks_taken_back(name, machine.name())?;
        }
        Ok(())
    }

    /// If the saved VM still runs, moves its disk files out of the snapshot before the snapshot is
    /// removed.
    fn disks_taken_back(&self, name: &str, vm: &str) -> Result<(), DaemonError> {
        let place = self.below.snapshots.path(name)?;
        let machine = match self.below.registry.machine(vm) {
            Ok(machine) => machine,
            // The VM may have been saved and ended since the last check.
            Err(DaemonError::NoSuchVm(_)) => return self.refuse_if_built_on(name),
            // The VM runs, but its QEMU cannot be asked yet.
            Err(error) => return Err(error),
        };
        let _alone = machine.save_right_soon()?;
        // A save that has just ended may have built a snapshot on this one.
        self.refuse_if_built_on(name)?;
        // A VM that memfold did not start uses its own disks, and the snapshot has copies.
        if machine.vm().spec().is_none() {
            return Ok(());
        }
        let subject = subject(&machine)?;
        let taken = save::take_back((machine.vm(), &subject), || machine.monitor(), &place);
        // If these files were removed, the VM could not be saved again.
        let why = |error| {
            format!(
                "VM '{vm}' uses disk files of snapshot '{name}', and memfold cannot make them the VM's own: {}. Mend that and try again, or stop the VM and then remove the snapshot",
                chain(&error)
            )
        };
        Ok(taken.map_err(|error| SnapshotError::Impossible(why(error)))?)
    }
}

fn subject(machine: &Machine) -> Result<Subject, SnapshotError> {
    let known = (machine.name(), machine.domain());
    Subject::of(machine.vm(), known, &mut machine.monitor())
}

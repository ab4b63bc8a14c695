//! Saves, restores, lists and removes snapshots of the daemon's VMs.

use std::sync::Arc;
use std::time::Instant;

use memfold_snapshot::{Manifest, SnapshotError, SnapshotInfo, Step, restore};
use parking_lot::Mutex;
use rustix::process::Pid;

use crate::debt::DebtWatch;
use crate::error::DaemonError;
use crate::folding::Folding;
use crate::ksm_steering::KsmSteering;
use crate::mechanisms::Mechanisms;
use crate::segments::Segments;
use crate::snapshot_directory::SnapshotDirectory;
use crate::snapshot_locks::SnapshotLocks;
use crate::vm_registry::VmRegistry;
use crate::vms::Vms;

mod candidates;
mod choose;
mod guest_caches;
mod hold;
mod remove;
mod restore_vm;
mod save;
mod transfer;
mod trial;
mod verify;
mod working_set;

pub(crate) use self::trial::clear as clear_trials;

/// The snapshots of this host, and the operations on them.
#[derive(Debug)]
pub struct Snapshots {
    registry: Arc<VmRegistry>,
    folding: Arc<Folding>,
    ksm: Arc<KsmSteering>,
    debt: Arc<DebtWatch>,
    segments: Arc<Segments>,
    vms: Arc<Vms>,
    directory: Arc<SnapshotDirectory>,
    /// Locks and progress of operations on snapshots.
    locks: Arc<SnapshotLocks>,
    /// Held while a VM is restored whose guest cannot renew its identity.
    twins: Mutex<()>,
    /// Throughput of the disk with the snapshot directory, in bytes a second, and when it was
    /// measured.
    disk_speed: Mutex<Option<(Instant, f64)>>,
}

impl Snapshots {
    pub(crate) fn new(below: &Mechanisms, vms: Arc<Vms>) -> Self {
        Self {
            registry: below.registry.clone(),
            folding: below.folding.clone(),
            ksm: below.ksm.clone(),
            debt: below.debt.clone(),
            segments: below.segments.clone(),
            vms,
            directory: below.snapshots.clone(),
            locks: below.snapshot_locks.clone(),
            twins: Mutex::default(),
            disk_speed: Mutex::default(),
        }
    }

    /// Returns the progress of the most recent operation on a snapshot; `None` if no operation uses
    /// it.
    pub fn progress(&self, name: &str) -> Option<Step> {
        self.locks.now(name)
    }

    /// Returns all snapshots, with the VMs that run from them.
    pub fn list(&self) -> Result<Vec<SnapshotInfo>, DaemonError> {
        let names = self
            .directory
            .names()
            .map_err(|source| SnapshotError::Files {
                path: self.directory.root().to_owned(),
                source,
            })?;
        let in_maps = names
            .iter()
            .map(|name| restore::in_maps(&self.directory, name).unwrap_or_default());
        let users = restore::users_of_each(&in_maps.collect::<Vec<_>>())?;
        let infos = names.iter().zip(&users);
        Ok(infos.map(|(name, pids)| self.info(name, pids)).collect())
    }

    fn info(&self, name: &str, pids: &[Pid]) -> SnapshotInfo {
        let manifest = self.directory.manifest(name);
        let machines = self.registry.machines();
        let users = machines
            .iter()
            .filter(|m| pids.contains(&m.pid()))
            .map(|m| m.name().to_owned())
            .collect();
        let disk_bytes = self.directory.disk_bytes(name).unwrap_or(0);
        match manifest {
            Ok(manifest) => SnapshotInfo {
                name: name.to_owned(),
                domain: manifest.domain.clone(),
                vm: manifest.vm.clone(),
                created_s: manifest.created_s,
                memory_bytes: manifest.memory().0,
                disk_bytes,
                users,
                problem: None,
            },
            Err(error) => SnapshotInfo {
                name: name.to_owned(),
                domain: None,
                vm: String::new(),
                created_s: 0,
                memory_bytes: 0,
                disk_bytes,
                users,
                problem: Some(error.to_string()),
            },
        }
    }

    /// Returns the manifest of a snapshot.
    pub fn manifest(&self, name: &str) -> Result<Manifest, DaemonError> {
        Ok(self.directory.manifest(name)?)
    }
}

//! Removal of snapshots.

use memfold_snapshot::{SnapshotError, restore, save};
use tracing::warn;

use crate::error::DaemonError;
use crate::snapshots::Snapshots;
use crate::snapshots::save::subject;

impl Snapshots {
    /// Removes a snapshot.
    ///
    /// # Errors
    ///
    /// [`SnapshotError::InUse`] if a VM runs from the snapshot, [`SnapshotError::BuiltOn`] if other
    /// snapshots need it.
    pub fn remove(&self, name: &str) -> Result<(), DaemonError> {
        let _removal = self.below.snapshot_locks.remove(name)?;
        let pids = restore::holders(&self.below.snapshots, name)?;
        if !pids.is_empty() {
            let pids: Vec<String> = pids
                .iter()
                .map(|pid| pid.as_raw_nonzero().to_string())
                .collect();
            return Err(SnapshotError::InUse {
                name: name.to_owned(),
                pids: pids.join(", "),
            }
            .into());
        }
        let others = restore::built_on(&self.below.snapshots, name)?;
        if !others.is_empty() {
            return Err(SnapshotError::BuiltOn {
                name: name.to_owned(),
                others: others.join(", "),
            }
            .into());
        }
        let saved = self.below.snapshots.manifest(name);
        if let Ok(saved) = &saved {
            self.disks_taken_back(name, &saved.vm)?;
        }
        self.below.snapshots.remove(name)?;
        // The snapshot may have been the last user of an old segment generation.
        for segment in saved.map(|saved| saved.spec.segments).unwrap_or_default() {
            self.below.segments.drop_old(segment.base_name());
        }
        Ok(())
    }

    /// Moves the disks of the VM that was saved out of the snapshot, if that VM still runs, before
    /// the snapshot is removed.
    fn disks_taken_back(&self, name: &str, vm: &str) -> Result<(), DaemonError> {
        let place = self.below.snapshots.path(name)?;
        let machine = match self.below.registry.machine(vm) {
            Ok(machine) => machine,
            // The VM runs, but its QEMU cannot be asked yet.
            Err(error @ DaemonError::Busy { .. }) => return Err(error),
            Err(_) => return Ok(()),
        };
        let _alone = machine.save_right_soon()?;
        // A VM that memfold did not start uses its own disks, and the snapshot has copies.
        if machine.vm().spec().is_none() {
            return Ok(());
        }
        let subject = subject(&machine)?;
        let taken = save::take_back((machine.vm(), &subject), || machine.monitor(), &place);
        if let Err(error) = taken {
            // The VM continues with the files that its QEMU has open.
            warn!(vm, snapshot = name, %error, "cannot take the VM's disk overlays over from the removed snapshot; restart the VM before its next save");
        }
        Ok(())
    }
}

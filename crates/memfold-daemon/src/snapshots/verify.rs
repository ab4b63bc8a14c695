//! Verifies snapshots: checksums, disks, and a trial start.

use memfold_api::VerifyReport;
use memfold_host::chain;
use memfold_snapshot::{Shelf, SnapshotError, restore, shelf};

use crate::error::DaemonError;
use crate::snapshots::Snapshots;

impl Snapshots {
    /// Reads a snapshot completely, compares its checksums, and tries to start a VM from the
    /// snapshot.
    pub fn verify(&self, name: &str) -> Result<VerifyReport, DaemonError> {
        let progress = self.below.snapshot_locks.begin(name)?;
        let manifest = self.below.snapshots.manifest(name)?;
        let changed = self.below.snapshots.changed_parts(&manifest)?;
        let mut problems: Vec<String> = changed
            .iter()
            .map(|part| format!("{part} was changed since it was saved"))
            .collect();
        // If the tables in the snapshot are changed, the data they point to cannot be found.
        if changed.iter().all(|part| *part == shelf::DEVICES) {
            let stored = self.below.snapshots.stored(&manifest)?;
            progress.begin("checksums compared", stored.bytes);
            let path = self.below.snapshots.root().join(name).join(shelf::RAM);
            let wrong = stored
                .verify(&progress)
                .map_err(|source| SnapshotError::Files { path, source })?;
            let image = Shelf::image_of(&manifest);
            problems.extend(wrong.iter().map(|chunk| {
                format!("{image} was changed since it was saved, in its chunk {chunk}")
            }));
        }
        progress.begin("disks compared", 0);
        match restore::spec(&self.below.snapshots, &manifest, &manifest.vm) {
            Ok(spec) => {
                problems.extend(restore::changed_disks(&self.below.snapshots, &manifest)?);
                progress.begin("a start tried", 0);
                let tried = self.try_restore(spec, &manifest);
                problems.extend(tried.err().map(|error| {
                    format!("no VM can be started from this snapshot: {}", chain(&error))
                }));
            }
            // If a disk is the problem, the error names the disk.
            Err(error) => problems.push(error.to_string()),
        }
        Ok(VerifyReport {
            name: name.to_owned(),
            problems,
        })
    }
}

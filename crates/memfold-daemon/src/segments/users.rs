//! Finds out who uses a segment: VMs that map it, snapshots of such VMs, and the VM from which the
//! segment's next generation (build) will be made. Removes old generations that nobody uses.

use std::collections::BTreeSet;

use memfold_segment::{Manifest, SegmentError};
use memfold_vm::{SegmentSpec, VmDirectory};
use tracing::{info, warn};

use crate::error::{DaemonError, segment_files};
use crate::segments::Segments;
use crate::snapshot_locks::being_saved;

/// User of a segment that is not known by name yet.
const BEING_MADE: &str = "a snapshot or a VM that is being made";

impl Segments {
    /// Returns the users of a generation: VMs that map it, snapshots of such VMs, and definitions
    /// of VMs that would map it at their next start. A snapshot or definition that cannot be read
    /// counts as a user.
    pub(super) fn users_of(&self, manifest: &Manifest) -> Result<Vec<String>, DaemonError> {
        let reference = manifest.reference();
        let pids = self.shelf.users(std::slice::from_ref(manifest))?;
        let machines = self.registry.machines();
        let mut users = BTreeSet::new();
        if self.locks.now(&being_saved(&reference)).is_some() {
            users.insert(BEING_MADE.to_owned());
        }
        for pid in pids.into_iter().flatten() {
            users.insert(match machines.iter().find(|vm| vm.pid() == pid) {
                Some(machine) => format!("VM {}", machine.name()),
                None => format!("process {}", pid.as_raw_nonzero()),
            });
        }
        let named = |segments: &[SegmentSpec]| segments.iter().any(|s| s.name == reference);
        // This finds users where the kernel reports another device number for mappings than for
        // files, as on btrfs.
        for machine in machines {
            if named(&machine.vm().segments()) {
                users.insert(format!("VM {}", machine.name()));
            }
        }
        for arrival in self.registry.arrivals().all() {
            let place = VmDirectory::of(self.registry.state(), arrival.name());
            let now = VmDirectory::read_json::<Vec<SegmentSpec>>(&place.segments());
            if now.is_ok_and(|now| named(&now)) {
                users.insert(format!("VM {}", arrival.name()));
            }
        }
        let names = self.snapshots.names();
        let names = names.map_err(segment_files(self.snapshots.root()))?;
        for name in names {
            users.extend(match self.snapshots.manifest(&name) {
                Ok(saved) => named(&saved.spec.segments).then(|| format!("snapshot {name}")),
                Err(_) => Some(format!("possibly snapshot {name}, which cannot be read")),
            });
        }
        let is_newest = self
            .shelf
            .newest(&manifest.name)?
            .is_some_and(|m| m.generation == manifest.generation);
        let would_map = |segment: &SegmentSpec| {
            segment.name == reference || (is_newest && segment.name == manifest.name)
        };
        users.extend(
            self.definitions
                .users(|of| Ok(of.vm.segments.iter().any(would_map)))?,
        );
        Ok(users.into_iter().collect())
    }

    /// Returns the VM that writes a segment's next generation; `None` if there is none, or if it
    /// has ended or detached the segment.
    pub(super) fn writer(&self, name: &str) -> Option<String> {
        let vm = self.shelf.writer(name)?;
        // It is not known yet which segments a VM that is being started uses.
        if self.registry.arrivals().get(&vm).is_some() {
            return Some(vm);
        }
        let segments = self.registry.machine(&vm).ok()?.vm().segments();
        let has_it = segments.iter().any(|s| s.base_name() == name);
        has_it.then_some(vm)
    }

    /// Checks that no VM but `vm` maps a generation of the segment, so that `vm` may write the next
    /// generation.
    ///
    /// # Errors
    ///
    /// [`SegmentError::InUse`] if another VM maps one.
    pub(super) fn check_alone(&self, name: &str, vm: &str) -> Result<(), DaemonError> {
        let me = format!("VM {vm}");
        let mut others = BTreeSet::new();
        for manifest in self.shelf.all()?.iter().filter(|m| m.name == name) {
            others.extend(self.users_of(manifest)?);
        }
        // A snapshot keeps the generation that it was saved with, and a defined VM that is off maps
        // none, so they do not conflict with a writer.
        others.retain(|user| {
            let maps_none = user.contains("snapshot ") || user.contains("definition ");
            *user != me && (user == BEING_MADE || !maps_none)
        });
        if others.is_empty() {
            return Ok(());
        }
        let users = others.into_iter().collect::<Vec<_>>().join(", ");
        let name = name.to_owned();
        Err(SegmentError::InUse { name, users }.into())
    }

    /// Removes generations of a segment that are not the newest and have no users.
    pub(crate) fn drop_old(&self, name: &str) {
        let _alone = self.exclusive();
        let Ok(Some(newest)) = self.shelf.newest(name) else {
            return;
        };
        for old in self.shelf.all().unwrap_or_default() {
            let is_old = old.name == name && old.generation < newest.generation;
            if is_old && self.users_of(&old).is_ok_and(|users| users.is_empty()) {
                match self.shelf.remove(&old) {
                    Ok(()) => info!(
                        segment = old.reference(),
                        "old image (generation) of the segment removed: a newer image exists, and no VM uses the old one"
                    ),
                    Err(error) => warn!(
                        segment = old.reference(),
                        error = &error as &dyn std::error::Error,
                        "cannot remove an old image (generation) of the segment; the daemon tries again at its next start"
                    ),
                }
            }
        }
    }

    /// Completes the work of an earlier daemon: clears writers whose VM has ended, and removes old
    /// generations without users.
    pub(crate) fn clean_up(&self) {
        for name in &self.names() {
            if self.shelf.writer(name).is_some() && self.writer(name).is_none() {
                self.no_writer(name);
            }
            self.drop_old(name);
        }
    }

    /// Returns the names of all segments, without their generations.
    fn names(&self) -> BTreeSet<String> {
        let all = self.shelf.all().unwrap_or_default();
        all.into_iter().map(|manifest| manifest.name).collect()
    }

    /// Clears the writer of a segment. A failure is logged.
    fn no_writer(&self, name: &str) {
        if let Err(error) = self.shelf.set_writer(name, None) {
            warn!(
                segment = name,
                error = &error as &dyn std::error::Error,
                "cannot remove the file that names the VM from which the segment is built next; the daemon tries again at its next start"
            );
        }
    }

    /// Clears a VM as the writer of segments. Called when the VM ends, before its name can be used
    /// again: otherwise the next VM of this name would be the writer. `vm stop` may have removed
    /// the file that lists the VM's segments, so all segments are looked through.
    pub(crate) fn end_writer(&self, vm: &str) {
        for name in &self.names() {
            if self.shelf.writer(name).as_deref() == Some(vm) {
                self.no_writer(name);
            }
        }
    }

    /// Removes unused generations of segments, after a VM has ended that may have mapped some.
    pub(crate) fn left(&self) {
        let names = self.names();
        if names.is_empty() {
            return;
        }
        for name in &names {
            self.drop_old(name);
        }
        // A VM that is being started may have looked up a segment and not mapped it yet. The
        // generations are then removed when that VM ends.
        if !self.registry.arrivals().is_empty() {
            return;
        }
        // This lock excludes threads that have looked up a segment which QEMU does not map yet.
        let _alone = self.exclusive();
        self.shelf.let_go();
    }
}

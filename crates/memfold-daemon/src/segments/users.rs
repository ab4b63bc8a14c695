//! Who uses segments: VMs, snapshots, and the VM that writes the next generation. What nobody uses
//! any more goes.

use std::collections::BTreeSet;
use std::sync::Arc;

use memfold_segment::{Manifest, SegmentError};
use memfold_vm::{SegmentSpec, VmDirectory};
use tracing::{info, warn};

use crate::error::DaemonError;
use crate::machine::Machine;
use crate::segments::Segments;
use crate::snapshot_locks::being_saved;

impl Segments {
    /// Who needs a generation: VMs that map it, and snapshots of such. What can't be read is taken
    /// for one.
    pub(super) fn users_of(&self, manifest: &Manifest) -> Result<Vec<String>, DaemonError> {
        let reference = manifest.reference();
        let pids = self.shelf.users(std::slice::from_ref(manifest))?;
        let machines: Vec<Arc<Machine>> = self.registry.machines();
        let mut users = BTreeSet::new();
        if self.locks.now(&being_saved(&reference)).is_some() {
            users.insert("a snapshot or a VM that is being made".to_owned());
        }
        for pid in pids.into_iter().flatten() {
            let vm = machines.iter().find(|machine| machine.pid() == pid);
            users.insert(vm.map_or_else(
                || format!("process {}", pid.as_raw_nonzero()),
                |machine| format!("VM {}", machine.name()),
            ));
        }
        let named = |segments: &[SegmentSpec]| segments.iter().any(|s| s.name == reference);
        // Where the kernel tells mappings by another device number than files, as on btrfs.
        for machine in machines {
            if named(&machine.vm().segments()) {
                users.insert(format!("VM {}", machine.name()));
            }
        }
        for arrival in self.registry.arrivals().all() {
            let place = VmDirectory::of(self.registry.state(), arrival.name());
            if VmDirectory::read_json::<Vec<SegmentSpec>>(&place.segments())
                .is_ok_and(|now| named(&now))
            {
                users.insert(format!("VM {}", arrival.name()));
            }
        }
        let names = self
            .snapshots
            .names()
            .map_err(|source| SegmentError::Files {
                path: self.snapshots.root().to_owned(),
                source,
            })?;
        for name in names {
            match self.snapshots.manifest(&name) {
                Ok(saved) if named(&saved.spec.segments) => {
                    users.insert(format!("snapshot {name}"));
                }
                Ok(_) => {}
                Err(_) => {
                    users.insert(format!("possibly snapshot {name}, which cannot be read"));
                }
            }
        }
        Ok(users.into_iter().collect())
    }

    /// The VM that writes a segment's next generation. One that has ended, or taken the segment
    /// off, doesn't any more.
    pub(super) fn writer(&self, name: &str) -> Option<String> {
        let vm = self.shelf.writer(name)?;
        // What it has is seen when it is there.
        if self.registry.arrivals().get(&vm).is_some() {
            return Some(vm);
        }
        let machine = self.registry.machine(&vm).ok();
        let has_it = |machine: &Arc<Machine>| {
            let segments = machine.vm().segments();
            segments.iter().any(|s| s.base_name() == name)
        };
        machine.is_some_and(|m| has_it(&m)).then_some(vm)
    }

    /// Whether no other VM maps any generation of a segment, so that this one may be its writer.
    pub(super) fn check_alone(&self, name: &str, vm: &str) -> Result<(), DaemonError> {
        let me = format!("VM {vm}");
        let mut others = BTreeSet::new();
        for manifest in self.shelf.all()?.iter().filter(|m| m.name == name) {
            others.extend(self.users_of(manifest)?);
        }
        // Snapshots keep the generation that they were taken with.
        others.retain(|user| *user != me && !user.contains("snapshot "));
        if others.is_empty() {
            return Ok(());
        }
        Err(SegmentError::InUse {
            name: name.to_owned(),
            users: others.into_iter().collect::<Vec<_>>().join(", "),
        }
        .into())
    }

    /// Removes generations that are not the newest and that nobody uses any more.
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
                        "segment generation removed: a newer one exists, and nothing uses this one"
                    ),
                    Err(error) => warn!(
                        segment = old.reference(),
                        error = &error as &dyn std::error::Error,
                        "cannot remove the old segment generation; the next daemon retries"
                    ),
                }
            }
        }
    }

    /// What a daemon that died has left to do: writers that have ended meanwhile, generations that
    /// nobody uses any more.
    pub(crate) fn clean_up(&self) {
        let all = self.shelf.all().unwrap_or_default();
        for name in all
            .iter()
            .map(|manifest| manifest.name.as_str())
            .collect::<BTreeSet<_>>()
        {
            if self.shelf.writer(name).is_some() && self.writer(name).is_none() {
                self.no_writer(name);
            }
            self.drop_old(name);
        }
    }

    /// A segment has no writer any more.
    fn no_writer(&self, name: &str) {
        if let Err(error) = self.shelf.set_writer(name, None) {
            warn!(
                segment = name,
                error = &error as &dyn std::error::Error,
                "cannot remove the writer file of the segment; the next daemon retries"
            );
        }
    }

    /// A VM that maps these ends, and its name is not free yet: the next one of that name would be
    /// the writer, unasked.
    pub(crate) fn end_writer(&self, vm: &str, segments: &[SegmentSpec]) {
        for segment in segments {
            if self.shelf.writer(segment.base_name()).as_deref() == Some(vm) {
                self.no_writer(segment.base_name());
            }
        }
    }

    /// A VM that mapped these has ended.
    pub(crate) fn left(&self, segments: &[SegmentSpec]) {
        if segments.is_empty() {
            return;
        }
        for name in segments
            .iter()
            .map(SegmentSpec::base_name)
            .collect::<BTreeSet<_>>()
        {
            self.drop_old(name);
        }
        // A VM that is being started would lose what it has looked up before it is mapped; its own
        // end comes, too.
        if !self.registry.arrivals().is_empty() {
            return;
        }
        // Who looks one up now would lose it before it is mapped.
        let _alone = self.exclusive();
        self.shelf.let_go();
    }
}

//! Working sets: the pages that a VM touches first after a restore.

use std::sync::Arc;

use memfold_snapshot::Manifest;
use memfold_snapshot::working_set::{self, WorkingSet};
use tracing::{debug, info};

use crate::machine::Machine;
use crate::snapshots::Snapshots;
use crate::threads;

impl Snapshots {
    /// Prefetches the snapshot's working set for a restored VM, or records the working set if none
    /// is known. Both happen on a thread while the VM runs.
    pub(super) fn mind_working_set(
        &self,
        machine: Arc<Machine>,
        manifest: Manifest,
        prefetch: bool,
    ) {
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
                        pages, "working set of the restored VM loaded in advance"
                    ),
                    Err(error) => {
                        debug!(vm = machine.name(), %error, "cannot load the whole working set of the restored VM in advance");
                    }
                }
                return;
            }
            let (id, name) = (machine.id(), machine.name().to_owned());
            // Dropped, so that this waiting thread does not keep the VM's data.
            drop(machine);
            let found = loop {
                std::thread::sleep(working_set::TIME);
                let machine = registry.upgrade().and_then(|all| all.machine(&name).ok());
                let Some(machine) = machine.filter(|machine| machine.id() == id) else {
                    return;
                };
                // During a save, all of the VM's pages may look accessed.
                let Some(_saving) = machine.try_save() else {
                    continue;
                };
                let places = working_set::places(&manifest, &machine.layout());
                break WorkingSet::of(machine.pid(), &manifest.sums.xxh3_128, &places);
            };
            match found.and_then(|set| set.write(&place).map(|()| set)) {
                Ok(set) => info!(
                    vm = name,
                    snapshot = manifest.name,
                    bytes = set.bytes(),
                    "working set of the restored VM recorded"
                ),
                Err(error) => {
                    debug!(vm = name, %error, "cannot record the working set of the restored VM");
                }
            }
        };
        if let Err(error) = threads::begin("working-set", work) {
            debug!(%error, "cannot start the thread that loads or records the restored VM's working set");
        }
    }
}

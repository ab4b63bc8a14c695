//! Forks running VMs. To fork a VM, memfold saves it at this instant as a layer, a snapshot that
//! contains only what differs from the snapshot from which the VM runs. Other VMs, the forks, start
//! from the layer, and the forked VM shares the layer's memory with them.
//!
//! ```text
//!   VM runs from P    | P's pages         | own pages |
//!   layer L           | refers to P       | copied    |    the VM stands still meanwhile
//!   VM afterwards     | P's pages         | L's pages |    folded onto L's image, unless written since
//!   forks of the VM   | P's pages         | L's pages |    they are restored from L
//! ```
//! A layer is removed when no VM maps it and no other layer refers to it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use memfold_api::{ForkReport, ForkRequest, KeepChoice, SaveRequest};
use memfold_fold::Command;
use memfold_snapshot::{Manifest, Progress, SnapshotError, restore, shelf};
use memfold_units::PAGE_SIZE;
use memfold_vm::overlay;
use tracing::{debug, info, warn};

use crate::error::DaemonError;
use crate::machine::Machine;
use crate::mechanisms::Mechanisms;
use crate::snapshots::Snapshots;
use crate::snapshots::save_kind::SaveKind;
use crate::threads;

/// Beginning of the names of layers that forks start from.
const PREFIX: &str = "fork-";

/// Most letters of a VM's name in the name of its layer.
const MOST_OF_NAME: usize = 32;

/// Most time for which a forked VM stands still in all so that it shares its memory: enough for
/// about 2 GiB. It runs at least half of the time meanwhile.
const MOST_STOPPED: Duration = Duration::from_millis(800);

/// Least time that a stop counts for, so that the number of stops is bounded, too.
const LEAST_STOPPED: Duration = Duration::from_millis(1);

/// Delay until a forked VM begins to share its memory, so that the start of its first fork has the
/// host's cores to itself.
const SHARED_AFTER: Duration = Duration::from_millis(300);

/// How often unused layers are looked for, and the least time for which a layer is left alone after
/// it was seen first.
const LOOK_EVERY: Duration = Duration::from_secs(20);
const LEAST_AGE: Duration = Duration::from_secs(30);

impl Snapshots {
    /// Saves a running VM as the snapshot from which its forks start.
    pub fn fork(&self, vm: &str, request: &ForkRequest) -> Result<ForkReport, DaemonError> {
        let began = Instant::now();
        let short: String = vm.chars().take(MOST_OF_NAME).collect();
        let save = SaveRequest {
            keep: KeepChoice::All,
            ..SaveRequest::new(vm, format!("{PREFIX}{short}-{:x}", overlay::unique()))
        };
        let kind = if request.keep {
            SaveKind::KeptFork
        } else {
            SaveKind::Fork
        };
        // The layer is not removed until the caller knows its name.
        let _used = self.below.snapshot_locks.begin(&save.name)?;
        let manifest = self.save_as(&save, &kind)?;
        let fork_ms = began.elapsed().as_secs_f64() * 1000.0;
        let machine = self.below.registry.machine(vm)?;
        let (mut shared_bytes, mut not_shared) = (None, None);
        if request.wait {
            match share(&self.below, &machine, &manifest) {
                Ok(pages) => shared_bytes = Some(pages * PAGE_SIZE),
                Err(why) => (shared_bytes, not_shared) = (Some(0), Some(why)),
            }
        } else {
            let (below, layer) = (self.below.clone(), manifest.clone());
            let work = move || {
                thread::park_timeout(SHARED_AFTER);
                drop(share(&below, &machine, &layer));
            };
            match Builder::new().name("share".into()).spawn(work) {
                Ok(thread) => drop(self.sharing.lock().insert(vm.to_owned(), thread)),
                Err(error) => not_shared = Some(format!("cannot start a thread: {error}")),
            }
        }
        Ok(ForkReport {
            snapshot: manifest.name.clone(),
            parent: manifest.parent.as_ref().map(|parent| parent.name.clone()),
            pause_ms: manifest.pause_ms,
            fork_ms,
            own_bytes: manifest.own_bytes(),
            shared_bytes,
            not_shared,
        })
    }

    /// Waits until a forked VM shares its memory, or has failed to.
    pub fn shared(&self, vm: &str) {
        let thread = self.sharing.lock().remove(vm);
        let Some(thread) = thread else { return };
        thread.thread().unpark();
        // A thread that panicked shares nothing any more.
        let _ = thread.join();
    }

    /// Begins to remove layers of forks that no VM needs any more, until this value is dropped.
    pub(crate) fn begin_removing_forks(self: &Arc<Self>) -> io::Result<()> {
        let mut ages = Ages::default();
        threads::repeat("forks", LOOK_EVERY, self, move |snapshots| {
            snapshots.remove_unused_forks(snapshots.done_forks(&mut ages));
        })
    }

    /// Notes that a VM was started from a snapshot, so that the layer of forks can be removed as
    /// soon as no VM uses it.
    pub(super) fn note_started(&self, name: &str) {
        if name.starts_with(PREFIX) {
            self.started.lock().insert(name.to_owned());
        }
    }

    /// Removes layers that forks started from and that no VM needs, if snapshot `name` cannot be
    /// removed before.
    pub(super) fn remove_unused_forks_of(&self, name: &str) {
        let is_needed = || restore::built_on(&self.below.snapshots, name);
        let mut ages = Ages::default();
        // A layer may be built on another one, which is removed in the next round.
        while is_needed().is_ok_and(|layers| !layers.is_empty())
            && self.remove_unused_forks(self.done_forks(&mut ages))
        {}
    }

    /// Returns the layers of forks from which VMs were started, or that have been there for a
    /// while.
    fn done_forks(&self, ages: &mut Ages) -> Vec<String> {
        let shelf = &self.below.snapshots;
        let is_fork = |name: &String| shelf.manifest(name).is_ok_and(|manifest| manifest.fork);
        let mut names = shelf.names().unwrap_or_default();
        names.retain(|name| name.starts_with(PREFIX) && is_fork(name));
        let old = ages.old(names.clone(), Instant::now());
        let started = self.started.lock();
        names.retain(|name| started.contains(name) || old.contains(name));
        names
    }

    /// Removes those of the layers `names` that no VM needs. Returns whether there were any.
    fn remove_unused_forks(&self, names: Vec<String>) -> bool {
        let shelf = &self.below.snapshots;
        if names.is_empty() {
            return false;
        }
        // A removal locks the layer, and no VM can be started from it meanwhile. So layers with
        // users are left out before.
        let users = match restore::holders_of_each(shelf, &names) {
            Ok(users) => users,
            Err(error) => {
                debug!(%error, "cannot find out which VMs use the layers that forks started from");
                return false;
            }
        };
        let unused = names.into_iter().zip(users);
        let mut is_any_removed = false;
        for (name, _) in unused.filter(|(_, pids)| pids.is_empty()) {
            match self.remove_one(&name) {
                Ok(()) => {
                    self.started.lock().remove(&name);
                    is_any_removed = true;
                    info!(
                        snapshot = name,
                        "layer (snapshot that forks of a VM start from) removed, because no VM needs the layer"
                    );
                }
                Err(DaemonError::Snapshot(
                    SnapshotError::InUse { .. } | SnapshotError::BuiltOn { .. },
                )) => {}
                // What a snapshot without a readable manifest, or a VM without a readable
                // description, needs is unknown until somebody mends or removes it.
                Err(DaemonError::Snapshot(error @ SnapshotError::Impossible(_))) => {
                    self.note_unremovable(&error.to_string());
                }
                Err(error) => {
                    debug!(snapshot = name, %error, "cannot remove an unused layer that forks started from");
                }
            }
        }
        is_any_removed
    }

    /// Logs why unused layers stay, unless that was logged before.
    fn note_unremovable(&self, error: &str) {
        let mut told = self.unremovable.lock();
        if *told != error {
            warn!(
                error,
                "cannot remove unused layers of forks; first do what the error says"
            );
            error.clone_into(&mut told);
        }
    }
}

/// When each layer was seen first. The time in its manifest is that of a clock that can be set.
#[derive(Debug, Default)]
struct Ages(BTreeMap<String, Instant>);

impl Ages {
    /// Returns the layers that have been there for [`LEAST_AGE`] at least.
    fn old(&mut self, layers: Vec<String>, now: Instant) -> Vec<String> {
        self.0.retain(|name, _| layers.contains(name));
        let is_old = |name: &String| {
            let seen = *self.0.entry(name.clone()).or_insert(now);
            now.saturating_duration_since(seen) >= LEAST_AGE
        };
        layers.into_iter().filter(is_old).collect()
    }
}

/// Makes a VM share its memory with a layer that was just saved from it. Returns the number of
/// shared pages.
fn share(below: &Mechanisms, machine: &Machine, layer: &Manifest) -> Result<u64, String> {
    fold_onto(below, machine, layer).inspect_err(|why| {
        info!(
            vm = machine.name(),
            snapshot = layer.name,
            why,
            "forked VM keeps its own copy of the memory that it could share with its forks"
        );
    })
}

fn fold_onto(below: &Mechanisms, machine: &Machine, layer: &Manifest) -> Result<u64, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let Some(_alone) = machine.try_save() else {
        return Err("another snapshot of this VM is being made".into());
    };
    // The layer is not removed meanwhile.
    let used = below.snapshot_locks.begin(&layer.name);
    let _used = used.map_err(|error| text(&error))?;
    machine.look_again();
    if let Some(problem) = machine.problem() {
        return Err(problem);
    }
    if !machine.can_stop() {
        return Err("memfold's library cannot stop this VM".into());
    }
    // Bytes that are not on the disk yet may be lost.
    let checked = below.snapshots.checked_image(layer, &Progress::default());
    let synced = checked.and_then(|_| below.snapshots.sync_layer(layer));
    synced.map_err(|error| text(&error))?;
    let file = below.snapshots.file(&layer.name, shelf::RAM);
    let file = file.map_err(|error| text(&error))?;
    let runs = restore::own_runs(layer, &file, &machine.layout());
    let mut left = runs.map_err(|error| text(&error))?;
    let (mut pages, mut stopped) = (0, Duration::ZERO);
    while !left.is_empty() && stopped < MOST_STOPPED {
        let file = file.try_clone().map_err(|error| text(&error))?;
        let fold = |answer| Command::FoldOnto(machine.id(), file, left, answer);
        let done = below.folding.ask(fold).map_err(|error| text(&error))??;
        pages += done.pages;
        stopped += done.stopped.max(LEAST_STOPPED);
        left = done.left;
        thread::sleep(done.stopped);
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_that_forks_start_from_is_old_30_s_after_it_was_seen_first() {
        let mut ages = Ages::default();
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let names = |names: &[&str]| {
            names
                .iter()
                .map(|&name| name.to_owned())
                .collect::<Vec<_>>()
        };
        assert!(ages.old(names(&["a"]), at(0)).is_empty());
        assert!(ages.old(names(&["a", "b"]), at(29)).is_empty());
        assert_eq!(ages.old(names(&["a", "b"]), at(30)), ["a"]);
        // A layer of this name that is made later begins anew.
        assert_eq!(ages.old(names(&["b"]), at(60)), ["b"]);
        assert!(ages.old(names(&["a"]), at(61)).is_empty());
    }
}

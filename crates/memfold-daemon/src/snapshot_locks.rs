//! Locks snapshots by name. While an operation such as a restore uses a snapshot, the snapshot
//! cannot be removed, and users can see how far the operation is.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_snapshot::{Progress, SnapshotError, Step};
use parking_lot::{Condvar, Mutex};

/// The locks of all snapshots.
#[derive(Debug, Default)]
pub(crate) struct SnapshotLocks {
    state: Mutex<State>,
    /// Notified when a removal ends.
    removal_ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    used: HashMap<String, Vec<Arc<Progress>>>,
    removed: HashMap<String, Arc<Progress>>,
}

impl SnapshotLocks {
    /// Locks a snapshot for saving, verifying or restoring. Several operations may hold this lock
    /// at once.
    ///
    /// # Errors
    ///
    /// [`SnapshotError::Busy`] while the snapshot is being removed, made complete or given
    /// another key.
    pub(crate) fn begin(&self, name: &str) -> Result<Use<'_>, SnapshotError> {
        self.begin_within(name, Duration::ZERO)
    }

    /// Locks a snapshot as [`Self::begin`] does. Waits for at most `patience` until a removal ends:
    /// the removal of a snapshot that a VM maps is refused soon.
    pub(crate) fn begin_within(
        &self,
        name: &str,
        patience: Duration,
    ) -> Result<Use<'_>, SnapshotError> {
        let mut state = self.state.lock();
        let deadline = Instant::now() + patience;
        while state.removed.contains_key(name) {
            if (self.removal_ended.wait_until(&mut state, deadline)).timed_out() {
                return Err(SnapshotError::Busy(format!(
                    "snapshot '{name}' is being removed, made complete or given another key; wait until that ends"
                )));
            }
        }
        let progress = Arc::<Progress>::default();
        let all = state.used.entry(name.to_owned()).or_default();
        all.push(progress.clone());
        Ok(Use {
            uses: self,
            name: name.to_owned(),
            progress,
        })
    }

    /// Locks a snapshot for its removal, or for the exchange of its files.
    ///
    /// # Errors
    ///
    /// [`SnapshotError::Busy`] while the snapshot is in use or being removed.
    pub(crate) fn remove(&self, name: &str) -> Result<Removal<'_>, SnapshotError> {
        let mut state = self.state.lock();
        if state.used.contains_key(name) || state.removed.contains_key(name) {
            return Err(SnapshotError::Busy(format!(
                "snapshot '{name}' is being saved, verified, restored, removed, made complete or given another key; wait until that ends"
            )));
        }
        let progress = Arc::<Progress>::default();
        state.removed.insert(name.to_owned(), progress.clone());
        Ok(Removal {
            uses: self,
            name: name.to_owned(),
            progress,
        })
    }

    /// Returns the progress of the most recent operation on a snapshot; `None` if no operation uses
    /// it.
    pub(crate) fn now(&self, name: &str) -> Option<Step> {
        let state = self.state.lock();
        let used = state.used.get(name).and_then(|all| all.last());
        Some(used.or_else(|| state.removed.get(name))?.now())
    }
}

/// An operation's use of a snapshot. Dropping it ends the use.
#[derive(Debug)]
pub(crate) struct Use<'a> {
    uses: &'a SnapshotLocks,
    name: String,
    progress: Arc<Progress>,
}

impl Deref for Use<'_> {
    type Target = Progress;

    fn deref(&self) -> &Progress {
        &self.progress
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        let mut state = self.uses.state.lock();
        if let Some(all) = state.used.get_mut(&self.name) {
            all.retain(|other| !Arc::ptr_eq(other, &self.progress));
            if all.is_empty() {
                state.used.remove(&self.name);
            }
        }
    }
}

/// The removal of a snapshot in progress. Dropping it ends the removal.
#[derive(Debug)]
pub(crate) struct Removal<'a> {
    uses: &'a SnapshotLocks,
    name: String,
    progress: Arc<Progress>,
}

impl Deref for Removal<'_> {
    type Target = Progress;

    fn deref(&self) -> &Progress {
        &self.progress
    }
}

impl Drop for Removal<'_> {
    fn drop(&mut self) {
        self.uses.state.lock().removed.remove(&self.name);
        self.uses.removal_ended.notify_all();
    }
}

/// Returns the name in [`SnapshotLocks`] under which a segment is locked while a VM that uses the
/// segment is saved or started.
pub(crate) fn being_saved(reference: &str) -> String {
    format!("saved with segment {reference}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_in_use_cannot_be_removed_and_a_snapshot_in_removal_cannot_be_used() {
        let uses = SnapshotLocks::default();
        let first = uses.begin("a").unwrap();
        first.begin("first", 8);
        let second = uses.begin("a").unwrap();
        second.begin("second", 8);
        assert_eq!(uses.now("a").unwrap().step, "second");
        let refused = uses.remove("a").unwrap_err();
        assert!(matches!(refused, SnapshotError::Busy(_)), "{refused}");
        drop(second);
        assert_eq!(uses.now("a").unwrap().step, "first");
        assert!(uses.remove("a").is_err());
        drop(first);
        assert_eq!(uses.now("a"), None);
        let removal = uses.remove("a").unwrap();
        assert!(uses.begin("a").is_err() && uses.remove("a").is_err());
        assert!(uses.begin("b").is_ok());
        removal.begin("removal", 8);
        assert_eq!(uses.now("a").unwrap().step, "removal");
        drop(removal);
        assert_eq!(uses.now("a"), None);
        assert!(uses.begin("a").is_ok());
    }

    #[test]
    fn a_snapshot_is_used_after_a_removal_that_ends_soon_and_refused_during_a_longer_one() {
        let locks = SnapshotLocks::default();
        let removal = locks.remove("a").unwrap();
        let refused = locks.begin_within("a", Duration::from_millis(20));
        let refused = refused.unwrap_err();
        assert!(matches!(refused, SnapshotError::Busy(_)), "{refused}");
        let refused = refused.to_string();
        assert!(refused.contains("wait until that ends"), "{refused}");
        std::thread::scope(|scope| {
            let waiting =
                scope.spawn(|| locks.begin_within("a", Duration::from_secs(60)).map(drop));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished());
            drop(removal);
            waiting.join().unwrap().unwrap();
        });
    }
}

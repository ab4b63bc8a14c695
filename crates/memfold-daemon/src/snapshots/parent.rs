//! Chooses the parent of a new snapshot, so that only pages which differ from the parent are
//! stored. The parent is the snapshot that the VM was started from, or one that the user names.

use std::sync::Arc;

use memfold_api::{KeepChoice, SaveRequest};
use memfold_snapshot::save;
use memfold_snapshot::{Manifest, Parent, Progress, SnapshotError, restore};
use memfold_units::{ByteSize, PAGE_SIZE};
use tracing::info;

use crate::error::DaemonError;
use crate::machine::Machine;
use crate::snapshot_locks::Use;
use crate::snapshots::Snapshots;

/// Changed pages of a VM that are saved sooner than the guest answers questions about its page
/// cache and its free pages (128 MiB, about 0.1 s).
const FEW_PAGES: u64 = 32_768;

/// The parent of a new snapshot.
pub(super) struct Base<'a> {
    pub(super) parent: Arc<Parent>,
    pub(super) manifest: Manifest,
    /// Whether the VM runs from the parent.
    pub(super) is_origin: bool,
    /// Pages of the VM that are not the parent's, a moment ago.
    pub(super) changed: u64,
    /// Keeps the parent from being removed.
    _used: Use<'a>,
}

impl Base<'_> {
    /// Returns why the guest is not asked what it has cached and free; `None` if it is asked.
    pub(super) fn needs_no_answers(&self, choice: KeepChoice) -> Option<String> {
        let few = choice == KeepChoice::Auto && self.changed <= FEW_PAGES;
        let bytes = ByteSize(self.changed * PAGE_SIZE);
        few.then(|| format!("only {bytes} differ from snapshot '{}'", self.manifest.name))
    }
}

impl Snapshots {
    /// Returns the parent that a snapshot will have; `None` if it will have all pages.
    ///
    /// # Errors
    ///
    /// Errors for a parent that the user named. One that was not named is left out if it cannot be
    /// used.
    pub(super) fn base(
        &self,
        machine: &Machine,
        request: &SaveRequest,
        progress: &Progress,
    ) -> Result<Option<Base<'_>>, DaemonError> {
        if let Some(name) = &request.parent {
            if request.compress || request.whole {
                let why = "a snapshot that is compressed, or has all pages, has no parent; leave out 'parent', or 'compress' and 'whole'";
                return Err(DaemonError::BadRequest(why.into()));
            }
            let origin = restore::origin(&self.below.snapshots, machine.pid())?;
            let is_origin = origin.is_some_and(|origin| origin.name == *name);
            let base = self.open_base(machine, (name, is_origin), progress);
            return base.map(Some);
        }
        if request.compress || request.whole {
            return Ok(None);
        }
        let Some(origin) = restore::origin(&self.below.snapshots, machine.pid())? else {
            return Ok(None);
        };
        let opened = if let Some(why) = origin.no_parent() {
            Err(why.to_owned())
        } else {
            let opened = self.open_base(machine, (&origin.name, true), progress);
            opened.map_err(|error| error.to_string())
        };
        Ok(opened
            .inspect_err(|why| {
                info!(
                    vm = machine.name(),
                    snapshot = origin.name,
                    why,
                    "all pages of the VM are saved, because the snapshot from which the VM runs cannot be the parent"
                );
            })
            .ok())
    }

    fn open_base(
        &self,
        machine: &Machine,
        (name, is_origin): (&str, bool),
        progress: &Progress,
    ) -> Result<Base<'_>, DaemonError> {
        let shelf = &self.below.snapshots;
        let used = self.below.snapshot_locks.begin(name)?;
        let manifest = shelf.manifest(name)?;
        let refused = |why: String| {
            SnapshotError::Impossible(format!("snapshot '{name}' cannot be the parent: {why}"))
        };
        if manifest.domain.as_deref() != machine.domain() {
            return Err(refused(format!(
                "it is of trust domain {}, and the VM of {}",
                domain(manifest.domain.as_deref()),
                domain(machine.domain())
            ))
            .into());
        }
        // A VM without a trust domain shares with no other VM.
        if manifest.domain.is_none() && !is_origin && manifest.vm != machine.name() {
            let why = "it is of another VM without a trust domain";
            return Err(refused(why.into()).into());
        }
        let parent = Arc::new(shelf.parent(&manifest, progress)?);
        let changed = save::changed_pages(machine.vm(), &mut machine.monitor(), &parent)?;
        Ok(Base {
            parent,
            is_origin,
            manifest,
            changed,
            _used: used,
        })
    }
}

fn domain(name: Option<&str>) -> String {
    name.map_or_else(|| "none".into(), |name| format!("'{name}'"))
}

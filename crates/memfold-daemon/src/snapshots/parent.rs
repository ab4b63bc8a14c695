//! Chooses the parent of a new snapshot, so that only pages which differ from the parent are
//! stored. The parent is the snapshot that the VM was started from, or one that the user names.

use std::sync::Arc;
use std::time::Duration;

use memfold_api::{KeepChoice, SaveRequest};
use memfold_host::chain;
use memfold_snapshot::save;
use memfold_snapshot::{Manifest, Parent, Progress, SnapshotError, restore};
use memfold_units::{ByteSize, PAGE_SIZE};
use tracing::info;

use crate::error::DaemonError;
use crate::machine::Machine;
use crate::snapshot_locks::Use;
use crate::snapshots::Snapshots;
use crate::snapshots::save_kind::SaveKind;

/// Changed pages of a VM that are saved sooner than the guest answers questions about its page
/// cache and its free pages (128 MiB, about 0.1 s).
const FEW_PAGES: u64 = 32_768;

/// Longest wait for the refusal of a removal of the parent: a VM that runs from it keeps it.
const PATIENCE: Duration = Duration::from_secs(10);

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
    /// Returns the parent that a snapshot will have; `None` if it will have all pages, with the
    /// reason if the VM runs from a snapshot and the user did not ask for all pages.
    ///
    /// # Errors
    ///
    /// Errors for a parent that the user named. One that was not named is left out if it cannot be
    /// used, but not because it is locked: a removal of the snapshot from which a VM runs is
    /// refused soon. A fork is refused if the snapshot from which the VM runs was changed. A VM
    /// that runs from an encrypted snapshot is saved only encrypted.
    pub(super) fn base(
        &self,
        machine: &Machine,
        request: &SaveRequest,
        kind: &SaveKind,
        progress: &Progress,
    ) -> Result<(Option<Base<'_>>, Option<String>), DaemonError> {
        if request.encrypt {
            return Ok((None, None));
        }
        let origin = restore::origin(&self.below.snapshots, machine.pid())?;
        if let Some(origin) = origin.as_ref().filter(|of| of.encryption.is_some()) {
            return Err(in_clear(&origin.name, kind).into());
        }
        if let Some(name) = &request.parent {
            if request.compress || request.whole {
                let why = "a snapshot that is compressed, or has all pages, has no parent; leave out 'parent', or 'compress' and 'whole'";
                return Err(DaemonError::BadRequest(why.into()));
            }
            let is_origin = origin.is_some_and(|origin| origin.name == *name);
            let used = self.below.snapshot_locks.begin_within(name, PATIENCE)?;
            let base = self.open_base(machine, used, (name, is_origin), progress)?;
            return Ok((Some(base), None));
        }
        if request.compress || request.whole {
            return Ok((None, None));
        }
        let Some(origin) = origin else {
            return Ok((None, None));
        };
        let name = &origin.name;
        let used = self.below.snapshot_locks.begin_within(name, PATIENCE)?;
        let opened = if let Some(why) = origin.no_parent() {
            Err(format!("snapshot '{name}' cannot be the parent: {why}"))
        } else {
            match self.open_base(machine, used, (name, true), progress) {
                // The VM maps these bytes, too, so its forks would begin with wrong memory.
                Err(error @ DaemonError::Snapshot(SnapshotError::Broken { .. }))
                    if kind.is_fork() =>
                {
                    return Err(error);
                }
                opened => opened.map_err(|error| chain(&error)),
            }
        };
        match opened {
            Ok(base) => Ok((Some(base), None)),
            Err(why) => {
                info!(
                    vm = machine.name(),
                    snapshot = name,
                    why,
                    "all pages of the VM are saved, because the snapshot from which the VM runs cannot be the parent"
                );
                Ok((None, Some(why)))
            }
        }
    }

    fn open_base<'a>(
        &'a self,
        machine: &Machine,
        used: Use<'a>,
        (name, is_origin): (&str, bool),
        progress: &Progress,
    ) -> Result<Base<'a>, DaemonError> {
        let shelf = &self.below.snapshots;
        let manifest = shelf.manifest(name)?;
        let (of, vm) = (
            (&*manifest.vm, manifest.domain.as_deref()),
            (machine.name(), machine.domain()),
        );
        if let Some(why) = strange(of, vm, is_origin) {
            return Err(SnapshotError::Impossible(format!(
                "snapshot '{name}' cannot be the parent: {why}"
            ))
            .into());
        }
        let parent = Arc::new(shelf.parent(&manifest, progress)?);
        let changed = save::changed_pages(machine.vm(), &mut machine.monitor(), Some(&parent))?;
        Ok(Base {
            parent,
            is_origin,
            manifest,
            changed,
            _used: used,
        })
    }
}

/// Returns the error for a save without encryption of a VM that runs from the encrypted snapshot
/// `name`.
fn in_clear(name: &str, kind: &SaveKind) -> SnapshotError {
    let fix = if kind.is_fork() {
        format!(
            "start clones instead ('memfold clone {name}'), or save the VM with 'memfold snapshot save --encrypt' and clone that snapshot"
        )
    } else {
        "pass --encrypt".into()
    };
    SnapshotError::Impossible(format!(
        "the VM runs from the encrypted snapshot '{name}', and its memory would be saved unencrypted; {fix}"
    ))
}

/// Returns why a VM must not refer to a snapshot of the VM `of`; `None` if it may. Each VM has a
/// name and perhaps a trust domain. `is_origin`: whether the VM runs from the snapshot.
fn strange(of: (&str, Option<&str>), vm: (&str, Option<&str>), is_origin: bool) -> Option<String> {
    let domain =
        |name: Option<&str>| name.map_or_else(|| "none".into(), |name| format!("'{name}'"));
    if of.1 != vm.1 {
        return Some(format!(
            "it is of trust domain {}, and the VM of {}",
            domain(of.1),
            domain(vm.1)
        ));
    }
    // A VM without a trust domain shares with no other VM.
    let is_shared = of.1.is_some() || is_origin || of.0 == vm.0;
    (!is_shared).then(|| "it is of another VM without a trust domain".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_without_a_trust_domain_refers_only_to_its_origin_and_to_its_own_snapshots() {
        let alone = |of, vm, is_origin| strange((of, None), (vm, None), is_origin);
        assert_eq!(alone("a", "a", false), None);
        assert_eq!(alone("a", "b", true), None);
        assert!(alone("a", "b", false).unwrap().contains("another VM"));
        let shop = Some("shop");
        assert_eq!(strange(("a", shop), ("b", shop), false), None);
        for (of, vm) in [(shop, None), (None, shop), (Some("bank"), shop)] {
            let why = strange(("a", of), ("a", vm), true).unwrap();
            assert!(why.contains("trust domain"), "{why}");
        }
    }
}

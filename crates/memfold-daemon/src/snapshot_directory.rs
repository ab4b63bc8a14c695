//! The snapshot directory of this host.

use std::ops::Deref;
use std::path::{Path, PathBuf};

use memfold_snapshot::Shelf;

use crate::on_shelf::OnShelf;
use memfold_units::ByteSize;

/// The snapshot directory of this host: its path, and access to the snapshots in it.
#[derive(Debug)]
pub(crate) struct SnapshotDirectory {
    root: PathBuf,
    shelf: Shelf,
}

impl SnapshotDirectory {
    pub fn open(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            shelf: Shelf::open(root),
        }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the number of snapshots and their size on disk; `None` if the directory cannot be
    /// read.
    pub fn in_short(&self) -> Option<OnShelf> {
        let mut all = OnShelf::default();
        for name in self.names().ok()? {
            all.count += 1;
            all.broken += u64::from(self.manifest(&name).is_err());
            // Another thread may remove the snapshot at this moment.
            all.bytes += ByteSize(self.disk_bytes(&name).unwrap_or(0));
        }
        Some(all)
    }
}

impl Deref for SnapshotDirectory {
    type Target = Shelf;

    fn deref(&self) -> &Shelf {
        &self.shelf
    }
}

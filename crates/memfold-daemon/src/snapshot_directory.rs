//! The directory of snapshots.

use std::ops::Deref;
use std::path::{Path, PathBuf};

use memfold_snapshot::Shelf;

use crate::on_shelf::OnShelf;
use memfold_units::ByteSize;

/// The directory of snapshots, and what is known of it.
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

    /// How many snapshots there are, and what they take on disk; `None`: the directory can't be
    /// read.
    pub fn in_short(&self) -> Option<OnShelf> {
        let mut all = OnShelf::default();
        for name in self.names().ok()? {
            all.count += 1;
            all.broken += u64::from(self.manifest(&name).is_err());
            // It may just be removed.
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

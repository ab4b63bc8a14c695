//! Errors of operations on snapshots: save, restore, verify, remove.

use std::io;
use std::path::{Path, PathBuf};

use memfold_vm::foreign::ForeignError;
use memfold_vm::{QmpError, RamError};

use super::keys::KeyError;

/// Error of an operation on a snapshot. After an error, no partial result remains.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages explain the variants
pub enum SnapshotError {
    #[error("no snapshot named '{0}'; 'memfold snapshot list' shows all snapshots")]
    Unknown(String),
    #[error(
        "a snapshot named '{0}' exists or is being saved; remove it first, or choose another name"
    )]
    Taken(String),
    #[error("{0}")]
    Name(String),
    #[error("cannot read or write {path}")]
    Files {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{0}")]
    Impossible(String),
    /// Another operation, or a VM, uses the snapshot or the saved VM. The same request is possible
    /// after that use.
    #[error("{0}")]
    Busy(String),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("snapshot '{name}' is encrypted: {source}")]
    Locked { name: String, source: KeyError },
    #[error(transparent)]
    Foreign(#[from] ForeignError),
    #[error("{0}")]
    Qemu(String),
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Ram(#[from] RamError),
    #[error("cannot map the snapshot into the VM's RAM: {0}")]
    Library(String),
    #[error("files of snapshot '{name}' are in use by {users}; stop {users} first")]
    InUse { name: String, users: String },
    #[error("memory or disks of snapshot '{name}' are needed by {others}; remove {others} first")]
    BuiltOn { name: String, others: String },
    #[error(
        "files of snapshot '{name}' that would be replaced are in use by {users}; stop {users} first, or save the VM with 'memfold snapshot save VM NAME --whole', which makes a snapshot that needs no other"
    )]
    Open { name: String, users: String },
    #[error(
        "snapshot '{name}' is needed by {users}; change 'snapshot' or the paths of its files there ('memfold vm edit'), or undefine the VM ('memfold vm undefine')"
    )]
    Named { name: String, users: String },
    #[error(
        "VM '{other}' already runs from snapshot '{name}' or from an ancestor of that snapshot. The guest has neither a driver for VM generation IDs nor memfold's agent, so both VMs would generate the same random numbers and keys. Pass --force to start the new VM anyway"
    )]
    Twin { name: String, other: String },
    #[error("cannot use snapshot '{name}': {why}")]
    Broken { name: String, why: String },
}

impl SnapshotError {
    pub(super) fn broken(name: &str, why: impl Into<String>) -> Self {
        let (name, why) = (name.into(), why.into());
        Self::Broken { name, why }
    }
}

/// Returns a function that adds a path to an I/O error.
pub(super) fn failed<P: AsRef<Path> + Copy>(path: P) -> impl Fn(io::Error) -> SnapshotError + Copy {
    move |source| SnapshotError::Files {
        path: path.as_ref().into(),
        source,
    }
}

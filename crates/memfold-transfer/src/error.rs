//! Errors of copying snapshots to and from object stores.

use std::io;
use std::path::{Path, PathBuf};

use memfold_snapshot::SnapshotError;

/// Error of a transfer from or to an object store. After an error, no incomplete snapshot is
/// visible, neither on this host nor in the store.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages explain the variants
pub enum TransferError {
    #[error(
        "'{url}' is not the address of an object store ({why}); use file:///DIRECTORY, s3://BUCKET/PREFIX, gs://, az://, http:// or https://"
    )]
    Address { url: String, why: String },
    #[error("cannot read or write object '{object}' in the object store")]
    Store {
        object: String,
        #[source]
        source: object_store::Error,
    },
    #[error("cannot read or write the snapshot's files on this host")]
    Local(#[source] io::Error),
    #[error(
        "no snapshot named '{name}' at {url}; 'memfold snapshot list --remote {url}' shows all"
    )]
    Unknown { name: String, url: String },
    #[error(
        "a snapshot named '{name}' exists at {url}; remove it there first, or push under another name with --as"
    )]
    Taken { name: String, url: String },
    #[error("object '{object}' in the object store is damaged: {why}")]
    Damaged { object: String, why: String },
    #[error("snapshot '{name}' at {url} is not signed, and --trust asks for a signature")]
    Unsigned { name: String, url: String },
    #[error("the signature of snapshot '{name}' was not made with the trusted key")]
    Signature { name: String },
    #[error("cannot use the key that signs snapshots: {0}")]
    Key(String),
    #[error(
        "snapshot '{name}' starts QEMU with arguments of its own ({arguments}), which run with QEMU's rights on this host; pass --trust KEY if its maker signed it, or --allow-arguments"
    )]
    Arguments { name: String, arguments: String },
    #[error(
        "snapshot '{name}' takes {needed}, and the file system of {path} has {available} free beyond its reserve for VMs; free space there"
    )]
    Space {
        name: String,
        path: PathBuf,
        needed: memfold_units::ByteSize,
        available: memfold_units::ByteSize,
    },
    #[error("cannot read or write {path}")]
    Files {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
}

pub(crate) fn failed(
    path: &object_store::path::Path,
) -> impl Fn(object_store::Error) -> TransferError + use<> {
    let object = path.to_string();
    move |source| TransferError::Store {
        object: object.clone(),
        source,
    }
}

/// Returns a function that adds a path of this host to an I/O error.
pub(super) fn files(path: &Path) -> impl Fn(io::Error) -> TransferError + use<> {
    let path = path.to_owned();
    move |source| TransferError::Files {
        path: path.clone(),
        source,
    }
}

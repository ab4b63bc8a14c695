//! Snapshots: a VM's memory, devices and disks at one instant, to be restored once or cloned often.
//!
//! ```text
//!   save     guest drops caches, lists free pages -> stop -> device state, RAM image, disks frozen -> go on -> manifest     (save)
//!            --keep hot: what the disks hold is taken out of the image (refer); --compress: the rest is packed (pack)
//!   restore  QEMU -incoming, library maps the RAM image privately, device state -> cont                    (restore)
//!   clone    the same, n times; what a clone writes is its own, and the agent sets it apart from the others (identity)
//! ```

mod beside;
pub mod clock;
mod copy;
pub mod cpu;
pub mod free;
mod freeze;
mod hardware;
pub mod identity;
pub mod image;
mod job;
pub mod manifest;
pub mod pack;
mod parts;
pub mod past;
pub mod pipeline;
pub mod refer;
pub mod restore;
pub mod save;
pub mod shelf;
mod shorten;
pub mod stored;
pub mod working_set;
pub mod writer;
mod written;

use std::io;
use std::path::PathBuf;

pub use clock::ClockStep;
pub use identity::{Renew, Renewal};
pub use manifest::{Keep, Manifest, SnapshotInfo};
pub use memfold_host::progress::{Progress, Step};
pub use shelf::{DEFAULT_SHELF, Shelf};

use memfold_vm::foreign::ForeignError;
use memfold_vm::{QmpError, RamError};

/// Why something was not done with a snapshot. Nothing is half done then.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// No such snapshot.
    #[error("no snapshot named '{0}'; 'memfold snapshot list' shows all")]
    Unknown(String),
    /// There is one of this name, or one is being made.
    #[error(
        "a snapshot named '{0}' is there already, or is being saved; remove it first, or take another name"
    )]
    Taken(String),
    /// The name can't be one.
    #[error("{0}")]
    Name(String),
    /// Its files can't be read or written.
    #[error("cannot use {path}")]
    Files {
        /// Which.
        path: PathBuf,
        /// From the kernel.
        #[source]
        source: io::Error,
    },
    /// This VM can't be saved or restored.
    #[error("{0}")]
    Impossible(String),
    /// No other QEMU can be like this one, which memfold didn't start.
    #[error(transparent)]
    Foreign(#[from] ForeignError),
    /// QEMU didn't do what was asked.
    #[error("{0}")]
    Qemu(String),
    /// Its monitor failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Its RAM can't be found.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The library in QEMU didn't do what was asked.
    #[error("memfold's library in QEMU: {0}")]
    Library(String),
    /// VMs run from it.
    #[error("snapshot '{name}' is mapped by running VMs (processes {pids}); end them first")]
    InUse {
        /// Its name.
        name: String,
        /// Their processes.
        pids: String,
    },
    /// Other snapshots need its disks.
    #[error("snapshot '{name}' is what the disks of {others} are built on; remove these first")]
    BuiltOn {
        /// Its name.
        name: String,
        /// The others.
        others: String,
    },
    /// Another VM runs from the same memory, and nothing would set the two apart.
    #[error(
        "VM '{other}' runs from snapshot '{name}' or from what was saved in it, and its guest has neither a driver for VM generation IDs nor memfold's agent: both would draw the same random numbers and keys; --force starts it all the same"
    )]
    Twin {
        /// Its name.
        name: String,
        /// Who runs.
        other: String,
    },
    /// It is not what was saved.
    #[error("snapshot '{name}' can't be used: {why}")]
    Broken {
        /// Its name.
        name: String,
        /// What is wrong.
        why: String,
    },
}

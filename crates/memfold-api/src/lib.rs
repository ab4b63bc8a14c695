//! What goes over the daemon's interface, and the client that the command line uses. No server, and
//! no daemon. Units are in the names of fields.

mod access;
mod client;
mod debt;
mod error;
mod fold;
mod ksm;
mod lending;
mod libvirt;
mod registry;
mod report;
mod segment;
mod snapshot;
mod swap;
mod vm;

pub use access::*;
pub use client::*;
pub use debt::*;
pub use error::*;
pub use fold::*;
pub use ksm::*;
pub use lending::*;
pub use libvirt::*;
pub use registry::*;
pub use report::*;
pub use segment::*;
pub use snapshot::*;
pub use swap::*;
pub use vm::*;

/// Where the daemon listens if nothing else is said.
pub const DEFAULT_SOCKET: &str = "/run/memfold/memfold.sock";

/// Where the daemon keeps its VMs if nothing else is said.
pub use memfold_vm::DEFAULT_STATE;

/// Where the daemon keeps its history and its audit log if neither that nor the state directory is
/// given: it outlives a reboot.
pub const DEFAULT_RECORDS: &str = "/var/lib/memfold";

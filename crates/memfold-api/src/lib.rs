//! Request and response types of the daemon's HTTP API, and the client that the command line uses.
//! The crate contains no server code. The name of a field contains its unit (`_bytes`, `_ms`).

mod access;
mod advice;
mod client;
mod definition;
mod event_stream;
mod exec_stream;
mod lending;
mod registry;
mod report;
mod rightsize;
mod segment;
mod sharing;
mod snapshot;
mod vm;

pub use access::*;
pub use advice::*;
pub use client::*;
pub use definition::*;
pub use event_stream::*;
pub use exec_stream::*;
pub use lending::*;
pub use registry::*;
pub use report::*;
pub use rightsize::*;
pub use segment::*;
pub use sharing::*;
pub use snapshot::*;
pub use vm::*;

/// Default path of the daemon's Unix socket.
pub const DEFAULT_SOCKET: &str = "/run/memfold/memfold.sock";

/// Default state directory of the daemon, which holds the files of its VMs.
pub use memfold_vm::DEFAULT_STATE;

/// Default directory of the definitions of VMs.
pub const DEFAULT_DEFINITIONS: &str = "/etc/memfold/vms";

/// Default directory of the daemon's history and audit log, used if neither a directory for them
/// nor a state directory is given. Its contents survive a reboot.
pub const DEFAULT_RECORDS: &str = "/var/lib/memfold";

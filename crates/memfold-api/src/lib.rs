//! What goes over the daemon's interface, and the client that the command line uses. No server, and no daemon.

mod client;
mod hosts;
mod lending;
mod libvirt;
mod role;
mod session;
mod types;

pub use client::{Client, ClientError};
pub use hosts::{HostRequest, HostToken};
pub use lending::{
    BorrowRequest, Borrowed, LeaseReport, LendRequest, REGISTRY_PATH, SwapPlace, registry_at,
};
pub use libvirt::{LibvirtEnableRequest, LibvirtRequest};
pub use role::Role;
pub use session::{CodeRequest, LoginCode, LoginRequest, SessionInfo};
pub use types::*;

/// Where the daemon listens if nothing else is said.
pub const DEFAULT_SOCKET: &str = "/run/memfold/memfold.sock";

/// Where the daemon keeps its VMs if nothing else is said.
pub const DEFAULT_STATE: &str = "/run/memfold";

/// Where the daemon keeps its history and its audit log if neither that nor the state directory is given: it outlives a reboot.
pub const DEFAULT_RECORDS: &str = "/var/lib/memfold";

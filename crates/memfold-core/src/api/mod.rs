//! The daemon's interface: HTTP/JSON over a Unix socket, and over TCP where that is asked for.
//!
//! `GET /openapi.json` describes it. The command line is a client like any other.

mod access;
mod client;
mod hosts;
mod lending;
mod libvirt;
mod live;
mod metrics;
mod planning;
mod reference;
mod server;
mod session;
mod types;
mod web;

pub use access::{
    AuditEntry, Doors, Groups, GroupsError, PublicUrl, PublicUrlError, Role, TcpDoor, TcpDoorError,
    TlsFiles,
};
pub use client::{Client, ClientError};
pub use hosts::{HostRequest, HostToken};
pub use lending::{BorrowRequest, Borrowed, LeaseReport, LendRequest, SwapPlace, registry_at};
pub use libvirt::{LibvirtEnableRequest, LibvirtRequest};
pub use reference::reference;
pub use server::{ServeError, openapi, serve};
pub use session::{CodeRequest, LoginCode, LoginRequest, SessionInfo};
pub use types::{
    AttachRequest, AttachSegmentRequest, AttachedSegment, BootSnapshot, BuildRequest, BuildResult,
    DebtRequest, ErrorBody, ExecRequest, ExecResult, FoldRequest, FullReport, KsmStartRequest,
    KsmStopRequest, LentPart, RankRequest, RebootRequest, RestoreRequest, RunOptions, SaveRequest,
    SegmentState, StopReport, StopRequest, VerifyReport, VersionInfo, VmInfo, VmSegment, VmSwap,
};

/// Where the daemon listens if nothing else is said.
pub const DEFAULT_SOCKET: &str = "/run/memfold/memfold.sock";

/// Where the daemon keeps its VMs if nothing else is said.
pub const DEFAULT_STATE: &str = "/run/memfold";

/// Where the daemon keeps its history and its audit log if neither that nor the state directory is given: it outlives a reboot.
pub const DEFAULT_RECORDS: &str = "/var/lib/memfold";

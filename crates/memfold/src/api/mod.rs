//! The daemon's interface: HTTP/JSON over a Unix socket.
//!
//! `GET /openapi.json` describes it. The command line is a client like any other.

mod client;
mod lending;
mod metrics;
mod server;
mod types;

pub use client::{Client, ClientError};
pub use lending::{BorrowRequest, Borrowed, LeaseReport, LendRequest, SwapPlace, remote_registry};
pub use server::{ServeError, openapi, serve};
pub use types::{
    AttachRequest, AttachSegmentRequest, AttachedSegment, BootSnapshot, BuildRequest, BuildResult,
    DebtRequest, ErrorBody, ExecRequest, ExecResult, FoldRequest, FullReport, KsmStartRequest,
    KsmStopRequest, RankRequest, RebootRequest, RestoreRequest, RunOptions, SaveRequest,
    SegmentState, StopRequest, VerifyReport, VersionInfo, VmInfo, VmSegment,
};

/// Where the daemon listens if nothing else is said.
pub const DEFAULT_SOCKET: &str = "/run/memfold/memfold.sock";

/// Where the daemon keeps its VMs if nothing else is said.
pub const DEFAULT_STATE: &str = "/run/memfold";

//! Types of the daemon's API for its version and for its report of how the host's memory is used.

use std::path::PathBuf;

use memfold_fold::EngineStats;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Response of `GET /v1/version`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct VersionInfo {
    /// Package version of the daemon.
    pub version: String,
    /// Process ID of the daemon.
    pub pid: i32,
    /// State directory of the daemon, which holds the files of its VMs.
    #[schema(value_type = String)]
    pub state: PathBuf,
}

/// Response of `GET /v1/report`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct FullReport {
    /// Memory use of the host and of each VM.
    #[schema(value_type = Object)]
    pub ledger: memfold_ledger::Report,
    /// Counters and settings of folding.
    pub fold: EngineStats,
}

//! The daemon's version, and its report of memory use.

use std::path::PathBuf;

use memfold_fold::EngineStats;
use memfold_ledger as ledger;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `GET /v1/version`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct VersionInfo {
    /// The daemon's package version.
    pub version: String,
    /// Its process id.
    pub pid: i32,
    /// Where it keeps its VMs.
    #[schema(value_type = String)]
    pub state: PathBuf,
}

/// `GET /v1/report`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct FullReport {
    /// Where every byte is.
    #[schema(value_type = Object)]
    pub ledger: ledger::Report,
    /// What folding has done.
    pub fold: EngineStats,
}

//! How the daemon is to be.

use std::path::PathBuf;

use memfold_api::LendRequest;
use memfold_fold::EngineSettings;
use memfold_ledger::BrakePolicy;
use memfold_lend::RegistryAt;

/// When VMs borrow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum BorrowWhen {
    /// On request: memfold borrow.
    #[default]
    Asked,
    /// Also by themselves, while they swap.
    Auto,
}

/// How the daemon is to be.
#[derive(Clone, Debug)]
pub struct DaemonOptions {
    /// Directory of VMs and their sockets.
    pub state: PathBuf,
    /// Folding.
    pub settings: EngineSettings,
    /// Globs of guest paths to report; empty means all.
    pub include: Vec<String>,
    /// Globs of guest paths to leave out.
    pub exclude: Vec<String>,
    /// Whether folding begins paused.
    pub paused: bool,
    /// When too much is shared.
    pub brake: BrakePolicy,
    /// Directory of snapshots.
    pub shelf: PathBuf,
    /// Directory of segments.
    pub segments: PathBuf,
    /// Name of this host among those that lend and borrow; unset: the kernel's.
    pub host: Option<String>,
    /// Who serves the registry of leases; unset: this daemon does.
    pub registry: Option<RegistryAt>,
    /// When VMs borrow.
    pub borrow: BorrowWhen,
    /// What this host lends after a boot; unset: nothing.
    pub lend: Option<LendRequest>,
    /// The file of the history; unset: there is none.
    pub history: Option<PathBuf>,
    /// Directory where libvirt notes its QEMUs; unset: its domains are left alone.
    pub libvirt: Option<PathBuf>,
}

//! Options of the daemon.

use std::path::PathBuf;

use memfold_api::LendRequest;
use memfold_fold::EngineSettings;
use memfold_ledger::BrakePolicy;
use memfold_lend::RegistryAt;

/// When the swap of VMs is moved to lent RAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum BorrowWhen {
    /// On request: memfold borrow.
    #[default]
    Asked,
    /// Also by themselves, while they swap.
    Auto,
}

/// Options of the daemon, from the command line and the configuration.
#[derive(Clone, Debug)]
pub struct DaemonOptions {
    /// State directory: files and sockets of the VMs.
    pub state: PathBuf,
    /// Settings of the fold engine.
    pub settings: EngineSettings,
    /// Globs of guest paths whose page cache agents report; empty means all.
    pub include: Vec<String>,
    /// Globs of guest paths that agents do not report.
    pub exclude: Vec<String>,
    /// Whether folding is paused at the start.
    pub paused: bool,
    /// Limits of the copy-on-write debt at which the brake acts.
    pub brake: BrakePolicy,
    /// Directory of the snapshots.
    pub shelf: PathBuf,
    /// Directory of the segments.
    pub segments: PathBuf,
    /// Name of this host among lenders and borrowers; `None`: the kernel's host name.
    pub host: Option<String>,
    /// Location of the lease registry; `None`: this daemon serves the registry.
    pub registry: Option<RegistryAt>,
    /// When the swap of VMs is moved to lent RAM.
    pub borrow: BorrowWhen,
    /// Memory that this host lends after a boot; `None`: no memory.
    pub lend: Option<LendRequest>,
    /// File of the history; `None`: no history is kept.
    pub history: Option<PathBuf>,
    /// Directory where libvirt records its QEMUs; `None`: libvirt is not used.
    pub libvirt: Option<PathBuf>,
}

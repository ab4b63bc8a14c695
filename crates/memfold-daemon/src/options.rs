//! Options with which the daemon starts, such as its directories and its host name. The command
//! `memfold serve` fills them in.

use std::path::PathBuf;

use memfold_api::{LendRequest, RightsizeMode};
use memfold_fold::EngineSettings;
use memfold_ledger::BrakePolicy;
use memfold_lend::RegistryAt;
use memfold_snapshot::Keys;

/// When the swap of VMs is moved to lent RAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum BorrowWhen {
    /// Only on request (`memfold borrow`).
    #[default]
    Asked,
    /// On request, and also automatically while VMs swap.
    Auto,
}

/// Options of the daemon, from the command line and the configuration file.
#[derive(Clone, Debug)]
pub struct DaemonOptions {
    /// State directory: files and sockets of the VMs.
    pub state: PathBuf,
    /// Settings of the fold engine.
    pub settings: EngineSettings,
    /// Glob patterns of guest paths whose page cache agents report; empty means all paths.
    pub include: Vec<String>,
    /// Glob patterns of guest paths that agents do not report.
    pub exclude: Vec<String>,
    /// Whether folding is paused when the daemon starts.
    pub paused: bool,
    /// Limits of the copy-on-write debt at which the brake acts.
    pub brake: BrakePolicy,
    /// Whether the daemon changes the memory of VMs.
    pub rightsize: RightsizeMode,
    /// Directory of the snapshots of this host.
    pub shelf: PathBuf,
    /// Keys with which snapshots are encrypted.
    pub snapshot_keys: Keys,
    /// Directory of the segments of this host.
    pub segments: PathBuf,
    /// Directory of the definitions of VMs.
    pub definitions: PathBuf,
    /// Name of this host as lender and borrower of memory; `None`: the kernel's host name.
    pub host: Option<String>,
    /// Location of the lease registry; `None`: this daemon serves the registry itself.
    pub registry: Option<RegistryAt>,
    /// When the swap of VMs is moved to lent RAM.
    pub borrow: BorrowWhen,
    /// Memory that this host lends unless an operator has requested otherwise since the host's
    /// boot; `None`: no setting.
    pub lend: Option<LendRequest>,
    /// Database file for the ledger's history; `None`: no history is kept.
    pub history: Option<PathBuf>,
    /// Directory where libvirt records its QEMU processes; `None`: libvirt is not used.
    pub libvirt: Option<PathBuf>,
    /// Root directory of the node of Proxmox VE whose enabled VMs are attached; `None`: Proxmox VE
    /// is not used.
    pub pve: Option<PathBuf>,
}

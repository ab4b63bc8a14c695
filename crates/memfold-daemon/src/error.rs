//! What the daemon refuses, and why.

use std::io;
use std::path::PathBuf;

use memfold_ksm::KsmError;
use memfold_ledger::ReadError;
use memfold_ledger::estimate::EstimateError;
use memfold_ledger::history::HistoryError;
use memfold_lend::RegistryError;
use memfold_lend::graph::GraphError;
use memfold_lend::lvm::LvmError;
use memfold_segment::SegmentError;
use memfold_snapshot::SnapshotError;
use memfold_vm::{AgentError, LaunchError, MachineError, QmpError, RamError};

/// Why the daemon did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// No VM of this name.
    #[error("no VM named '{0}'; 'memfold vm list' shows all VMs")]
    NoSuchVm(String),
    /// No such path of the interface.
    #[error("no such path; GET /openapi.json lists all paths")]
    NoSuchPath,
    /// A VM of this name runs.
    #[error("a VM named '{0}' is running")]
    NameTaken(String),
    /// The request makes no sense.
    #[error("{0}")]
    BadRequest(String),
    /// This host can't do it.
    #[error("{0}")]
    ImpossibleHere(String),
    /// The state directory can't be used.
    #[error("cannot use state directory {path}")]
    State {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another daemon uses the state directory.
    #[error("another memfold daemon uses state directory {0}; stop it, or choose another --state")]
    StateTaken(PathBuf),
    /// QEMU did not start.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The VM can't be used.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// QEMU's monitor failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The VM's RAM layout can't be read.
    #[error("cannot read the VM's RAM layout from QEMU")]
    Ram(#[from] RamError),
    /// The agent failed.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// A snapshot can't be saved or used.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A segment can't be built or used.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The ledger can't be read.
    #[error("cannot read the ledger's figures from the kernel")]
    Ledger(#[from] ReadError),
    /// KSM can't be read or set.
    #[error(transparent)]
    Ksm(#[from] KsmError),
    /// KSM may not be steered now.
    #[error("cannot steer KSM: {why}")]
    Merging {
        /// The condition.
        why: String,
        /// What would change it.
        fix: String,
    },
    /// Guests could call in more than the host could give.
    #[error("{what}: the brake is on: {why}")]
    Braked {
        /// What was refused.
        what: String,
        /// The figures.
        why: String,
    },
    /// The registry of leases refused, or can't be used.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A swap disk can't be switched.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// A volume can't be put on lent RAM, or taken off.
    #[error(transparent)]
    Lvm(#[from] LvmError),
    /// Memory can't be lent, borrowed or given back now.
    #[error("{why}")]
    Lending {
        /// The condition.
        why: String,
        /// What would change it.
        fix: String,
    },
    /// Something of which there is one at a time is under way.
    #[error("{why}")]
    Busy {
        /// What.
        why: String,
        /// What would change it.
        fix: String,
    },
    /// The VM stands still.
    #[error("{why}")]
    StandsStill {
        /// The VM, what was not done, its state and the cause, in words.
        why: String,
        /// What would have it run.
        fix: String,
    },
    /// The daemon keeps no history.
    #[error("this daemon keeps no history; its log says why")]
    NoHistory,
    /// The history failed.
    #[error(transparent)]
    History(#[from] HistoryError),
    /// An estimate failed.
    #[error(transparent)]
    Estimate(#[from] EstimateError),
    /// A part of the daemon failed.
    #[error("{0}")]
    Internal(&'static str),
}

impl DaemonError {
    /// Whether it is this host that lacks something; `memfold doctor` tells what.
    #[must_use]
    pub const fn impossible_here(&self) -> bool {
        matches!(
            self,
            Self::ImpossibleHere(_)
                | Self::Segment(SegmentError::Missing { .. })
                | Self::Ksm(KsmError::Missing(_))
                | Self::Launch(
                    LaunchError::TooOld { .. }
                        | LaunchError::Qemu(_)
                        | LaunchError::Kvm { .. }
                        | LaunchError::Library(_)
                )
        )
    }

    /// What would change it, where the message itself doesn't say.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            _ if self.impossible_here() => {
                Some("'memfold doctor' shows what this host lacks, and how to fix it".into())
            }
            Self::Merging { fix, .. } | Self::Lending { fix, .. } | Self::Busy { fix, .. } | Self::StandsStill { fix, .. } => {
                Some(fix.clone())
            }
            Self::Lvm(error) => error.fix(),
            Self::Braked { .. } => Some(
                "end VMs, or free memory on this host; 'memfold debt' shows how much each VM could claim, its --reserve and --cover change the limits, and --despite-brake starts a VM anyway".into(),
            ),
            Self::NameTaken(name) | Self::Launch(LaunchError::NameTaken { name }) => Some(format!(
                "choose another --name, or end the running VM: memfold vm stop {name}"
            )),
            Self::Qmp(QmpError::Connect { .. })
            | Self::Machine(MachineError::Qmp(QmpError::Connect { .. })) => Some(
                "give the path of the socket that QEMU was started with: -qmp unix:PATH,server=on,wait=off".into(),
            ),
            Self::Qmp(QmpError::NoGreeting { .. })
            | Self::Machine(MachineError::Qmp(QmpError::NoGreeting { .. })) => Some(
                "QEMU serves one client for each QMP socket; start QEMU with one more -qmp socket for memfold".into(),
            ),
            Self::Agent(AgentError::NoSession(_)) => Some(
                "the guest may still be booting, or memfold-agent is not installed in it; 'memfold vm list' shows its agent".into(),
            ),
            _ => None,
        }
    }
}

/// Why memory is not lent, borrowed or given back, and what would change that.
pub(crate) fn lending(why: impl Into<String>, fix: impl Into<String>) -> DaemonError {
    DaemonError::Lending {
        why: why.into(),
        fix: fix.into(),
    }
}

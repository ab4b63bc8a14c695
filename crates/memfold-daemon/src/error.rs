//! Errors that the daemon returns for requests of its users, such as an unknown VM name.

use std::io;
use std::path::{Path, PathBuf};

use memfold_host::UsersError;
use memfold_ksm::KsmError;
use memfold_ledger::ReadError;
use memfold_ledger::estimate::EstimateError;
use memfold_ledger::history::HistoryError;
use memfold_lend::RegistryError;
use memfold_lend::graph::GraphError;
use memfold_lend::lvm::LvmError;
use memfold_segment::SegmentError;
use memfold_snapshot::SnapshotError;
use memfold_transfer::TransferError;
use memfold_vm::balloon::BalloonError;
use memfold_vm::{AgentError, LaunchError, MachineError, QmpError, RamError, UserError};

/// The reason why the daemon refused a request or could not carry it out.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// No VM has this name.
    #[error("no VM named '{0}'; 'memfold vm list' shows all VMs")]
    NoSuchVm(String),
    /// No VM of this name is defined.
    #[error("no VM named '{0}' is defined; 'memfold vm list' shows all VMs")]
    NoSuchDefinition(String),
    /// The file of a VM's definition, or the directory of these files, cannot be used.
    #[error("cannot read or write {path}")]
    Definition {
        /// Path of the file or directory.
        path: PathBuf,
        /// Error that the file system returned.
        #[source]
        source: io::Error,
    },
    /// The HTTP API has no such path.
    #[error("the API has no such path; GET /openapi.json lists all paths")]
    NoSuchPath,
    /// A VM of this name is running or being started.
    #[error("a VM named '{0}' is running")]
    NameTaken(String),
    /// The request is invalid, or the daemon's present state does not allow it.
    #[error("{0}")]
    BadRequest(String),
    /// This host lacks something that the request needs.
    #[error("{0}")]
    ImpossibleHere(String),
    /// The state directory cannot be used.
    #[error("cannot create or use the state directory {path}")]
    State {
        /// Path of the state directory.
        path: PathBuf,
        /// Error that the file system returned.
        #[source]
        source: io::Error,
    },
    /// Another daemon uses the state directory.
    #[error("another memfold daemon uses state directory {0}; stop it, or choose another --state")]
    StateTaken(PathBuf),
    /// QEMU could not be started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The VM's process or its files cannot be used.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// A command of QEMU's monitor (QMP) failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The layout of the VM's RAM cannot be read.
    #[error("cannot read the VM's RAM layout from QEMU")]
    Ram(#[from] RamError),
    /// The guest's agent failed or did not answer.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// The VM's balloon cannot be moved.
    #[error(transparent)]
    Balloon(#[from] BalloonError),
    /// A snapshot cannot be saved or used.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A snapshot cannot be copied to or from an object store.
    #[error(transparent)]
    Transfer(TransferError),
    /// A segment cannot be built or used.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The ledger's figures cannot be read from the kernel.
    #[error("cannot read memory figures from the kernel")]
    Ledger(#[from] ReadError),
    /// KSM's files cannot be read or written.
    #[error(transparent)]
    Ksm(#[from] KsmError),
    /// The brake is on: guests can claim more memory than is available.
    #[error("{what}, because the brake is on: {why}")]
    Braked {
        /// What the brake refused, as text.
        what: String,
        /// Figures of the debt and the available memory, as text.
        why: String,
    },
    /// The lease registry refused the request, or cannot be used.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A swap disk's block nodes cannot be changed in QEMU.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// An LVM volume cannot be put on lent RAM, or taken off.
    #[error(transparent)]
    Lvm(#[from] LvmError),
    /// The daemon cannot carry out the request now: KSM cannot be steered; memory cannot be lent,
    /// borrowed or given back; another operation is in progress; or the VM is not running.
    #[error("{why}")]
    Refused {
        /// Condition of the request that does not hold, as text.
        why: String,
        /// What the operator can do to make the condition hold, as text.
        fix: String,
    },
    /// A lender cannot serve memory that it has offered. Another lender may be able to.
    #[error("{why}")]
    LenderFailed {
        /// Host name of the lender.
        lender: String,
        /// What the lender failed to do, as text that names the lender.
        why: String,
        /// What the operator can do about it, as text.
        fix: String,
    },
    /// The daemon keeps no history.
    #[error("this daemon keeps no history of memory use; see the daemon's log for the reason")]
    NoHistory,
    /// The history cannot be read or written.
    #[error(transparent)]
    History(#[from] HistoryError),
    /// An estimate of savings failed.
    #[error(transparent)]
    Estimate(#[from] EstimateError),
    /// A thread of the daemon has ended or could not be started.
    #[error("{0}")]
    Internal(&'static str),
}

impl DaemonError {
    /// Returns whether this host lacks something that the request needs. `memfold doctor` then
    /// shows what is missing.
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
                        | LaunchError::User(UserError::Allot(
                            UsersError::Range(_) | UsersError::Unmapped { .. }
                        ))
                )
        )
    }

    /// Returns what the operator can do about the error; `None` if the error's message already says
    /// it.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            _ if self.impossible_here() => {
                Some("'memfold doctor' shows what this host lacks, and how to fix it".into())
            }
            Self::Refused { fix, .. } | Self::LenderFailed { fix, .. } => Some(fix.clone()),
            Self::Lvm(error) => error.fix(),
            Self::NoSuchDefinition(_) => Some("define the VM: memfold vm define FILE".into()),
            Self::Definition { .. } => Some(
                "free space on the file system of that path, and let the daemon write there; 'memfold serve --definitions DIR' chooses another directory".into(),
            ),
            Self::Transfer(TransferError::Store { .. }) => Some(
                "the daemon's environment has the address and the credentials, with systemd in /etc/memfold/object-store.env; 'systemctl restart memfold' reads that file".into(),
            ),
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
            Self::Agent(AgentError::TooOld { .. }) => Some(
                "install this memfold's memfold-agent in the guest and restart it there; 'memfold vm exec' without -i and -t works with any agent".into(),
            ),
            Self::Agent(AgentError::TooManyStreams) => Some("end one of them".into()),
            _ => None,
        }
    }
}

impl From<TransferError> for DaemonError {
    fn from(error: TransferError) -> Self {
        match error {
            TransferError::Snapshot(error) => Self::Snapshot(error),
            error => Self::Transfer(error),
        }
    }
}

/// Returns a function that makes a [`DaemonError::State`] from an error of the file system at
/// `path`.
pub(crate) fn state_error(path: &Path) -> impl Fn(io::Error) -> DaemonError + Copy + '_ {
    |source| DaemonError::State {
        path: path.to_owned(),
        source,
    }
}

/// Checks a number of a request.
///
/// # Errors
///
/// [`DaemonError::BadRequest`], which names the number and the range, unless `is_fine`.
pub(crate) fn check(
    name: &str,
    value: impl std::fmt::Display,
    is_fine: bool,
    range: &str,
) -> Result<(), DaemonError> {
    let wrong = || DaemonError::BadRequest(format!("{name} is {value}; give {range}"));
    is_fine.then_some(()).ok_or_else(wrong)
}

/// Returns a function that makes a [`SegmentError::Files`] from an error of the file system at
/// `path`.
pub(crate) fn segment_files(path: &Path) -> impl Fn(io::Error) -> SegmentError + Copy + '_ {
    |source| SegmentError::Files {
        path: path.to_owned(),
        source,
    }
}

/// Makes the error of a segment's operation that is impossible, with the reason and the fix.
pub(crate) fn impossible(why: impl Into<String>) -> DaemonError {
    SegmentError::Impossible(why.into()).into()
}

/// Makes a [`DaemonError::Refused`] from a failed condition and the action that would change it.
pub(crate) fn refused(why: impl Into<String>, fix: impl Into<String>) -> DaemonError {
    DaemonError::Refused {
        why: why.into(),
        fix: fix.into(),
    }
}

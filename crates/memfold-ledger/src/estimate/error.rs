//! Errors of an estimate of how much memory the host's VMs could share (`memfold estimate`).

use std::io;

use rustix::io::Errno;

/// Reason why nothing could be estimated.
#[derive(Debug, thiserror::Error)]
pub enum EstimateError {
    /// No QEMU process with memory to examine runs on this host.
    #[error(
        "no QEMU process with memory to examine runs on this host; start VMs ('memfold vm run')"
    )]
    NoVms,
    /// The caller is not root and cannot see any QEMU.
    #[error("cannot see the memory of other users' processes; run this as root")]
    NotRoot,
    /// No running QEMU has the requested name or process number.
    #[error(
        "no running QEMU has the name or process number '{0}'; 'memfold ksm status' and 'memfold vm list' list running VMs"
    )]
    NoSuchVm(String),
    /// Several QEMU processes have the requested VM name.
    #[error(
        "several QEMU processes are named '{name}'; give one of their process numbers: {pids:?}"
    )]
    Ambiguous {
        /// Requested name, which the VMs have in common.
        name: String,
        /// Numbers of the QEMU processes whose VM has this name.
        pids: Vec<i32>,
    },
    /// The kernel has no `PAGEMAP_SCAN`.
    #[error(
        "this kernel cannot list resident pages (PAGEMAP_SCAN is missing); use Linux 6.7 or newer"
    )]
    NoScan,
    /// The kernel does not allow this process to read the memory of process `pid`.
    #[error(
        "not permitted to read the memory of process {pid} (CAP_SYS_PTRACE and CAP_SYS_ADMIN are needed); run this as root"
    )]
    NotAllowed {
        /// Number of the process whose memory may not be read.
        pid: i32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The list of QEMU processes could not be read.
    #[error(transparent)]
    Processes(#[from] memfold_ksm::KsmError),
    /// The page map or the mappings of process `pid` could not be read.
    #[error("cannot read the page map or mappings of process {pid}")]
    Read {
        /// Number of the process.
        pid: i32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The user pressed Ctrl-C.
    #[error("interrupted; nothing was changed")]
    Interrupted,
}

/// Returns whether a file of a process in `/proc` could not be read because the process has ended.
pub(super) fn has_ended(error: &io::Error) -> bool {
    let ended = Errno::SRCH.raw_os_error();
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(ended)
}

impl EstimateError {
    /// Makes the error of a file of process `pid` in `/proc`, or of a system call on it.
    pub(super) fn of(pid: i32, source: io::Error) -> Self {
        let unknown = [Errno::NOTTY, Errno::INVAL].map(|errno| Some(errno.raw_os_error()));
        if source.kind() == io::ErrorKind::PermissionDenied {
            Self::NotAllowed { pid, source }
        } else if unknown.contains(&source.raw_os_error()) {
            Self::NoScan
        } else {
            Self::Read { pid, source }
        }
    }
}

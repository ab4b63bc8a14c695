//! Errors of an estimate.

use std::io;

/// Reason why nothing could be estimated.
#[derive(Debug, thiserror::Error)]
pub enum EstimateError {
    /// No QEMU runs on this host.
    #[error(
        "no QEMU process with memory of its own runs on this host; start VMs ('memfold vm run')"
    )]
    NoVms,
    /// No QEMU can be seen, and the caller is not root.
    #[error("cannot see the memory of other users' processes; run this as root")]
    NotRoot,
    /// A VM that was asked for does not run.
    #[error(
        "no running QEMU has the name or process number '{0}'; 'memfold ksm status' and 'memfold vm list' list them"
    )]
    NoSuchVm(String),
    /// Several VMs have the name.
    #[error("several QEMUs are named '{name}'; give one of their process numbers: {pids:?}")]
    Ambiguous {
        /// The name.
        name: String,
        /// Their process numbers.
        pids: Vec<i32>,
    },
    /// The kernel has no `PAGEMAP_SCAN`.
    #[error(
        "this kernel cannot list resident pages (PAGEMAP_SCAN is missing); use Linux 6.7 or newer"
    )]
    NoScan,
    /// The process's memory may not be read.
    #[error(
        "not permitted to read the memory of process {pid} (CAP_SYS_PTRACE and CAP_SYS_ADMIN are needed); run this as root"
    )]
    NotAllowed {
        /// The process.
        pid: i32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The QEMU processes could not be determined.
    #[error(transparent)]
    Processes(#[from] memfold_ksm::KsmError),
    /// A file of `/proc` could not be read.
    #[error("cannot read the page map or mappings of process {pid}")]
    Read {
        /// The process.
        pid: i32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The user pressed Ctrl-C.
    #[error("interrupted; nothing was changed")]
    Interrupted,
}

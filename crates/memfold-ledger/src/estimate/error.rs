//! Why nothing could be estimated.

use std::io;

/// Why nothing could be estimated.
#[derive(Debug, thiserror::Error)]
pub enum EstimateError {
    /// No QEMU runs here.
    #[error(
        "no QEMU process with memory of its own runs on this host; start VMs ('memfold vm run')"
    )]
    NoVms,
    /// No QEMU can be seen, and we aren't root.
    #[error("other users' processes and their memory can't be seen: run this as root")]
    NotRoot,
    /// A VM that was asked for is not there.
    #[error(
        "no QEMU has the name or number '{0}'; 'memfold ksm status' and 'memfold vm list' show those that run"
    )]
    NoSuchVm(String),
    /// Several have the name.
    #[error("several QEMUs are named '{name}': give one of their process numbers, {pids:?}")]
    Ambiguous {
        /// The name.
        name: String,
        /// Their numbers.
        pids: Vec<i32>,
    },
    /// The kernel has no `PAGEMAP_SCAN`.
    #[error(
        "this kernel can't tell which pages are in memory (PAGEMAP_SCAN): Linux 6.7 or newer is needed"
    )]
    NoScan,
    /// We may not look.
    #[error(
        "the memory of process {pid} may not be read (CAP_SYS_PTRACE, CAP_SYS_ADMIN): run this as root"
    )]
    NotAllowed {
        /// The process.
        pid: i32,
        /// Why.
        source: io::Error,
    },
    /// Who is a QEMU could not be found out.
    #[error(transparent)]
    Processes(#[from] memfold_ksm::KsmError),
    /// A file of `/proc` could not be read.
    #[error("cannot read the page map or mappings of process {pid}")]
    Read {
        /// The process.
        pid: i32,
        /// Why.
        source: io::Error,
    },
    /// Somebody pressed Ctrl-C.
    #[error("interrupted; nothing was changed")]
    Interrupted,
}

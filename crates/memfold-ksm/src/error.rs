//! Errors of reading KSM's figures and of writing its settings.

use std::io;
use std::path::PathBuf;

/// Reason why KSM's figures could not be read or its settings not be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages explain the variants
pub enum KsmError {
    #[error("this kernel has no KSM: {0} is missing (CONFIG_KSM)")]
    Missing(PathBuf),
    /// A process holds the lock of its memory map while it waits. The process number is 0 if the
    /// process is unknown.
    #[error(
        "cannot list mergeable memory: process {0} holds the lock of its memory map while it waits in the kernel (see 'ps -o pid,stat,wchan:30,args -p {0}')"
    )]
    Hung(i32),
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write '{value}' to {path}")]
    Write {
        path: PathBuf,
        value: String,
        source: io::Error,
    },
    #[error(
        "another memfold process uses KSM (it holds {0}); wait until that process ends, or run 'memfold ksm stop' if a daemon steers KSM"
    )]
    Busy(PathBuf),
    #[error("cannot record KSM's previous settings in {path}")]
    Note { path: PathBuf, source: io::Error },
    #[error("cannot parse {path}: unexpected text '{text}'")]
    Format { path: PathBuf, text: String },
}

impl KsmError {
    /// Makes the error of a file that cannot be read.
    pub(crate) fn read(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        |source| Self::Read { path, source }
    }

    /// Makes the error of the file with KSM's previous settings.
    pub(crate) fn note(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        |source| Self::Note { path, source }
    }
}

//! Why KSM could not be read or set.

use std::io;
use std::path::PathBuf;

/// Why KSM could not be read or set.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum KsmError {
    #[error("this kernel has no KSM: {0} is missing (CONFIG_KSM)")]
    Missing(PathBuf),
    /// A process keeps its memory map locked; 0: it is not known which.
    #[error(
        "what may merge can't be found out: process {0} keeps its memory map locked and waits for something in the kernel (see 'ps -o pid,stat,wchan:30,args -p {0}')"
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
        "another memfold uses KSM (it holds {0}); wait until it is done, or end it: 'memfold ksm stop' where a daemon steers"
    )]
    Busy(PathBuf),
    #[error("cannot keep the old settings in {path}")]
    Note { path: PathBuf, source: io::Error },
    #[error("{path}: unexpected text '{text}'")]
    Format { path: PathBuf, text: String },
}

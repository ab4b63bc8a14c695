//! The software that the guests of study C compile.

use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug)]
pub(super) struct Work {
    pub what: &'static str,
    /// Shell script that compiles the software in a fresh `/var/tmp/work`.
    pub build: &'static str,
    /// Shell script that prints the hash of the compiled program.
    pub output: &'static str,
    /// Disk that the build needs, read-only; `None`: it needs none.
    pub disk: Option<PathBuf>,
    pub timeout: Duration,
}

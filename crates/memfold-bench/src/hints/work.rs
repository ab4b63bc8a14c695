//! The software that the guests of study C compile.

use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug)]
pub(super) struct Work {
    pub what: &'static str,
    /// Compiles in a fresh `/var/tmp/work`.
    pub build: &'static str,
    /// Prints the hash of what was built.
    pub output: &'static str,
    /// A disk that the build needs, read-only.
    pub disk: Option<PathBuf>,
    pub timeout: Duration,
}

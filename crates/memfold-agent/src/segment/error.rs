//! Errors of segment operations. Each error names the failed condition and the action that would
//! change it.

use std::io;

use super::json::escaped;

/// Reason why a segment operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed, with the path.
        what: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// A condition for the operation does not hold.
    #[error("{why} (hint: {hint})")]
    Refused {
        /// The failed condition, with the path.
        why: String,
        /// The action that would change the condition.
        hint: String,
    },
    /// The command line is wrong.
    #[error("{0}")]
    Usage(String),
}

/// Result of segment operations.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Creates a refusal from the failed condition and the action that would change it.
    pub fn refused(why: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Refused {
            why: why.into(),
            hint: hint.into(),
        }
    }

    /// Returns the exit code of the program for this error.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Io { .. } | Self::Refused { .. } => 1,
        }
    }
}

/// Adds the name of the operation to errors of system calls.
pub trait During<T> {
    /// Wraps an error with the operation `what`.
    fn during(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> During<T> for std::result::Result<T, E> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::Io {
            what: what(),
            source: e.into(),
        })
    }
}

/// Formats a path for messages: UTF-8 unchanged, other bytes as `\xNN`.
pub fn shown(path: &[u8]) -> String {
    escaped(path)
}

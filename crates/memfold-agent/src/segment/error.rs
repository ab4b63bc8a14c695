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
        /// The operation that failed, with its path, as text.
        what: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// The operation was refused, because a condition for it does not hold.
    #[error("{why} (hint: {hint})")]
    Refused {
        /// The failed condition, with the path, as text.
        why: String,
        /// The action that would change the condition, as text.
        hint: String,
    },
    /// The agent's command line is wrong.
    #[error("{0}")]
    Usage(String),
}

/// Result of an operation on segments.
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

/// Adds a text that names the operation to the error of a system call.
pub trait During<T> {
    /// Converts an error of a system call into [`Error::Io`] with the text `what`.
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

//! What can go wrong, in words that name the condition and what would change it.

use std::io;

use super::json::escaped;

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, with the path.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A condition does not hold.
    #[error("{why} (hint: {hint})")]
    Refused {
        /// The condition, with the path.
        why: String,
        /// What would change it.
        hint: String,
    },
    /// The command line is wrong.
    #[error("{0}")]
    Usage(String),
}

/// Of this module's functions.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A refusal.
    pub fn refused(why: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Refused {
            why: why.into(),
            hint: hint.into(),
        }
    }

    /// The program's exit code.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Io { .. } | Self::Refused { .. } => 1,
        }
    }
}

/// Says what was being done when a system call failed.
pub trait During<T> {
    /// Wraps the error.
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

/// A path for messages: UTF-8 as it is, other bytes as `\xNN`.
pub fn shown(path: &[u8]) -> String {
    escaped(path)
}

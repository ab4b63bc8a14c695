//! Why a description of a VM is refused.

use std::path::PathBuf;

/// Why a description of a VM is refused.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The file could not be read.
    #[error("cannot read {path}")]
    Read {
        /// The description's path.
        path: PathBuf,
        /// From the kernel.
        #[source]
        source: std::io::Error,
    },
    /// The file is no description of a VM.
    #[error("{path} is no VM description")]
    Parse {
        /// The description's path.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// A name that can't be used.
    #[error(
        "{field} '{value}' must be 1 to 64 characters of a-z, 0-9, '.', '_' and '-', and begin with a letter or digit"
    )]
    Name {
        /// Which field.
        field: &'static str,
        /// What it says.
        value: String,
    },
    /// A value out of its range, or two that contradict each other.
    #[error("{field}: {why}")]
    Value {
        /// Which field.
        field: &'static str,
        /// What is wrong and what would be right.
        why: String,
    },
    /// A file that the VM needs can't be used.
    #[error("{field}: cannot use {path}")]
    File {
        /// Which field.
        field: &'static str,
        /// The path.
        path: PathBuf,
        /// From the kernel.
        #[source]
        source: std::io::Error,
    },
}

pub(crate) fn value(field: &'static str, why: String) -> SpecError {
    SpecError::Value { field, why }
}

//! Errors of reading or validating a VM description.

use std::path::PathBuf;

/// Why a VM description cannot be read, or which of its fields is not valid.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum SpecError {
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{path} is not a VM description")]
    Parse {
        path: PathBuf,
        #[source]
        source: Box<toml::de::Error>,
    },
    #[error(
        "{field} '{value}' must be 1 to 64 characters of a-z, 0-9, '.', '_' and '-', and begin with a letter or digit"
    )]
    Name { field: &'static str, value: String },
    #[error("{field}: {why}")]
    Value { field: &'static str, why: String },
    #[error("{field}: cannot open or read {path}")]
    File {
        field: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

pub(crate) fn value(field: &'static str, why: impl Into<String>) -> SpecError {
    let why = why.into();
    SpecError::Value { field, why }
}

/// Refuses a field's value unless the condition is met.
pub(crate) fn require(
    condition: bool,
    field: &'static str,
    why: impl Into<String>,
) -> Result<(), SpecError> {
    condition.then_some(()).ok_or_else(|| value(field, why))
}

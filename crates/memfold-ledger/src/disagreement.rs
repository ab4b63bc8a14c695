//! The record of two sums of memory that should be equal and are not.

use std::fmt;

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

/// Two sums of memory that should be equal and are not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Disagreement {
    /// Name of the VM whose sums differ; `None`: sums of the host.
    pub vm: Option<String>,
    /// Description of the compared sums.
    pub what: String,
    /// Sum according to the ledger.
    pub ledger_bytes: ByteSize,
    /// Sum according to the kernel.
    pub kernel_bytes: ByteSize,
    /// The difference in percent of the kernel's sum.
    pub off_percent: f64,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {}: ledger {}, kernel {} ({:+.1} %)",
            self.vm.as_deref().unwrap_or("host"),
            self.what,
            self.ledger_bytes,
            self.kernel_bytes,
            self.off_percent
        )
    }
}

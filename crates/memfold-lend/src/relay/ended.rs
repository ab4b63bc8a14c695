//! Reason of a relay's end, which the relay records for the daemon.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Reason why a relay disconnected its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// A lender returned wrong data, or violated the protocol.
    Lied,
    /// A lender refused a request.
    Failed,
    /// A lender did not answer within the time limit.
    Silent,
    /// A lender closed its connection.
    Gone,
}

/// Record of a relay's end, in a file beside the relay's socket with the extension `.end`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Number of the lender at fault; `None` if no single lender is.
    pub lender: Option<usize>,
    /// Kind of the lender's failure.
    pub why: Why,
    /// Description of the failure for the log.
    pub what: String,
}

impl Ended {
    pub(super) const fn of(lender: usize, why: Why, what: String) -> Self {
        Self {
            lender: Some(lender),
            why,
            what,
        }
    }

    pub(super) const fn of_all(why: Why, what: String) -> Self {
        Self {
            lender: None,
            why,
            what,
        }
    }

    /// Returns the path of the record of the relay whose client socket is `socket`.
    #[must_use]
    pub fn file(socket: &Path) -> PathBuf {
        socket.with_extension("end")
    }
}

//! What a relay and the daemon tell each other: orders on the relay's standard input, one answer on
//! its standard output, and the record of the relay's end.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::endpoint::Endpoint;

/// Orders for a relay. They are sent on standard input, because they contain keys.
#[derive(Debug, Serialize, Deserialize)]
pub struct Orders {
    /// Path of the Unix socket that the client will connect to.
    pub socket: PathBuf,
    /// Size of the disk that the relay serves, in bytes.
    pub bytes: u64,
    /// Endpoints of the lenders' exports, in stripe order.
    pub lenders: Vec<Endpoint>,
    /// Time limit for a lender's answer, in milliseconds. Up to 4 MiB of earlier requests may be in
    /// progress: for a limit of 3 s, the link needs 11 Mbit/s.
    pub patience_ms: u64,
}

/// The relay's answer on standard output, before its client connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// The relay listens and is connected to all lenders.
    Ready,
    /// The relay has failed and ended.
    Failed {
        /// Number of the lender at fault, if there is one.
        lender: Option<usize>,
        /// Error message for the log of the daemon that started the relay.
        why: String,
    },
}

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
    pub(super) fn of(lender: impl Into<Option<usize>>, why: Why, what: String) -> Self {
        let lender = lender.into();
        Self { lender, why, what }
    }

    /// Returns the path of the record of the relay whose client socket is `socket`.
    #[must_use]
    pub fn file(socket: &Path) -> PathBuf {
        socket.with_extension("end")
    }
}

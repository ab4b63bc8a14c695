//! Messages between the daemon and a relay, the process between QEMU and a lending host: the relay
//! reads its orders from standard input, writes one answer to standard output, and leaves a record
//! when it ends.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::endpoint::Endpoint;

/// What a relay has to do. The daemon writes this to the relay's standard input, because it
/// contains keys.
#[derive(Debug, Serialize, Deserialize)]
pub struct Orders {
    /// Path of the Unix socket on which the relay waits for its client (QEMU).
    pub socket: PathBuf,
    /// Size of the disk that the relay serves, in bytes.
    pub bytes: u64,
    /// Where and with which keys the relay reaches its lenders, in stripe order.
    pub lenders: Vec<Endpoint>,
    /// How long the relay waits for a lender's answer, in milliseconds. Up to 4 MiB of earlier
    /// requests may be in progress: for a limit of 3 s, the link needs 11 Mbit/s.
    pub patience_ms: u64,
}

/// The relay's answer to its orders, on standard output before its client connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// The relay listens and is connected to all lenders.
    Ready,
    /// The relay could not start and has ended.
    Failed {
        /// Number of the lender at fault, in stripe order; `None` if no lender is.
        lender: Option<usize>,
        /// Why the relay could not start, as text for the log of the daemon.
        why: String,
    },
}

/// What a lender did wrong, so that the relay disconnected its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// The lender returned wrong data, or violated the protocol.
    Lied,
    /// The lender refused a request, or the relay itself failed.
    Failed,
    /// The lender did not answer within the time limit.
    Silent,
    /// The connection to the lender ended.
    Gone,
}

/// Record of how a relay ended, in a file beside the relay's socket with the extension `.end`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Number of the lender at fault, in stripe order; `None` if no single lender is.
    pub lender: Option<usize>,
    /// What the lender did wrong.
    pub why: Why,
    /// What happened, as text for the log.
    pub what: String,
}

impl Ended {
    pub(super) fn of(lender: impl Into<Option<usize>>, why: Why, what: String) -> Self {
        let lender = lender.into();
        Self { lender, why, what }
    }

    /// Returns the path of the record of a relay's end. `socket`: path of the socket for the
    /// relay's client.
    #[must_use]
    pub fn file(socket: &Path) -> PathBuf {
        socket.with_extension("end")
    }
}

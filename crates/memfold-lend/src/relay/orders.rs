//! Messages between a relay and its starter: orders on the relay's standard input, and one answer
//! on its standard output.

use std::path::PathBuf;

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

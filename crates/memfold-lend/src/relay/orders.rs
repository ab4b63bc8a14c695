//! Messages between a relay and its starter: orders on standard input, one answer on standard
//! output.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::endpoint::Endpoint;

/// Orders for a relay. They come over its standard input, because they contain keys.
#[derive(Debug, Serialize, Deserialize)]
pub struct Orders {
    /// Path of the Unix socket to listen on.
    pub socket: PathBuf,
    /// Size of the disk, in bytes.
    pub bytes: u64,
    /// Endpoints of the exports, in the order of the stripes.
    pub lenders: Vec<Endpoint>,
    /// Time limit for a lender's answer, in milliseconds. Up to 4 MiB of earlier requests may be in
    /// progress: with 3 s, a link needs 11 Mbit/s.
    pub patience_ms: u64,
}

/// The relay's answer on its standard output, before its client connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// The relay listens, and is connected to all lenders.
    Ready,
    /// The relay has ended.
    Failed {
        /// Number of the lender at fault, if there is one.
        lender: Option<usize>,
        /// Message for the log of the daemon that started the relay.
        why: String,
    },
}

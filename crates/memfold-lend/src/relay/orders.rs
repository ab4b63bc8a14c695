//! Messages between a relay and its starter: orders on standard input, one answer on standard
//! output.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::endpoint::Endpoint;

/// What a relay is to do; it comes over its standard input, since it holds keys.
#[derive(Debug, Serialize, Deserialize)]
pub struct Orders {
    /// Where it is to listen.
    pub socket: PathBuf,
    /// Bytes of the disk.
    pub bytes: u64,
    /// Exports, in the order of their stripes.
    pub lenders: Vec<Endpoint>,
    /// How long a lender may take for an answer, in milliseconds. 4 MiB may be asked before it:
    /// with 3 s a link needs 11 Mbit/s.
    pub patience_ms: u64,
}

/// What a relay says on its standard output before its client comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// It listens, and is connected to all lenders.
    Ready,
    /// It has ended.
    Failed {
        /// Which lender is at fault, if one is.
        lender: Option<usize>,
        /// In words.
        why: String,
    },
}

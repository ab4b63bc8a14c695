//! The reason for a relay's end, recorded for the daemon.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Why a relay left its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// A lender served other bytes than were written, or talked nonsense.
    Lied,
    /// A lender refused a request.
    Failed,
    /// A lender did not answer.
    Silent,
    /// A lender ended its connection.
    Gone,
}

/// How it ended, for the daemon: beside its socket, with the ending `.end`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Which lender was at fault; `None`: none alone.
    pub lender: Option<usize>,
    /// What it did.
    pub why: Why,
    /// In words.
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

    /// Where a relay that listens there says how it ended.
    #[must_use]
    pub fn file(socket: &Path) -> PathBuf {
        socket.with_extension("end")
    }
}

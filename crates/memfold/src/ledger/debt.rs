//! Copy-on-write debt: what the host would have to give if guests rewrote everything that they share now.
//!
//! ```text
//!   folded     mapped to a page store, not written since      a copy each; the store's own page comes back seconds later
//!   snapshots  views of the image a VM runs from, not written  a copy each; the image stays, for whoever comes next
//!   zero       pages of zeroes that were given back            a page each
//!   KSM        pages_sharing, and the zero pages it mapped     a copy each; the last one's place comes back at once
//! ```
//! Each guest page is in one of these at most: what a VM has written is a private copy, and only such pages does KSM merge. Segments are
//! no debt, because guests can't write to them. RAM that a guest has not touched yet is none either: that is promised, not shared.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::brake::Level;

/// What one VM could call in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmDebt {
    /// The VM.
    pub name: String,
    /// Mapped to a page store and not written since.
    pub folded_bytes: u64,
    /// Views of the image that it runs from, where that holds something, and not written since.
    pub snapshot_bytes: u64,
    /// Given back because it held only zeroes, and not written since.
    pub zero_bytes: u64,
}

impl VmDebt {
    /// All of it.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        self.folded_bytes + self.snapshot_bytes + self.zero_bytes
    }
}

/// Something that the brake did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BrakeEvent {
    /// When, seconds since 1970.
    pub at_unix_s: f64,
    /// The level then.
    pub level: Level,
    /// `MemAvailable` then.
    pub mem_available_bytes: u64,
    /// The debt then.
    pub debt_bytes: u64,
    /// In words.
    pub what: String,
}

/// The debt of a host, and what there is for it: `GET /v1/debt`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DebtReport {
    /// How far it has come.
    pub level: Level,
    /// Whether folding and KSM make no more debt: since the level was `braked`, until it is `ok`.
    pub sharing_held: bool,
    /// Why, in words.
    pub why: String,
    /// All that guests could call in: the sum of the five that follow.
    pub debt_bytes: u64,
    /// Mapped to page stores.
    pub folded_bytes: u64,
    /// Views of snapshots' images.
    pub snapshot_bytes: u64,
    /// Zero pages given back.
    pub zero_bytes: u64,
    /// Merged by KSM, whosever it is.
    pub ksm_bytes: u64,
    /// Images of VMs that are just being started, which no look has found yet.
    pub starting_bytes: u64,
    /// Memory of page stores, which comes back once everything folded has been written.
    pub store_bytes: u64,
    /// How much of the debt must be there for guests that call it in at once, percent.
    pub cover_percent: f64,
    /// So many bytes of it.
    pub needed_bytes: u64,
    /// `MemAvailable`.
    pub mem_available_bytes: u64,
    /// What the host keeps for itself.
    pub reserve_bytes: u64,
    /// What could be had: `MemAvailable` less the reserve.
    pub absorbable_bytes: u64,
    /// `SwapFree`; in no other figure.
    pub swap_free_bytes: u64,
    /// Store pages given back while the brake was on or near, since the daemon began.
    pub given_back_bytes: u64,
    /// VM by VM, without KSM's part.
    pub vms: Vec<VmDebt>,
    /// What the brake did last, oldest first.
    pub events: Vec<BrakeEvent>,
}

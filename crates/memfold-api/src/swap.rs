//! Status of a VM's swap disk.

use memfold_lend::Durability;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A VM's swap disk. What lies on it is no part of guest RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmSwap {
    /// Bytes of the disk.
    pub bytes: u64,
    /// Where it is.
    pub place: SwapPlace,
    /// What keeps the bytes if a lender dies; null: nothing is lent.
    pub durability: Option<Durability>,
    /// What lies on lent memory, by lender: first all of one copy, then those of the next.
    pub lent: Vec<LentPart>,
}

/// What one lender holds of a VM's swap disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LentPart {
    /// Who lends.
    pub lender: String,
    /// So much of the disk; rounded up, if it is laid out over several lenders.
    pub bytes: u64,
    /// Which copy this is a part of: 0, or 1 where there are two.
    pub copy: usize,
}

/// Where a VM's swap disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SwapPlace {
    /// On lent RAM.
    Lent,
    /// On lent RAM, with fewer copies than were asked for.
    Degraded,
    /// On this host's disk, though lent RAM was asked for: its lender has died or wanted it back.
    OnCopy,
    /// On this host's disk.
    OnDisk,
    /// Lost with its lender.
    Lost,
}

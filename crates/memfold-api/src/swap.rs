//! Status of a VM's swap disk.

use memfold_lend::Durability;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Status of a VM's swap disk. Its contents do not count as guest RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmSwap {
    /// Size of the disk, in bytes.
    pub bytes: u64,
    /// Location of the disk's data.
    pub place: SwapPlace,
    /// Protection of the data if a lender dies; null: nothing is lent.
    pub durability: Option<Durability>,
    /// Parts of the disk on lent memory, one for each lender: all parts of the first copy, then
    /// those of the second.
    pub lent: Vec<LentPart>,
}

/// Part of a VM's swap disk that one lender holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LentPart {
    /// Name of the lending host.
    pub lender: String,
    /// Bytes of the disk that this lender holds; rounded up if the disk is striped over several
    /// lenders.
    pub bytes: u64,
    /// Number of the copy that this part belongs to: 0 or 1.
    pub copy: usize,
}

/// Location of a VM's swap disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SwapPlace {
    /// The data is on lent RAM.
    Lent,
    /// The data is on lent RAM, with fewer copies than requested.
    Degraded,
    /// The data is on this host's disk although lent RAM was requested, because the lender died or
    /// recalled its RAM.
    OnCopy,
    /// The data is on this host's disk.
    OnDisk,
    /// The data is lost with its lender.
    Lost,
}

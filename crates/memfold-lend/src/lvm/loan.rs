//! The daemon's record of a logical volume on lent RAM.

use serde::{Deserialize, Serialize};

use super::session::Target;
use super::volume::Volume;
use crate::lease::{Durability, LeaseId};

/// Record of a logical volume that is on lent RAM, or is being moved there or back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loan {
    /// Name of the logical volume that is on loan.
    pub volume: Volume,
    /// Size of the logical volume, in bytes.
    pub bytes: u64,
    /// Place where the bytes survive if the lender dies.
    pub durability: Durability,
    /// Number of the lease in the registry.
    pub lease: LeaseId,
    /// Host name of the lender.
    pub lender: String,
    /// Target that the initiator is logged in to; `None` before the login.
    pub target: Option<Target>,
    /// UUID of the lent disk as a physical volume.
    pub uuid: String,
    /// Progress of the loan.
    pub phase: Phase,
}

/// Progress of a loan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The volume is being put on lent RAM. A daemon that finds this record undoes it.
    Beginning,
    /// The volume is on lent RAM.
    Lent,
    /// The volume is being moved off lent RAM. A daemon that finds this record continues.
    Ending,
}

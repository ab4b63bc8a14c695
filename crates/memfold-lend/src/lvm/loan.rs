//! The daemon's record of a logical volume on lent RAM.

use serde::{Deserialize, Serialize};

use super::session::Target;
use super::volume::Volume;
use crate::lease::{Durability, LeaseId};

/// Record of a logical volume that is on lent RAM, or is being moved there or back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loan {
    /// Which.
    pub volume: Volume,
    /// Its bytes.
    pub bytes: u64,
    /// What keeps them if the lender dies.
    pub durability: Durability,
    /// The lease.
    pub lease: LeaseId,
    /// Who lends.
    pub lender: String,
    /// Where the initiator is logged in; unset: nowhere yet.
    pub target: Option<Target>,
    /// UUID of the lent disk as a physical volume.
    pub uuid: String,
    /// How far it is.
    pub phase: Phase,
}

/// How far a loan is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// It is put on lent RAM; who finds this undoes it.
    Beginning,
    /// It is there.
    Lent,
    /// It is taken off; who finds this goes on.
    Ending,
}

//! Records of a VM's swap disk on lent RAM: its copies, their lenders and leases, and the copy on
//! the borrower's disk.

use std::path::PathBuf;

use memfold_vm::swap;
use serde::{Deserialize, Serialize};

use super::endpoint::Address;
use super::lease::{Durability, LeaseId};
use super::relay::start::Running;

/// One lender's share of a [`Part`]: the lease, the lender, and the address of the lender's export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stripe {
    /// Number of the lease in the registry.
    pub lease: LeaseId,
    /// Host name of the lender.
    pub lender: String,
    /// Address of the lender's export.
    pub address: Address,
}

/// One copy of a swap disk on lent RAM, on one lender or striped over several lenders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Share of the first lender (the only share of a copy on one lender).
    #[serde(flatten)]
    pub first: Stripe,
    /// Shares of the other lenders, in stripe order; empty for a copy on one lender.
    #[serde(default)]
    pub others: Vec<Stripe>,
    /// The relay process between QEMU and the lenders. `None` only in records of old daemons, which
    /// connected QEMU directly to the one lender.
    #[serde(default)]
    pub relay: Option<Running>,
    /// Whether this copy is lost: QEMU no longer has its block node.
    pub lost: bool,
}

impl Part {
    /// Returns the shares of all lenders, in stripe order.
    pub fn stripes(&self) -> impl Iterator<Item = &Stripe> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// Returns the host names of the lenders, separated by ", ".
    #[must_use]
    pub fn lenders(&self) -> String {
        let names: Vec<&str> = self.stripes().map(|stripe| &*stripe.lender).collect();
        names.join(", ")
    }

    /// Returns the address that QEMU's NBD client is connected to: the relay's socket, or the
    /// lender's export if there is no relay.
    #[must_use]
    pub fn reached_at(&self) -> Address {
        match &self.relay {
            Some(relay) => Address::Unix(relay.socket.clone()),
            None => self.first.address.clone(),
        }
    }
}

/// Progress of the switch of a swap disk to lent RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The guest's device still uses the old block nodes, or the daemon does not know whether it
    /// has switched.
    Switching,
    /// The guest's device uses the block nodes of this record.
    Lent,
}

/// Record of a swap disk that is on lent RAM or is being moved there. The daemon writes the record
/// to the VM's directory before it starts the move, so that the next daemon can finish or undo the
/// move. The record contains no key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Borrowing {
    /// Generation number of the disk's block nodes; part of their names.
    pub generation: u64,
    /// Place where the disk's bytes survive if a lender dies.
    pub durability: Durability,
    /// Size of the disk, in bytes.
    pub bytes: u64,
    /// Copies on lent RAM: one, or two for durability `replica`.
    pub parts: Vec<Part>,
    /// File of the copy on the borrower's disk, if there is one.
    pub copy: Option<PathBuf>,
    /// Whether a request to the file `copy` has failed. The daemon then no longer trusts the file
    /// as a copy.
    pub copy_failed: bool,
    /// Whether nobody watched for failures of the file `copy` for some time, so that one may be
    /// unknown.
    pub copy_unwatched: bool,
    /// Progress of the switch to lent RAM.
    pub phase: Phase,
    /// Whether the daemon borrowed without an operator's request (`serve --borrow auto`). Such a
    /// daemon also returns the RAM without a request.
    #[serde(default)]
    pub by_itself: bool,
}

/// The topmost block node of the guest's swap device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Top {
    /// Name of the block node.
    pub node: String,
    /// Generation number in the block node's name.
    pub generation: u64,
    /// Size of the disk, in bytes.
    pub bytes: u64,
    /// The file on the host's disk under the block node, if there is one.
    pub file: Option<PathBuf>,
}

impl Borrowing {
    /// Returns the name of the block node that the guest's device uses after the switch.
    #[must_use]
    pub fn top(&self) -> String {
        match self.durability {
            Durability::None => self.lent(0),
            Durability::Disk | Durability::Replica => swap::node(self.generation),
        }
    }

    /// Returns the name of the block node of part number `part`.
    #[must_use]
    pub fn lent(&self, part: usize) -> String {
        lent_node(self.generation, part)
    }

    /// Returns the leases of all parts.
    pub fn leases(&self) -> impl Iterator<Item = LeaseId> {
        let stripes = self.parts.iter().flat_map(Part::stripes);
        stripes.map(|stripe| stripe.lease)
    }

    /// Returns the parts that are not lost, with their numbers.
    pub fn reached(&self) -> impl Iterator<Item = (usize, &Part)> {
        self.parts.iter().enumerate().filter(|(_, part)| !part.lost)
    }

    /// Returns whether a single lender holds the only copy, although the durability asks for two.
    #[must_use]
    pub fn hangs_on_one(&self) -> bool {
        self.durability != Durability::None && self.reached().count() == 1 && !self.has_copy()
    }

    /// Returns the durability that the disk has now: `none` if a single lender holds the only copy.
    #[must_use]
    pub fn durability_now(&self) -> Durability {
        if self.hangs_on_one() {
            Durability::None
        } else {
            self.durability
        }
    }

    /// Returns whether the file on the borrower's disk holds every byte: it exists, and no request
    /// to it has failed.
    #[must_use]
    pub const fn has_copy(&self) -> bool {
        self.copy.is_some() && !self.copy_failed
    }

    /// Returns whether part number `part` is the only copy of the disk.
    #[must_use]
    pub fn is_alone(&self, part: usize) -> bool {
        !self.has_copy() && self.reached().all(|(other, _)| other == part)
    }
}

pub(super) fn lent_node(generation: u64, part: usize) -> String {
    format!("swap-lent{generation}-{part}")
}

//! Records of a VM's swap disk on lent RAM: its parts, their lenders and leases, and its copy.

use std::path::PathBuf;

use memfold_vm::swap;
use serde::{Deserialize, Serialize};

use super::endpoint::Address;
use super::lease::{Durability, LeaseId};
use super::relay::start::Running;

/// One lender's share of a [`Part`]: the lease, the lender, and the address of its export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stripe {
    /// Number of the lease in the registry.
    pub lease: LeaseId,
    /// Host name of the lender.
    pub lender: String,
    /// Address of the lender's export.
    pub address: Address,
}

/// One copy of a swap disk on lent RAM. The copy is on one lender, or striped over several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Share of the first lender.
    #[serde(flatten)]
    pub first: Stripe,
    /// Shares of the other lenders, in stripe order; empty for a copy on one lender.
    #[serde(default)]
    pub others: Vec<Stripe>,
    /// The relay process between QEMU and the lenders. `None` only in records of old daemons, which
    /// connected QEMU directly to the one lender.
    #[serde(default)]
    pub relay: Option<Running>,
    /// Whether QEMU no longer has the block node of this part.
    pub lost: bool,
}

impl Part {
    /// All shares, in the order of the stripes.
    pub fn stripes(&self) -> impl Iterator<Item = &Stripe> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// Host names of the lenders, separated by ", ".
    #[must_use]
    pub fn lenders(&self) -> String {
        let names: Vec<&str> = self.stripes().map(|stripe| &*stripe.lender).collect();
        names.join(", ")
    }

    /// The address that QEMU's NBD client is connected to: the relay's socket, or the lender itself
    /// if there is no relay.
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
    /// The guest's device still uses the old nodes, as far as is known.
    Switching,
    /// The guest's device uses the nodes of this record.
    Lent,
}

/// Record of a swap disk that is on lent RAM or is being moved there. It is written to the VM's
/// directory before anything is done, so that the next daemon can finish or undo the move. It
/// contains no key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Borrowing {
    /// Generation number of these block nodes; part of their names.
    pub generation: u64,
    /// Where the bytes survive if a lender dies.
    pub durability: Durability,
    /// Size of the disk, in bytes.
    pub bytes: u64,
    /// Copies on lent RAM: one, or two for durability `replica`.
    pub parts: Vec<Part>,
    /// File of the copy on the borrower's disk, if there is one.
    pub copy: Option<PathBuf>,
    /// Whether a request to that file has failed. The file is then no longer trusted as a copy.
    pub copy_failed: bool,
    /// Whether there was a time in which a failure of that file would have gone unnoticed.
    pub copy_unwatched: bool,
    /// Progress of the switch.
    pub phase: Phase,
    /// Whether the daemon borrowed on its own (`serve --borrow auto`). Then it also returns the RAM
    /// on its own.
    #[serde(default)]
    pub by_itself: bool,
}

/// The block node that the guest's swap device uses now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Top {
    /// Name of the node.
    pub node: String,
    /// Generation number in the node's name.
    pub generation: u64,
    /// Size of the disk, in bytes.
    pub bytes: u64,
    /// The file on the host's disk under this node, if there is one.
    pub file: Option<PathBuf>,
}

impl Borrowing {
    /// Name of the node that the guest's device uses once the switch is done.
    #[must_use]
    pub fn top(&self) -> String {
        match self.durability {
            Durability::None => self.lent(0),
            Durability::Disk | Durability::Replica => swap::node(self.generation),
        }
    }

    /// Name of the node of lent part number `part`.
    #[must_use]
    pub fn lent(&self, part: usize) -> String {
        lent_node(self.generation, part)
    }

    /// Leases of all parts.
    pub fn leases(&self) -> impl Iterator<Item = LeaseId> {
        let stripes = self.parts.iter().flat_map(Part::stripes);
        stripes.map(|stripe| stripe.lease)
    }

    /// Parts that are not lost, with their numbers.
    pub fn reached(&self) -> impl Iterator<Item = (usize, &Part)> {
        self.parts.iter().enumerate().filter(|(_, part)| !part.lost)
    }

    /// Whether a single lender holds the only copy, although two copies were asked for.
    #[must_use]
    pub fn hangs_on_one(&self) -> bool {
        self.durability != Durability::None && self.reached().count() == 1 && !self.has_copy()
    }

    /// The durability that holds now: `none` if a single lender holds the only copy.
    #[must_use]
    pub fn durability_now(&self) -> Durability {
        if self.hangs_on_one() {
            Durability::None
        } else {
            self.durability
        }
    }

    /// Whether the file on disk holds every byte, as far as is known.
    #[must_use]
    pub const fn has_copy(&self) -> bool {
        self.copy.is_some() && !self.copy_failed
    }

    /// Whether this part is the only one that still holds the bytes.
    #[must_use]
    pub fn is_alone(&self, part: usize) -> bool {
        !self.has_copy() && self.reached().all(|(other, _)| other == part)
    }
}

pub(super) fn lent_node(generation: u64, part: usize) -> String {
    format!("swap-lent{generation}-{part}")
}

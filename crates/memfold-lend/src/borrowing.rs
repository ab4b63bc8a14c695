//! Records where the data of a VM's swap disk is while other hosts lend RAM for it: the copies in
//! lent RAM with their lenders and leases, and the copy on the borrowing host's disk.

use std::path::PathBuf;

use memfold_vm::swap;
use serde::{Deserialize, Serialize};

use super::endpoint::Address;
use super::lease::{Durability, LeaseId};
use super::relay::start::Running;

/// One lender's share of a copy of a swap disk: the lease, the lender, and the address at which the
/// lender serves the lease's RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stripe {
    /// Number of the share's lease in the registry.
    pub lease: LeaseId,
    /// Host name of the share's lender.
    pub lender: String,
    /// Address at which the lender serves the lease's RAM.
    pub address: Address,
}

/// One copy of a VM's swap disk on lent RAM, on one lender or striped over several lenders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The copy's share at its first lender. A copy on one lender has only this share.
    #[serde(flatten)]
    pub first: Stripe,
    /// The copy's shares at its other lenders, in stripe order; empty for a copy on one lender.
    #[serde(default)]
    pub others: Vec<Stripe>,
    /// The relay process that connects QEMU with the copy's lenders. `None` only in records of old
    /// daemons, which connected QEMU directly to the one lender.
    #[serde(default)]
    pub relay: Option<Running>,
    /// Whether this copy of the disk is lost: QEMU no longer has its block node.
    pub lost: bool,
}

impl Part {
    /// Returns the copy's shares at all its lenders, in stripe order.
    pub fn stripes(&self) -> impl Iterator<Item = &Stripe> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// Returns the host names of the copy's lenders, separated by ", ".
    #[must_use]
    pub fn lenders(&self) -> String {
        let names: Vec<&str> = self.stripes().map(|stripe| &*stripe.lender).collect();
        names.join(", ")
    }

    /// Returns the address to which QEMU's NBD client connects for this copy: the relay's socket,
    /// or the lender's address if there is no relay.
    #[must_use]
    pub fn reached_at(&self) -> Address {
        match &self.relay {
            Some(relay) => Address::Unix(relay.socket.clone()),
            None => self.first.address.clone(),
        }
    }
}

/// How far the switch of a swap disk to lent RAM has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The guest's swap device still uses the old block nodes, or the daemon does not know whether
    /// the device has switched.
    Switching,
    /// The guest's swap device uses the block nodes on lent RAM.
    Lent,
}

/// Record of a VM's swap disk that is on lent RAM or is being moved there. The daemon writes the
/// record to the VM's directory before it starts the move, so that the next daemon can finish or
/// undo the move. The record contains no key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Borrowing {
    /// Number in the names of the swap disk's block nodes. Each move of the disk takes a new
    /// number.
    pub generation: u64,
    /// Place where the swap disk's bytes survive if a lender dies.
    pub durability: Durability,
    /// Size of the swap disk, in bytes.
    pub bytes: u64,
    /// Copies of the swap disk on lent RAM: one, or two with durability `replica`.
    pub parts: Vec<Part>,
    /// Path of the file with the swap disk's copy on the borrower's disk; `None`: there is no such
    /// copy.
    pub copy: Option<PathBuf>,
    /// Whether a request of QEMU to the file `copy` has failed. The daemon then no longer trusts
    /// the file as a copy of the swap disk.
    pub copy_failed: bool,
    /// Whether the daemon may have missed a failure of the file `copy`, because no daemon watched
    /// the VM for some time.
    pub copy_unwatched: bool,
    /// How far the switch of the swap disk to lent RAM has come.
    pub phase: Phase,
    /// Whether the daemon moved the swap disk without an operator's request
    /// (`serve --borrow auto`). Such a daemon also moves the disk back without a request.
    #[serde(default)]
    pub by_itself: bool,
}

/// The block node that the guest's swap device uses now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Top {
    /// Name of the block node.
    pub node: String,
    /// Number in the block node's name, which grows with each move of the swap disk.
    pub generation: u64,
    /// Size of the swap disk, in bytes.
    pub bytes: u64,
    /// Path of the file on the host's disk that the block node uses; `None`: the node uses no file.
    pub file: Option<PathBuf>,
}

impl Borrowing {
    /// Returns the name of the block node that the guest's swap device uses after the switch to
    /// lent RAM.
    #[must_use]
    pub fn top(&self) -> String {
        match self.durability {
            Durability::None => self.lent(0),
            Durability::Disk | Durability::Replica => swap::node(self.generation),
        }
    }

    /// Returns the name of the NBD block node for the disk's copy number `part` on lent RAM.
    #[must_use]
    pub fn lent(&self, part: usize) -> String {
        lent_node(self.generation, part)
    }

    /// Returns the numbers of all leases that the swap disk uses.
    pub fn leases(&self) -> impl Iterator<Item = LeaseId> {
        let stripes = self.parts.iter().flat_map(Part::stripes);
        stripes.map(|stripe| stripe.lease)
    }

    /// Returns the copies on lent RAM that are not lost, each with its number.
    pub fn reached(&self) -> impl Iterator<Item = (usize, &Part)> {
        self.parts.iter().enumerate().filter(|(_, part)| !part.lost)
    }

    /// Returns whether only one copy of the swap disk is left, on lent RAM, although the durability
    /// asks for two.
    #[must_use]
    pub fn hangs_on_one(&self) -> bool {
        self.durability != Durability::None && self.reached().count() == 1 && !self.has_copy()
    }

    /// Returns the durability that the swap disk has now: `none` if the only copy is on lent RAM.
    #[must_use]
    pub fn durability_now(&self) -> Durability {
        if self.hangs_on_one() {
            Durability::None
        } else {
            self.durability
        }
    }

    /// Returns whether the file on the borrower's disk holds every byte of the swap disk, as far as
    /// the daemon knows: the file exists, and no failed request to it was reported.
    #[must_use]
    pub const fn has_copy(&self) -> bool {
        self.copy.is_some() && !self.copy_failed
    }

    /// Returns whether the file on the borrower's disk is known to hold every byte of the swap
    /// disk. It is not known while a failed write to the file may have been missed: the file may
    /// then hold older bytes.
    #[must_use]
    pub const fn has_whole_copy(&self) -> bool {
        self.has_copy() && !self.copy_unwatched
    }

    /// Returns whether QEMU must not read the file on the borrower's disk any more: the file may
    /// hold older bytes, because a request to it has failed, and lent RAM holds the present ones.
    #[must_use]
    pub fn must_drop_copy(&self) -> bool {
        let is_lent = self.phase == Phase::Lent && self.reached().next().is_some();
        self.copy.is_some() && self.copy_failed && is_lent
    }

    /// Returns whether copy number `part` on lent RAM is the only copy of the swap disk that is
    /// left.
    #[must_use]
    pub fn is_alone(&self, part: usize) -> bool {
        !self.has_copy() && self.reached().all(|(other, _)| other == part)
    }
}

pub(super) fn lent_node(generation: u64, part: usize) -> String {
    format!("swap-lent{generation}-{part}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn borrowing() -> Borrowing {
        let first = Stripe {
            lease: LeaseId(1),
            lender: "a".into(),
            address: Address::Unix("/x".into()),
        };
        Borrowing {
            generation: 1,
            durability: Durability::Disk,
            bytes: 1,
            parts: vec![Part {
                first,
                others: Vec::new(),
                relay: None,
                lost: false,
            }],
            copy: Some("/copy".into()),
            copy_failed: false,
            copy_unwatched: true,
            phase: Phase::Lent,
            by_itself: false,
        }
    }

    #[test]
    fn a_failed_copy_on_disk_is_dropped_only_while_lent_memory_holds_the_data() {
        assert!(!borrowing().must_drop_copy());
        let failed = Borrowing {
            copy_failed: true,
            ..borrowing()
        };
        assert!(failed.must_drop_copy());
        // QEMU may not use the copy yet.
        let mut switching = failed.clone();
        switching.phase = Phase::Switching;
        assert!(!switching.must_drop_copy());
        let mut lost = failed;
        lost.parts[0].lost = true;
        assert!(!lost.must_drop_copy());
    }
}

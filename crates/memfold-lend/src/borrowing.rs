//! What is under a swap disk that is lent.

use std::path::PathBuf;

use memfold_vm::swap;
use serde::{Deserialize, Serialize};

use super::endpoint::Address;
use super::lease::{Durability, LeaseId};
use super::relay::start::Running;

/// What one lender holds of a part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stripe {
    /// Its lease.
    pub lease: LeaseId,
    /// Who lends.
    pub lender: String,
    /// Where it is.
    pub address: Address,
}

/// A copy of a swap disk on lent RAM, of one lender or of several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Of the first lender.
    #[serde(flatten)]
    pub first: Stripe,
    /// Of the others.
    #[serde(default)]
    pub others: Vec<Stripe>,
    /// What is between; `None`: a daemon before relays had QEMU connect to its one lender.
    #[serde(default)]
    pub relay: Option<Running>,
    /// Whether its node is gone.
    pub lost: bool,
}

impl Part {
    /// What it is made of, in the order of the stripes.
    pub fn stripes(&self) -> impl Iterator<Item = &Stripe> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// Names of its lenders.
    #[must_use]
    pub fn lenders(&self) -> String {
        let names: Vec<&str> = self.stripes().map(|stripe| &*stripe.lender).collect();
        names.join(", ")
    }

    /// What QEMU is connected to.
    #[must_use]
    pub fn reached_at(&self) -> Address {
        match &self.relay {
            Some(relay) => Address::Unix(relay.socket.clone()),
            None => self.first.address.clone(),
        }
    }
}

/// How far a switch to lent RAM has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The device uses others, as far as is known.
    Switching,
    /// It uses these.
    Lent,
}

/// What is under a swap disk that is lent, or to be: kept in the VM's directory before anything is
/// done, so that the next daemon can end or undo what this one has begun. Holds no key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Borrowing {
    /// Number of these nodes.
    pub generation: u64,
    /// What keeps the bytes if a lender dies.
    pub durability: Durability,
    /// Bytes of the disk.
    pub bytes: u64,
    /// Copies on lent RAM: one or two.
    pub parts: Vec<Part>,
    /// File of the copy on disk.
    pub copy: Option<PathBuf>,
    /// Whether a request to that file has failed: it may not be a copy any more.
    pub copy_failed: bool,
    /// Whether there was a time when nobody would have heard of that.
    pub copy_unwatched: bool,
    /// How far it has come.
    pub phase: Phase,
    /// Whether the daemon did it by itself (`serve --borrow auto`), and so is to give it back by
    /// itself.
    #[serde(default)]
    pub by_itself: bool,
}

/// What the swap device uses now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Top {
    /// Node.
    pub node: String,
    /// Number of its nodes.
    pub generation: u64,
    /// Bytes of the disk.
    pub bytes: u64,
    /// The file on disk below it, if there is one.
    pub file: Option<PathBuf>,
}

impl Borrowing {
    /// The node that the device is to use.
    #[must_use]
    pub fn top(&self) -> String {
        match self.durability {
            Durability::None => self.lent(0),
            Durability::Disk | Durability::Replica => swap::node(self.generation),
        }
    }

    /// The node of a lent piece.
    #[must_use]
    pub fn lent(&self, part: usize) -> String {
        lent_node(self.generation, part)
    }

    /// All leases.
    pub fn leases(&self) -> impl Iterator<Item = LeaseId> {
        let stripes = self.parts.iter().flat_map(Part::stripes);
        stripes.map(|stripe| stripe.lease)
    }

    /// Parts that can be reached.
    pub fn reached(&self) -> impl Iterator<Item = (usize, &Part)> {
        self.parts.iter().enumerate().filter(|(_, part)| !part.lost)
    }

    /// Whether all there is lies with one lender, though there are to be two copies.
    #[must_use]
    pub fn hangs_on_one(&self) -> bool {
        self.durability != Durability::None && self.reached().count() == 1 && !self.has_copy()
    }

    /// What keeps the bytes now if a lender dies: nothing, if all there is lies with one.
    #[must_use]
    pub fn durability_now(&self) -> Durability {
        if self.hangs_on_one() {
            Durability::None
        } else {
            self.durability
        }
    }

    /// Whether every byte is in the file on disk, as far as is known.
    #[must_use]
    pub const fn has_copy(&self) -> bool {
        self.copy.is_some() && !self.copy_failed
    }

    /// Whether nothing but this part holds the bytes.
    #[must_use]
    pub fn is_alone(&self, part: usize) -> bool {
        !self.has_copy() && self.reached().all(|(other, _)| other == part)
    }
}

pub(super) fn lent_node(generation: u64, part: usize) -> String {
    format!("swap-lent{generation}-{part}")
}

//! An attempt to borrow: its initiator, and the resources to release after a failure.

use memfold_lend::Lease;
use memfold_lend::graph::Borrowing;
use memfold_lend::relay::start::Running;
use memfold_lend::wire::Wire;

/// Initiator of a loan of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    /// An operator's request.
    Operator,
    /// An operator's earlier request, repeated after the lender was lost.
    SavedRequest,
    /// The VM itself, because it swaps (automatic loan).
    Itself,
}

/// Resources of an attempt to borrow. They are released if the attempt fails.
#[derive(Default)]
pub(crate) struct BorrowAttempt {
    pub leases: Vec<Lease>,
    /// Relay processes, each with the names of its lenders.
    pub relays: Vec<(Running, Vec<String>)>,
    pub wires: Vec<Option<Wire>>,
    /// Number of the monitor connection that has received all events about the new block nodes
    /// since their creation.
    pub heard_on: Option<u64>,
    /// The loan that QEMU was told to switch to.
    pub borrowing: Option<Borrowing>,
}

impl BorrowAttempt {
    pub fn cut(&self) {
        self.wires.iter().flatten().for_each(Wire::cut);
    }
}

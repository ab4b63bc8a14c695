//! A try to borrow: who wants it, and what it has begun.

use memfold_lend::Lease;
use memfold_lend::graph::Borrowing;
use memfold_lend::relay::start::Running;
use memfold_lend::wire::Wire;

/// Who wants a VM to borrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    /// A person.
    Operator,
    /// The same, a while ago: it has lost its lender since.
    SavedRequest,
    /// Nobody: it swaps.
    Itself,
}

/// What a borrowing that fails has to undo.
#[derive(Default)]
pub(crate) struct BorrowAttempt {
    pub leases: Vec<Lease>,
    /// With the names of their lenders.
    pub relays: Vec<(Running, Vec<String>)>,
    pub wires: Vec<Option<Wire>>,
    /// The monitor's connection on which failures of its nodes are told from their beginning.
    pub heard_on: Option<u64>,
    /// What QEMU was told to go over to.
    pub borrowing: Option<Borrowing>,
}

impl BorrowAttempt {
    pub fn cut(&self) {
        self.wires.iter().flatten().for_each(Wire::cut);
    }
}

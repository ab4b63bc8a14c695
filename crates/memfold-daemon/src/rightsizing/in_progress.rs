//! Orders of right-sizing that are carried out at this moment.
//!
//! A VM has at most one order at a time, with one exception: a guest that is being trimmed can be
//! given memory. A trim may take 20 s, and a guest that lacks memory meanwhile must not wait.

use std::collections::{BTreeMap, BTreeSet};

use memfold_rightsize::{Action, Order};
use memfold_units::ByteSize;

/// The orders in progress. VMs are named by the machine's number.
#[derive(Debug, Default)]
pub(super) struct InProgress {
    /// VMs whose guests are being trimmed.
    trims: BTreeSet<u32>,
    /// VMs whose balloon or plugged memory is being changed.
    changes: BTreeSet<u32>,
    /// The number of each VM's last order.
    last: BTreeMap<u32, u64>,
}

impl InProgress {
    /// Forgets VMs that have ended.
    pub fn keep(&mut self, is_there: impl Fn(&u32) -> bool) {
        self.last.retain(|vm, _| is_there(vm));
    }

    /// Returns whether a VM of this size can have this order now.
    pub fn admits(&self, vm: u32, order: Order, size: ByteSize) -> bool {
        let is_free = order.is_give(size) || !self.trims.contains(&vm);
        is_free && !self.changes.contains(&vm)
    }

    /// Notes that an order is carried out. `number`: the order's, in the log.
    pub fn begin(&mut self, vm: u32, order: Order, number: u64) {
        self.of_kind(order).insert(vm);
        self.last.insert(vm, number);
    }

    /// Notes that an order is no longer carried out. Returns whether it is the VM's last one, which
    /// is the one that the controller may still wait for.
    pub fn end(&mut self, vm: u32, order: Order, number: u64) -> bool {
        self.of_kind(order).remove(&vm);
        self.last.get(&vm) == Some(&number)
    }

    fn of_kind(&mut self, order: Order) -> &mut BTreeSet<u32> {
        match order.action {
            Action::Trim { .. } => &mut self.trims,
            _ => &mut self.changes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_is_being_trimmed_can_be_given_memory_and_nothing_can_be_taken_from_it() {
        let bytes = ByteSize::mib(256);
        let order = |action| Order { action, bytes };
        let trim = order(Action::Trim {
            bytes,
            may_drop_folded: false,
        });
        let size = ByteSize::mib(1024);
        let balloon = |target| order(Action::Balloon { target });
        let (give, take) = (balloon(ByteSize::mib(1280)), balloon(ByteSize::mib(768)));
        let (plug, unplug) = (
            order(Action::Plug { bytes }),
            order(Action::Unplug { bytes }),
        );
        let admitted = |orders: &InProgress| {
            [trim, give, take, plug, unplug].map(|order| orders.admits(1, order, size))
        };
        let mut orders = InProgress::default();
        assert_eq!(admitted(&orders), [true; 5]);
        orders.begin(1, trim, 7);
        assert_eq!(admitted(&orders), [false, true, false, true, false]);
        assert!(orders.admits(2, take, size));
        orders.begin(1, give, 8);
        assert_eq!(admitted(&orders), [false; 5]);
        // If the trim fails now, the controller still waits for the give.
        assert!(!orders.end(1, trim, 7));
        assert_eq!(admitted(&orders), [false; 5]);
        assert!(orders.end(1, give, 8));
        assert_eq!(admitted(&orders), [true; 5]);
    }
}

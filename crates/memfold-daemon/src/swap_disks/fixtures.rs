//! The loan of one VM, for tests: a registry with a lender and a lease, and the loan of the lease.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use memfold_lend::graph::{Borrowing, Part, Phase, Stripe};
use memfold_lend::{
    Address, Durability, Incarnation, Lease, LenderId, Offer, Registry, SqliteRegistry, Want,
};

/// Makes a registry in `directory`, in which host `a` lends `bytes` to the VM `v` of host `b`, and
/// the loan, with a copy on a disk of host `b`.
pub(super) fn lent(directory: &Path, bytes: u64) -> (Arc<SqliteRegistry>, Lease, Borrowing) {
    let registry = SqliteRegistry::open(&directory.join("registry.db")).unwrap();
    let minute = Duration::from_secs(60);
    let lender = LenderId {
        host: "a".into(),
        incarnation: Incarnation(1),
    };
    registry.offer(&Offer { lender, bytes }, minute).unwrap();
    let want = Want {
        borrower: "b".into(),
        vm: "v".into(),
        bytes,
        disk_bytes: bytes,
        durability: Durability::Disk,
        apart_from: Vec::new(),
    };
    let lease = registry.take(&want, minute).unwrap();
    let borrowing = Borrowing {
        generation: 1,
        durability: Durability::Disk,
        bytes,
        parts: vec![Part {
            first: Stripe {
                lease: lease.id,
                lender: "a".into(),
                address: Address::Unix("/relay".into()),
            },
            others: Vec::new(),
            relay: None,
            lost: false,
        }],
        copy: Some("/copy".into()),
        copy_failed: false,
        copy_unwatched: false,
        phase: Phase::Lent,
        by_itself: false,
    };
    (Arc::new(registry), lease, borrowing)
}

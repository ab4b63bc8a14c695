//! Predicts, for each host that lends RAM, what would happen to the borrowing VMs if this host
//! died. `memfold leases` and the dashboard show the prediction.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::lease::{Durability, Lease, LeaseState, Picture};

/// What happens to the borrowing VMs if one lender dies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blast {
    /// Host name of the lender.
    pub lender: String,
    /// VMs whose swap disks use the lender's RAM.
    pub vms: Vec<HurtVm>,
}

/// What happens to one VM if a certain lender dies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HurtVm {
    /// Name of the host that runs the VM.
    pub host: String,
    /// Name of the VM that borrows from the lender.
    pub vm: String,
    /// Size of the VM's data in this lender's RAM, in bytes.
    pub bytes: u64,
    /// Whether the lender's death would lose data of the guest.
    pub loses_bytes: bool,
    /// What the lender's death would do to the VM, as a text for the operator.
    pub effect: String,
}

/// Predicts, for each lender that has lent RAM, what happens to the borrowing VMs if the lender
/// dies. `without_copy(host, vm)` returns whether the copy on that VM's disk is known to have
/// failed.
#[must_use]
pub fn blast(picture: &Picture, without_copy: &dyn Fn(&str, &str) -> bool) -> Vec<Blast> {
    let mut all: BTreeMap<&str, Vec<HurtVm>> = BTreeMap::new();
    for lease in picture.leases.iter().filter(|lease| is_in_use(lease)) {
        // The other copy of a replica may already be lost.
        let has_other = picture.leases.iter().any(|other| {
            let is_same_vm = other.borrower == lease.borrower && other.vm == lease.vm;
            let is_elsewhere = other.lender.host != lease.lender.host;
            is_same_vm && is_elsewhere && is_in_use(other) && has_lender(picture, other)
        });
        let (loses_bytes, effect) = match (lease.durability, has_other) {
            (Durability::Disk, _) if without_copy(&lease.borrower, &lease.vm) => {
                (true, "loses its swap: the copy on disk has failed")
            }
            (Durability::Disk, _) => (false, "continues on the copy on disk"),
            (Durability::Replica, true) => (false, "continues on the other lender's copy"),
            (Durability::Replica, false) => (
                true,
                "loses its swap: the other copy is gone, or its lender no longer offers memory",
            ),
            (Durability::None, _) => (true, "loses its swap and the programs that used it"),
        };
        let hurt = HurtVm {
            host: lease.borrower.clone(),
            vm: lease.vm.clone(),
            bytes: lease.bytes,
            loses_bytes,
            effect: effect.to_owned(),
        };
        all.entry(&lease.lender.host).or_default().push(hurt);
    }
    let blast = |(lender, vms): (&str, _)| Blast {
        lender: lender.to_owned(),
        vms,
    };
    all.into_iter().map(blast).collect()
}

/// Returns whether a VM may still use the RAM of a lease: the lease has neither been released nor
/// expired. The lender may not have ended such a lease yet.
fn is_in_use(lease: &Lease) -> bool {
    lease.state != LeaseState::Released && lease.left_ms > 0
}

/// Returns whether the lender of a lease still repeats its offer. A lender that has died, or that
/// takes back all its memory, does not.
fn has_lender(picture: &Picture, lease: &Lease) -> bool {
    let mut lenders = picture.lenders.iter();
    lenders.any(|known| known.lender == lease.lender && known.left_ms > 0)
}

#[cfg(test)]
mod tests {
    use super::super::lease::{Incarnation, LeaseId, LenderId, LenderView};
    use super::*;

    fn lender(host: &str, left_ms: u64) -> LenderView {
        LenderView {
            lender: LenderId {
                host: host.into(),
                incarnation: Incarnation(1),
            },
            offered_bytes: 8,
            lent_bytes: 1,
            silent_ms: 0,
            left_ms,
        }
    }

    fn lease(id: u64, lender: &str, vm: &str, durability: Durability) -> Lease {
        Lease {
            id: LeaseId(id),
            lender: LenderId {
                host: lender.into(),
                incarnation: Incarnation(1),
            },
            borrower: "host".into(),
            vm: vm.into(),
            bytes: 1,
            disk_bytes: 0,
            durability,
            state: LeaseState::Exported,
            left_ms: 1,
            recall_ms: None,
        }
    }

    #[test]
    fn the_report_on_losing_a_lender_lists_the_affected_vms_and_which_of_them_lose_data() {
        let picture = Picture {
            lenders: vec![lender("a", 1), lender("b", 1)],
            leases: vec![
                lease(1, "b", "x", Durability::Disk),
                lease(2, "a", "y", Durability::None),
                lease(3, "a", "z", Durability::Replica),
                lease(4, "b", "z", Durability::Replica),
                lease(5, "b", "w", Durability::Replica),
                lease(6, "b", "u", Durability::Disk),
            ],
        };
        let all = blast(&picture, &|host, vm| (host, vm) == ("host", "u"));
        let words: Vec<(String, Vec<(String, bool)>)> = all
            .into_iter()
            .map(|b| {
                (
                    b.lender,
                    b.vms.into_iter().map(|v| (v.vm, v.loses_bytes)).collect(),
                )
            })
            .collect();
        let of = |list: &[(&str, bool)]| list.iter().map(|(v, l)| ((*v).to_owned(), *l)).collect();
        assert_eq!(
            words,
            vec![
                ("a".to_owned(), of(&[("y", true), ("z", false)])),
                (
                    "b".to_owned(),
                    of(&[("x", false), ("z", false), ("w", true), ("u", true)])
                ),
            ]
        );
    }

    #[test]
    fn a_replica_whose_other_lease_has_ended_or_whose_other_lender_is_gone_would_be_lost() {
        // Changes the lease or the lender of the copy at host a.
        type Change = fn(&mut Lease, &mut LenderView);
        let changes: [(Change, bool); 4] = [
            (|_, _| {}, false),
            (|lease, _| lease.state = LeaseState::Released, true),
            (|lease, _| lease.left_ms = 0, true),
            (|_, lender| lender.left_ms = 0, true),
        ];
        for (number, (change, loses_bytes)) in changes.into_iter().enumerate() {
            let (mut other, mut gone) = (lease(1, "a", "x", Durability::Replica), lender("a", 1));
            change(&mut other, &mut gone);
            let picture = Picture {
                lenders: vec![gone, lender("b", 1)],
                leases: vec![other, lease(2, "b", "x", Durability::Replica)],
            };
            let all = blast(&picture, &|_, _| false);
            let of_b = all.iter().find(|one| one.lender == "b").unwrap();
            assert_eq!(of_b.vms[0].loses_bytes, loses_bytes, "{number}");
        }
    }

    #[test]
    fn the_report_on_losing_a_lender_lists_no_vm_whose_lease_was_released_or_has_expired() {
        let (mut released, mut expired) = (
            lease(1, "a", "x", Durability::None),
            lease(2, "a", "y", Durability::None),
        );
        released.state = LeaseState::Released;
        expired.left_ms = 0;
        let picture = Picture {
            lenders: vec![lender("a", 1)],
            leases: vec![released, expired],
        };
        assert!(blast(&picture, &|_, _| false).is_empty());
    }
}

//! State of the RAM that this host has borrowed for one LVM volume, such as its lease and whether
//! the lender answers. The thread that watches the loan and users' requests share this state.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use memfold_api::{Borrowed, SwapPlace};
use memfold_lend::Durability;
use memfold_lend::lvm::{Loan, Phase, Volume};
use parking_lot::Mutex;
use tracing::{error, warn};

use crate::leases::lease_ttl;

/// A loan of memory to one LVM volume. A thread renews the loan's lease and checks the lender.
#[derive(Debug)]
pub(crate) struct Keeper {
    pub volume: Volume,
    pub loan: Mutex<Loan>,
    pub stop: AtomicBool,
    /// Why the loan's lender can no longer be used; `None` while it can.
    pub lost: Mutex<Option<String>>,
    /// Whether the loan's lender has recalled its memory.
    pub is_wanted: AtomicBool,
    /// Whether a request to the volume's mirror image on this host's disk has failed. Only lent RAM
    /// then has all data.
    pub is_alone: AtomicBool,
    /// Time until which the loan's lease holds without renewal, according to the registry's last
    /// answer.
    pub holds: Mutex<Instant>,
}

impl Keeper {
    /// Creates the shared state of a loan. `holds`: time at which the lease ends if it is not
    /// renewed.
    pub fn new(loan: Loan, holds: Instant) -> Arc<Self> {
        Arc::new(Self {
            holds: Mutex::new(holds),
            volume: loan.volume.clone(),
            loan: Mutex::new(loan),
            stop: AtomicBool::new(false),
            lost: Mutex::default(),
            is_wanted: AtomicBool::new(false),
            is_alone: AtomicBool::new(false),
        })
    }

    pub fn loan(&self) -> Loan {
        self.loan.lock().clone()
    }

    pub fn change(&self, change: impl FnOnce(&mut Loan)) -> Loan {
        let mut loan = self.loan.lock();
        change(&mut loan);
        loan.clone()
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub fn lost(&self) -> Option<String> {
        self.lost.lock().clone()
    }

    /// Returns how well the volume's data is protected if the lender dies now.
    pub fn durability_now(&self) -> Durability {
        if self.is_alone.load(Ordering::Acquire) {
            Durability::None
        } else {
            self.loan().durability
        }
    }

    /// Records whether the volume's mirror image on this host's disk lacks writes: it has failed,
    /// or is being rebuilt from the lender's.
    pub fn own_image_lacks_writes(&self, lacks: bool) {
        if lacks && !self.is_alone.swap(true, Ordering::AcqRel) {
            let loan = self.loan();
            error!(
                volume = %loan.volume,
                lender = loan.lender,
                "volume's mirror image on this host lacks writes, and the lender has the only copy; run 'lvconvert --repair' unless a repair is running"
            );
        } else if !lacks {
            self.is_alone.store(false, Ordering::Release);
        }
    }

    /// Returns whether the volume must be taken off lent RAM.
    pub fn has_to_end(&self) -> bool {
        let is_wanted = self.is_wanted.load(Ordering::Acquire);
        is_wanted
            || self.lost().is_some()
            || self.loan().phase != Phase::Lent
            || self.is_running_out()
    }

    /// Returns whether half of the lease's duration has passed without renewal, and the end of the
    /// lease would lose data.
    pub fn is_running_out(&self) -> bool {
        let durability = self.durability_now();
        let left = self.holds.lock().saturating_duration_since(Instant::now());
        durability == Durability::None && left < lease_ttl(durability, self.loan().bytes) / 2
    }

    /// Records why the loan's lender can no longer be used, unless a reason is already recorded.
    pub fn lose(&self, why: String) {
        let mut lost = self.lost.lock();
        if lost.is_some() {
            return;
        }
        let loan = self.loan();
        let (volume, lender) = (loan.volume.to_string(), &loan.lender);
        if self.durability_now() == Durability::None && loan.phase == Phase::Lent {
            error!(
                volume,
                lender,
                why,
                "volume lost: its lender failed, and no other copy exists; stop what uses the volume, then run 'memfold return --lvm'"
            );
        } else {
            warn!(
                volume,
                lender, why, "lender no longer used; volume continues on this host's disk"
            );
        }
        *lost = Some(why);
    }

    pub fn borrowed(&self) -> Borrowed {
        let loan = self.loan();
        let place = match (loan.phase, self.lost().is_some(), self.durability_now()) {
            (Phase::Beginning | Phase::Ending, ..) => SwapPlace::OnDisk,
            (_, false, _) => SwapPlace::Lent,
            (_, true, Durability::None) => SwapPlace::Lost,
            (_, true, _) => SwapPlace::OnCopy,
        };
        Borrowed {
            vm: loan.volume.to_string(),
            place,
            bytes: loan.bytes,
            durability: Some(loan.durability),
            lenders: vec![loan.lender],
            stripes: Some(1),
            waits: None,
            changed: false,
            took_ms: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use memfold_lend::LeaseId;

    #[test]
    fn an_lvm_volume_only_in_lent_memory_moves_to_disk_when_half_of_its_lease_has_passed() {
        let bytes = 200 << 20;
        for (durability, left, has_to_end) in [
            (Durability::None, 41, false),
            (Durability::None, 39, true),
            (Durability::None, 0, true),
            (Durability::Disk, 0, false),
        ] {
            let loan = Loan {
                volume: "vg/swap".parse().unwrap(),
                bytes,
                durability,
                lease: LeaseId(1),
                lender: "a".into(),
                target: None,
                uuid: String::new(),
                phase: Phase::Lent,
            };
            let holds = Instant::now() + Duration::from_secs(left);
            let keeper = Keeper::new(loan, holds);
            assert_eq!(keeper.has_to_end(), has_to_end, "{durability:?} {left}");
            // The lender now has the only copy.
            keeper.own_image_lacks_writes(true);
            assert_eq!(keeper.durability_now(), Durability::None);
            assert_eq!(keeper.has_to_end(), left < 40, "{durability:?} {left}");
            keeper.lose("gone".into());
            assert_eq!(keeper.borrowed().place, SwapPlace::Lost);
            keeper.own_image_lacks_writes(false);
            assert_eq!(keeper.durability_now(), durability);
        }
    }
}

//! Copy-on-write debt: the memory that the host would need if guests rewrote all pages that they
//! share now.
//!
//! ```text
//!   folded     mapped to a page store, not written since      one copy each; the store's own page is freed seconds later
//!   snapshots  views of the image a VM runs from, not written  one copy each; the image stays for further clones
//!   zero       pages of zeroes that were given back            one page each
//!   KSM        pages_sharing, and zero pages that KSM mapped   one copy each; the merged page is freed after the last copy
//! ```
//! The drawing lists the classes of shared guest pages (folded, of a snapshot, zero, merged by
//! KSM), and how much memory a write to such a page costs. A guest page is in at most one class,
//! because KSM merges only private pages, and the others are shared by a mapping. Segments are no
//! debt, because guests cannot write to them. RAM that a guest has never used is no debt either:
//! that RAM is promised, not shared.

use memfold_host::{Check, Status};
use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::brake::Level;

/// Copy-on-write debt of one VM: memory that the VM could claim by writing to shared pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmDebt {
    /// Name of the VM.
    pub name: String,
    /// Bytes of the VM's RAM that are mapped to a page store, and that the guest has not written
    /// since.
    pub folded_bytes: u64,
    /// Bytes of the VM's RAM that are mapped to data of its snapshot's image, and that the guest
    /// has not written since.
    pub snapshot_bytes: u64,
    /// Bytes of the VM's RAM that were given back because they held only zeroes, and that the guest
    /// has not written since.
    pub zero_bytes: u64,
}

impl VmDebt {
    /// Returns the VM's debt in bytes: the sum of its folded, snapshot and zero pages.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        self.folded_bytes + self.snapshot_bytes + self.zero_bytes
    }
}

/// An event of the brake, such as a change of its level.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BrakeEvent {
    /// Time of the event, in seconds since 1970.
    pub at_unix_s: f64,
    /// Level of the brake at the time of the event.
    pub level: Level,
    /// `MemAvailable` at the time of the event, or the memory that a control group's limit left
    /// then, in bytes.
    pub mem_available_bytes: u64,
    /// Copy-on-write debt at the time of the event, in bytes.
    pub debt_bytes: u64,
    /// Text that describes the event.
    pub what: String,
}

/// Copy-on-write debt of a host, and the memory available for it: `GET /v1/debt`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DebtReport {
    /// Level of the brake.
    pub level: Level,
    /// Whether folding and KSM are kept from sharing more memory. True from the time when the
    /// brake's level becomes `braked` until it becomes `ok`.
    pub sharing_held: bool,
    /// Text with the figures that determine the level of the brake.
    pub why: String,
    /// Bytes that guests could claim by writing to shared pages: the sum of `folded_bytes`,
    /// `snapshot_bytes`, `zero_bytes`, `ksm_bytes` and `starting_bytes`.
    pub debt_bytes: u64,
    /// Part of the debt: guest memory that is mapped to page stores, in bytes.
    pub folded_bytes: u64,
    /// Part of the debt: guest memory that is mapped to images of snapshots, in bytes.
    pub snapshot_bytes: u64,
    /// Part of the debt: guests' pages of zeroes that were given back to the host, in bytes.
    pub zero_bytes: u64,
    /// Part of the debt: memory that KSM has merged, in any process, in bytes.
    pub ksm_bytes: u64,
    /// Part of the debt: snapshot images of VMs that are just starting and not yet part of
    /// `snapshot_bytes`, in bytes.
    pub starting_bytes: u64,
    /// Memory of page stores, in bytes. It becomes free after guests have written to all folded
    /// pages.
    pub store_bytes: u64,
    /// Percent of `debt_bytes` for which the host must have memory available.
    pub cover_percent: f64,
    /// Part of `debt_bytes` for which the host must have memory available: `cover_percent` of it.
    pub needed_bytes: u64,
    /// `MemAvailable` in bytes, or the memory that a control group's limit leaves, if all VMs are
    /// in that group and its limit leaves less.
    pub mem_available_bytes: u64,
    /// `MemTotal` in bytes, or the smallest limit of the control groups that all VMs are in, if it
    /// is less.
    #[serde(default)]
    pub mem_total_bytes: u64,
    /// Directory of the control group whose limit determines `mem_available_bytes`; null: the
    /// host's memory determines it.
    #[serde(default)]
    pub limited_by: Option<String>,
    /// Bytes of memory that the host keeps for itself, and that guests must not use up.
    pub reserve_bytes: u64,
    /// Bytes that guests can claim without touching the reserve: `mem_available_bytes` less
    /// `reserve_bytes`, at least 0.
    pub absorbable_bytes: u64,
    /// `SwapFree` of the host, in bytes; not part of any other figure.
    pub swap_free_bytes: u64,
    /// Bytes of page stores that the brake has freed since the daemon's start.
    pub given_back_bytes: u64,
    /// Debt of each VM, without the pages that KSM merged.
    pub vms: Vec<VmDebt>,
    /// Recent events of the brake, oldest first.
    pub events: Vec<BrakeEvent>,
    /// Rung of right-sizing's ladder, on which the brake is the last: `ample`, `trim`, `balloon`,
    /// `lent` or `brake`; null: right-sizing is off.
    #[serde(default)]
    pub rung: Option<String>,
    /// Why the host is on this rung, as a sentence; null: right-sizing is off.
    #[serde(default)]
    pub rung_why: Option<String>,
}

impl DebtReport {
    /// Makes the entry of `memfold doctor` about the debt: the brake's level, the debt compared
    /// with the available memory, and a remedy unless all is well.
    #[must_use]
    pub fn check(&self) -> Check {
        let size = |bytes: u64| ByteSize(bytes).to_string();
        let figures = format!(
            "guests could claim {} by writing, of which {} ({} %) must be available; {} is available beside the reserve of {}",
            size(self.debt_bytes),
            size(self.needed_bytes),
            self.cover_percent,
            size(self.absorbable_bytes),
            size(self.reserve_bytes)
        );
        let (state, fix) = match self.level {
            Level::Ok if self.cover_percent <= 0.0 && self.debt_bytes > self.absorbable_bytes => (
                "the brake is disabled (cover 0 %), and available memory does not cover all guests",
                Some("memfold debt --cover 50"),
            ),
            Level::Ok => ("the brake is off", None),
            Level::Warning if self.sharing_held => (
                "the brake is half on: VMs may be started, folding and KSM share no more memory",
                Some(LESS_DEBT),
            ),
            Level::Warning => ("the brake is near", Some(LESS_DEBT)),
            Level::Braked => (
                "the brake is on: no VM is started, folding and KSM share no more memory",
                Some(LESS_DEBT),
            ),
        };
        Check {
            name: "debt",
            status: if fix.is_some() {
                Status::Warn
            } else {
                Status::Ok
            },
            meaning: format!("{state}; {figures}"),
            fix: fix.map(str::to_owned),
        }
    }
}

/// Remedy that makes the brake leave its level.
const LESS_DEBT: &str = "memfold debt (shows what each VM could claim), then memfold vm stop VM, or free memory on this host; memfold debt --reserve SIZE --cover PERCENT changes the limits";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doctor_reports_the_state_of_the_brake_and_the_fix_if_it_is_near_or_active() {
        let report = |level, sharing_held, cover_percent| DebtReport {
            level,
            sharing_held,
            debt_bytes: 8 << 30,
            needed_bytes: 4 << 30,
            absorbable_bytes: 3 << 30,
            reserve_bytes: 1 << 30,
            cover_percent,
            ..DebtReport::default()
        };
        for (level, held, cover, status, words) in [
            (Level::Ok, false, 50.0, Status::Ok, "the brake is off"),
            (Level::Ok, false, 0.0, Status::Warn, "disabled (cover 0 %)"),
            (Level::Warning, false, 50.0, Status::Warn, "brake is near"),
            (Level::Warning, true, 50.0, Status::Warn, "half on"),
            (Level::Braked, true, 50.0, Status::Warn, "no VM is started"),
        ] {
            let check = report(level, held, cover).check();
            assert_eq!(check.status, status, "{check:?}");
            assert_eq!(check.fix.is_some(), status == Status::Warn, "{check:?}");
            for word in [words, "8.00 GiB", "4.00 GiB", "3.00 GiB", "1.00 GiB"] {
                assert!(check.meaning.contains(word), "no '{word}' in {check:?}");
            }
        }
        // The brake is disabled, but enough memory is available.
        let enough = DebtReport {
            absorbable_bytes: 9 << 30,
            ..report(Level::Ok, false, 0.0)
        };
        assert_eq!(enough.check().status, Status::Ok);
    }
}

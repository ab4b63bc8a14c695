//! Copy-on-write debt: the memory that the host would need if guests rewrote all pages that they
//! share now.
//!
//! ```text
//!   folded     mapped to a page store, not written since      one copy each; the store's own page is freed seconds later
//!   snapshots  views of the image a VM runs from, not written  one copy each; the image stays for further clones
//!   zero       pages of zeroes that were given back            one page each
//!   KSM        pages_sharing, and the zero pages it mapped     one copy each; the last sharer's frees the merged page
//! ```
//! Each guest page is in at most one of these classes: a page that a VM has written is a private
//! copy, and KSM merges only such pages. Segments are no debt, because guests cannot write to them.
//! RAM that a guest has never touched is no debt either: it is promised, not shared.

use memfold_host::{Check, Status};
use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::brake::Level;

/// What one VM could call in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmDebt {
    /// The VM.
    pub name: String,
    /// Mapped to a page store and not written since.
    pub folded_bytes: u64,
    /// Views of the image that it runs from, where that holds something, and not written since.
    pub snapshot_bytes: u64,
    /// Given back because it held only zeroes, and not written since.
    pub zero_bytes: u64,
}

impl VmDebt {
    /// All of it.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        self.folded_bytes + self.snapshot_bytes + self.zero_bytes
    }
}

/// Something that the brake did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BrakeEvent {
    /// When, seconds since 1970.
    pub at_unix_s: f64,
    /// The level then.
    pub level: Level,
    /// `MemAvailable` then, or what a control group left.
    pub mem_available_bytes: u64,
    /// The debt then.
    pub debt_bytes: u64,
    /// In words.
    pub what: String,
}

/// The debt of a host, and what there is for it: `GET /v1/debt`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DebtReport {
    /// How far it has come.
    pub level: Level,
    /// Whether folding and KSM make no more debt: since the level was `braked`, until it is `ok`.
    pub sharing_held: bool,
    /// Why, in words.
    pub why: String,
    /// All that guests could call in: the sum of the five that follow.
    pub debt_bytes: u64,
    /// Mapped to page stores.
    pub folded_bytes: u64,
    /// Views of snapshots' images.
    pub snapshot_bytes: u64,
    /// Zero pages given back.
    pub zero_bytes: u64,
    /// Merged by KSM, whosever it is.
    pub ksm_bytes: u64,
    /// Images of VMs that are just being started, which no look has found yet.
    pub starting_bytes: u64,
    /// Memory of page stores, which comes back once everything folded has been written.
    pub store_bytes: u64,
    /// How much of the debt must be there for guests that call it in at once, percent.
    pub cover_percent: f64,
    /// So many bytes of it.
    pub needed_bytes: u64,
    /// `MemAvailable`, or what the limit of a control group leaves that all VMs are in, if that is
    /// less.
    pub mem_available_bytes: u64,
    /// That control group's directory.
    #[serde(default)]
    pub limited_by: Option<String>,
    /// What the host keeps for itself.
    pub reserve_bytes: u64,
    /// What could be had: what is available less the reserve.
    pub absorbable_bytes: u64,
    /// `SwapFree`; in no other figure.
    pub swap_free_bytes: u64,
    /// Store pages given back while the brake was on or near, since the daemon began.
    pub given_back_bytes: u64,
    /// VM by VM, without KSM's part.
    pub vms: Vec<VmDebt>,
    /// What the brake did last, oldest first.
    pub events: Vec<BrakeEvent>,
}

impl DebtReport {
    /// Doctor's line: what the brake does, the debt against what the host could give, and what
    /// would change it.
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

/// What gets the brake off.
const LESS_DEBT: &str = "memfold debt (shows what each VM could claim), then memfold vm stop VM, or free memory on this host; memfold debt --reserve SIZE --cover PERCENT changes the limits";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doctor_says_what_the_brake_does_and_what_would_change_it() {
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
        // Without a brake, but with enough for everybody.
        let enough = DebtReport {
            absorbable_bytes: 9 << 30,
            ..report(Level::Ok, false, 0.0)
        };
        assert_eq!(enough.check().status, Status::Ok);
    }
}

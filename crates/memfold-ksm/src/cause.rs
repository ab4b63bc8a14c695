//! Reasons why memory is not merged.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A reason why memory is not merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The kernel has no KSM.
    NoKsm,
    /// `run` is 0: ksmd stands still.
    Stopped,
    /// `run` is 2: everything was unmerged.
    Unmerged,
    /// memfold steers KSM and has it stand still for now.
    Held,
    /// KSM runs for another trust domain.
    AnotherDomain,
    /// The VM has no trust domain: it shares with nobody.
    NoDomain,
    /// QEMU was told not to offer its memory (`mem-merge=off`).
    MergeOff,
    /// QEMU offered it, and the kernel refused: a seccomp filter is on the process that isn't
    /// QEMU's own.
    Refused,
    /// The memory is not advised mergeable, for another reason.
    NotAdvised,
    /// Shared memory.
    Shared,
    /// Pages of hugetlbfs.
    Hugetlb,
    /// A shared view of a file: persistent memory, a DAX segment.
    Pmem,
    /// Folded: it lies in memfold's page store.
    Folded,
    /// A private view of another file: the image of a snapshot, a memory backend on a file.
    FileView,
    /// Not in memory: never used, or given back.
    NotPresent,
    /// Swapped out.
    Swapped,
    /// ksmd has not passed twice yet.
    TooYoung,
    /// ksmd has not looked at it yet, though it has passed: new since.
    NotVisited,
    /// Its content was nowhere else.
    Unique,
    /// It changes too fast.
    Volatile,
    /// It lies in transparent huge pages.
    HugePages,
    /// More mappings than `max_page_sharing` have this content.
    MaxPageSharing,
    /// Pages of zeroes are merged as any others (`use_zero_pages` is 0).
    UseZeroPages,
    /// Pages of different NUMA nodes don't merge (`merge_across_nodes` is 0).
    AcrossNodes,
    /// `smart_scan` leaves pages out for a while.
    SmartScan,
}

impl Cause {
    /// Whether these pages don't merge at all until somebody changes something.
    #[must_use]
    pub const fn blocks(self) -> bool {
        matches!(
            self,
            Self::NoKsm
                | Self::Stopped
                | Self::Unmerged
                | Self::Held
                | Self::AnotherDomain
                | Self::NoDomain
                | Self::MergeOff
                | Self::Refused
                | Self::NotAdvised
                | Self::Shared
                | Self::Hugetlb
                | Self::Pmem
        )
    }
}

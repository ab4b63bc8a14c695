//! Reasons why KSM does not merge memory of a VM.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A reason why memory is not merged. The reasons up to [`Cause::Pmem`] block all merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The kernel has no KSM.
    NoKsm,
    /// `run` is 0: ksmd is stopped.
    Stopped,
    /// `run` is 2: ksmd is stopped and everything was unmerged.
    Unmerged,
    /// memfold steers KSM and has paused it.
    Held,
    /// KSM runs for another trust domain.
    AnotherDomain,
    /// The VM has no trust domain, so it shares with no other VM.
    NoDomain,
    /// QEMU was told not to offer its memory (`mem-merge=off`).
    MergeOff,
    /// QEMU offered its memory and the kernel refused: the process has a seccomp filter beside
    /// QEMU's own.
    Refused,
    /// The memory is not advised mergeable, for another reason.
    NotAdvised,
    /// The memory is shared memory, which KSM does not scan.
    Shared,
    /// The pages are of hugetlbfs.
    Hugetlb,
    /// The memory is a shared view of a file: persistent memory, or a DAX segment.
    Pmem,
    /// The pages are folded: they are in memfold's page store.
    Folded,
    /// The memory is a private view of a file: a snapshot's image, or a memory backend on a file.
    FileView,
    /// The pages are not in memory: never used, or given back.
    NotPresent,
    /// The pages are in swap.
    Swapped,
    /// ksmd has not completed two passes since the VM started.
    TooYoung,
    /// The pages are newer than ksmd's last pass over them.
    NotVisited,
    /// No other page has the same content.
    Unique,
    /// The pages change too fast.
    Volatile,
    /// The pages are in transparent huge pages.
    HugePages,
    /// The content has more mappings than `max_page_sharing`.
    MaxPageSharing,
    /// Pages of zeroes are merged like any others (`use_zero_pages` is 0).
    UseZeroPages,
    /// Pages of different NUMA nodes do not merge (`merge_across_nodes` is 0).
    AcrossNodes,
    /// `smart_scan` skips pages for a while.
    SmartScan,
}

impl Cause {
    /// Returns whether the affected pages cannot merge at all until somebody changes something.
    #[must_use]
    pub fn blocks(self) -> bool {
        self <= Self::Pmem
    }
}

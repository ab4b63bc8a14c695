//! The reasons why KSM, the kernel's same-page merging, does not merge pages of a VM's memory.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Reason why KSM does not merge pages of a VM. With the reasons up to [`Cause::Pmem`], the pages
/// cannot merge until somebody changes something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The kernel has no KSM.
    NoKsm,
    /// KSM's setting `run` is 0: ksmd is stopped, and merged pages stay merged.
    Stopped,
    /// KSM's setting `run` is 2: ksmd is stopped, and all pages were unmerged.
    Unmerged,
    /// The daemon steers KSM and has paused KSM for now.
    Held,
    /// memfold runs KSM for another trust domain than the VM's, so the VM was started with
    /// `mem-merge=off`.
    AnotherDomain,
    /// The VM has no trust domain, so it shares with no other VM.
    NoDomain,
    /// QEMU was told not to advise its memory mergeable (`mem-merge=off`).
    MergeOff,
    /// QEMU by default advises its memory mergeable, but the kernel refused, because the process
    /// has a seccomp filter beside QEMU's own.
    Refused,
    /// The memory is not advised mergeable, for a reason that is not known.
    NotAdvised,
    /// The memory is shared memory, which KSM does not scan.
    Shared,
    /// The pages are of hugetlbfs, which KSM does not scan.
    Hugetlb,
    /// The memory is a shared mapping of a file (persistent memory, or a segment), which KSM does
    /// not scan.
    Pmem,
    /// The pages are folded: they map memfold's page store, so they are shared already.
    Folded,
    /// The memory is a private mapping of a file (a snapshot's image, or a memory backend on a
    /// file), which KSM does not scan.
    FileView,
    /// The pages are not in memory: the guest never used them, or gave them back.
    NotPresent,
    /// The pages are in swap, and KSM scans only pages in memory.
    Swapped,
    /// ksmd has not scanned the VM's memory twice yet. A page usually needs two scans to merge.
    TooYoung,
    /// The guest has used the pages only since ksmd's last scan of the VM's memory.
    NotVisited,
    /// ksmd has scanned the pages and has found no other page with the same content.
    Unique,
    /// The pages change faster than ksmd scans.
    Volatile,
    /// The pages are in transparent huge pages, which KSM splits only when a page merges.
    HugePages,
    /// Some contents have more mappings than `max_page_sharing` allows for one page, so each takes
    /// several pages.
    MaxPageSharing,
    /// Pages of zeroes are merged with each other instead of being mapped to the kernel's zero page
    /// (`use_zero_pages` is 0).
    UseZeroPages,
    /// Pages of different NUMA nodes do not merge (`merge_across_nodes` is 0).
    AcrossNodes,
    /// `smart_scan` skips, for a while, pages that did not merge in several passes.
    SmartScan,
}

impl Cause {
    /// Returns whether pages with this cause cannot merge at all until somebody changes something.
    #[must_use]
    pub fn blocks(self) -> bool {
        self <= Self::Pmem
    }
}

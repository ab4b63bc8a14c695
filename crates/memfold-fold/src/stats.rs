//! Figures about folding that reports and studies show: for the fold engine, each VM and each trust
//! domain.

use memfold_store::StoreIdentity;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Histogram of the times from a page's hint to its folding, in steps of 100 ms up to 60 s.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    steps: Vec<u64>,
}

impl Latencies {
    /// Adds `pages` pages to the histogram, which were folded `ms` milliseconds after their hint.
    pub fn count(&mut self, ms: u128, pages: u64) {
        self.steps.resize(600, 0);
        let step = usize::try_from(ms / 100).unwrap_or(usize::MAX).min(599);
        self.steps[step] += pages;
    }

    /// Returns the time in seconds within which `percent` % of the folded pages were folded after
    /// their hint, rounded up to 0.1 s; `None` until a page has been folded.
    #[must_use]
    pub fn percentile_s(&self, percent: u64) -> Option<f64> {
        let total: u64 = self.steps.iter().sum();
        let wanted = (total * percent).div_ceil(100);
        let mut sum = 0;
        if total == 0 {
            return None;
        }
        self.steps
            .iter()
            .position(|&n| {
                sum += n;
                sum >= wanted
            })
            .map(|step| (step + 1) as f64 / 10.0)
    }
}

/// Statistics of folding in one VM. Counters start when the engine adds the VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmStats {
    /// Name of the VM.
    pub name: String,
    /// Trust domain of the VM; `vm/NAME` for a VM without one.
    pub domain: String,
    /// Reason why the VM is not folded; null if the VM may be folded.
    pub problem: Option<String>,
    /// Whether the guest's agent is connected and has reported all pages that were in the guest's
    /// page cache when it connected.
    pub agent_ready: bool,
    /// Number of hints (runs of pages) that the guest's agent has sent.
    pub hint_runs: u64,
    /// Number of pages in all hints that the guest's agent has sent.
    pub hint_pages: u64,
    /// Number of hinted pages that were ignored, because they are outside the VM's RAM or of a file
    /// that the agent never introduced: the agent is faulty or lies.
    pub bogus_pages: u64,
    /// Number of reported pages that were ignored, because the agent reported too many pages per
    /// second or the engine's tables for this VM were full.
    pub over_limit_pages: u64,
    /// Number of hints that the engine dropped because too many hints of this VM waited. The engine
    /// finds their pages later by a search of all tables.
    pub hints_dropped: u64,
    /// Number of page cache events that the guest's kernel overwrote before the agent read them.
    pub events_lost: u64,
    /// CPU time of the guest's agent since its start in microseconds, as the agent reports it.
    pub agent_cpu_us: u64,
    /// Resident set of the guest's agent in bytes, as the agent reports it.
    pub agent_rss_bytes: u64,
    /// Number of guest pages that cache a page of a file now, as the agent reports them.
    pub cached_pages: u64,
    /// Number of runs into which the cached pages fall: the pages of a run are consecutive in guest
    /// memory and in a file. Folding all runs takes about as many mappings.
    pub cached_runs: u64,
    /// Number of cached pages that can probably be shared: another VM of the trust domain caches
    /// the same file page, or the page store holds it.
    pub matched_pages: u64,
    /// Number of cached pages that match a page of another VM or of the page store and that are
    /// shared already: folded and not written since, or mapped from the snapshot's image. As of the
    /// last sync with the kernel's page tables.
    pub matched_folded_pages: u64,
    /// Number of the VM's pages that map the page store, including those that the guest has written
    /// since.
    pub mapped_pages: u64,
    /// Number of the VM's pages that map the page store but that the guest has written since, so
    /// that the VM has private copies of them.
    pub copied_pages: u64,
    /// Number of anonymous pages of the VM that were folded.
    pub folded_pages: u64,
    /// Number of pages that were folded although they mapped the page store or a snapshot's image
    /// already, usually because the guest had written them.
    pub refolded_pages: u64,
    /// Number of pages that were not folded because their bytes differed from the page store's.
    pub differing_pages: u64,
    /// Number of attempts to fold that failed because a page was busy, for example pinned for DMA.
    pub busy_pages: u64,
    /// Number of the VM's pages that memfold discarded because they held only zeroes. The host got
    /// their memory back.
    pub zero_pages: u64,
    /// Number of pages that memfold discarded because they held only zeroes and that the guest has
    /// not written since, as of the last sync with the kernel's page tables.
    pub zero_saved_pages: u64,
    /// Number of the VM's pages that are privately mapped from the files of its snapshot (the RAM
    /// image and disks), written by the guest or not.
    pub template_pages: u64,
    /// Number of the VM's pages that are mapped from the files of its snapshot but that the guest
    /// has written, so that the VM has private copies of them.
    pub template_copied_pages: u64,
    /// Number of the VM's pages that still show data of its snapshot's files: the guest has not
    /// written them, and they are not in a hole of the image.
    #[serde(default)]
    pub template_shared_pages: u64,
    /// Number of the VM's private copies that equalled the snapshot's image again and were dropped
    /// (fold-back).
    pub folded_back_pages: u64,
    /// Number of mappings of the QEMU process when the engine last read `/proc/PID/maps`.
    pub mappings: u64,
    /// Number of times that memfold stopped the VM for a moment to fold pages again or back. This
    /// is needed if pages cannot be write-protected, for example because a disk uses direct I/O.
    pub pauses: u64,
    /// Longest time for which memfold stopped the VM to fold pages, in milliseconds.
    pub pause_max_ms: u64,
    /// Longest time for which a run of the VM's pages was frozen, in nanoseconds. A vCPU that
    /// touches the run waits meanwhile.
    pub freeze_max_ns: u64,
    /// Histogram of the times for which runs of the VM's pages were frozen: bucket i counts runs
    /// frozen for 2^i to 2^(i+1) ns.
    pub freeze_histogram: Vec<u64>,
}

/// Statistics of one trust domain's page store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DomainStats {
    /// Name of the trust domain.
    pub domain: String,
    /// Device number of the page store's file.
    pub store_dev: u64,
    /// Inode number of the page store's file.
    pub store_ino: u64,
    /// Bytes that the page store holds, in memory or swap.
    pub store_bytes: u64,
    /// Maximum number of bytes that the page store may hold.
    pub store_cap_bytes: u64,
    /// Whether the page store accepts no new pages, because it has reached its cap or because of an
    /// error.
    pub store_full: bool,
    /// Number of pages added to the page store since this daemon created or adopted the store.
    pub appended_pages: u64,
    /// Number of pages freed (punched out of the page store's file) since this daemon created or
    /// adopted the store.
    pub punched_pages: u64,
    /// Reason why no unneeded page of the page store can be freed, with the VM or process that
    /// prevents it; null if nothing prevents it.
    #[serde(default)]
    pub not_freed: Option<String>,
}

impl DomainStats {
    /// Returns the identity of the page store's file.
    #[must_use]
    pub const fn store(&self) -> StoreIdentity {
        StoreIdentity {
            dev: self.store_dev,
            ino: self.store_ino,
        }
    }
}

/// Statistics of the fold engine. The `case_*` fields count pages that were compared before
/// folding, by their files' paths and by the result.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EngineStats {
    /// Whether the operator has paused folding.
    pub paused: bool,
    /// Reason why the engine may not share more pages now (the brake); null if it may.
    #[serde(default)]
    pub braked: Option<String>,
    /// CPU time of the engine's thread in seconds, without the time that reports took.
    pub engine_cpu_s: f64,
    /// CPU time that reports took in the engine's thread, in seconds.
    pub report_cpu_s: f64,
    /// CPU time that memfold's libraries in all QEMUs used for the engine's orders, in seconds.
    pub library_cpu_s: f64,
    /// CPU time that folding may use on average, as a fraction of one core, 0 to 1.
    pub cpu_share: f64,
    /// Maximum number of pages that the engine processes per second; null without a limit.
    pub pages_per_second: Option<u64>,
    /// Median time from a page's hint to its folding, in seconds. Pages that were hinted while
    /// folding was paused are not counted; null if no page was folded yet.
    pub hint_to_fold_p50_s: Option<f64>,
    /// 95th percentile of the time from a page's hint to its folding, in seconds. Pages that were
    /// hinted while folding was paused are not counted; null if no page was folded yet.
    pub hint_to_fold_p95_s: Option<f64>,
    /// Number of compared pages whose files have the same path, and whose bytes were equal.
    pub case_same_path_same_content: u64,
    /// Number of compared pages whose files have the same path, and whose bytes differed.
    pub case_same_path_different_content: u64,
    /// Number of compared pages whose files have the same name and size but different paths, and
    /// whose bytes were equal.
    pub case_different_path_same_content: u64,
    /// Number of compared pages whose files have the same name and size but different paths, and
    /// whose bytes differed.
    pub case_different_path_different_content: u64,
    /// Number of times that the engine stopped folding a file for a while, because the file's bytes
    /// kept differing between VMs.
    pub files_given_up: u64,
    /// Number of pages that were not folded, because they are in a transparent huge page that is
    /// not worth splitting: too few of its pages cache files.
    pub huge_kept_pages: u64,
    /// Number of runs that were not folded, because the VM's QEMU has nearly as many mappings as
    /// the kernel allows (`vm.max_map_count`).
    pub mapping_budget_runs: u64,
    /// Number of hints of all VMs that wait to be processed.
    pub hints_waiting: u64,
    /// Memory of the engine's tables, in bytes.
    pub own_bytes: u64,
    /// Age of these statistics in seconds: 0, unless the engine waits for a VM that does not
    /// answer.
    #[serde(default)]
    pub age_s: f64,
    /// Statistics of each VM.
    pub vms: Vec<VmStats>,
    /// Statistics of each trust domain.
    pub domains: Vec<DomainStats>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_the_folding_latency_are_weighted_by_pages() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.percentile_s(95), None);
        latencies.count(1050, 95);
        latencies.count(30_000, 5);
        assert_eq!(latencies.percentile_s(50), Some(1.1));
        assert_eq!(latencies.percentile_s(95), Some(1.1));
        assert_eq!(latencies.percentile_s(96), Some(30.1));
    }
}

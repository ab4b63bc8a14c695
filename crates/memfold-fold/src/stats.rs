//! Statistics of the engine, for reports and studies.

use memfold_store::StoreIdentity;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Histogram of the times from a page's hint to its folding, in steps of 100 ms up to 60 s.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    steps: Vec<u64>,
}

impl Latencies {
    /// Counts `pages` pages that were folded `ms` milliseconds after their hint.
    pub fn count(&mut self, ms: u128, pages: u64) {
        self.steps.resize(600, 0);
        let step = usize::try_from(ms / 100).unwrap_or(usize::MAX).min(599);
        self.steps[step] += pages;
    }

    /// Returns a percentile of the latency in seconds: `percent` of the folded pages took at most
    /// this time from hint to folding. `None` until a page has been folded.
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

/// Statistics of one VM. Counters start when the engine adds the VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmStats {
    /// Name of the VM.
    pub name: String,
    /// Trust domain of the VM.
    pub domain: String,
    /// Reason why the VM is not folded, if there is one.
    pub problem: Option<String>,
    /// Whether the guest's agent is connected and its first inventory complete.
    pub agent_ready: bool,
    /// Runs of pages in the agent's hints.
    pub hint_runs: u64,
    /// Pages in the agent's hints.
    pub hint_pages: u64,
    /// Hinted pages that are outside the VM's RAM, or of files that the agent never introduced: the
    /// agent is wrong or lies.
    pub bogus_pages: u64,
    /// Reported pages that were dropped because of the limits for this VM.
    pub over_limit_pages: u64,
    /// Hints dropped because the stack was full.
    pub hints_dropped: u64,
    /// Trace events that the guest's kernel overwrote before the agent read them.
    pub events_lost: u64,
    /// CPU time of the guest's agent in microseconds, as the agent reports it.
    pub agent_cpu_us: u64,
    /// Resident set of the guest's agent in bytes, as the agent reports it.
    pub agent_rss_bytes: u64,
    /// Guest pages that cache a page of a file now, as the agent reports them.
    pub cached_pages: u64,
    /// Runs of cached pages that are consecutive in guest memory and in their file. Folding all of
    /// them takes about as many mappings.
    pub cached_runs: u64,
    /// Cached pages that another VM of the domain caches too, or that the store holds.
    pub matched_pages: u64,
    /// Matched pages that are folded and not copied since, or shared with the snapshot's image, as
    /// of the last sync with the kernel's tables.
    pub matched_folded_pages: u64,
    /// Pages that map the page store.
    pub mapped_pages: u64,
    /// Pages that map the page store and that the guest has written since (private copies).
    pub copied_pages: u64,
    /// Pages folded from anonymous memory.
    pub folded_pages: u64,
    /// Pages folded again after the guest had written them.
    pub refolded_pages: u64,
    /// Pages that were not folded because their bytes differed from the store.
    pub differing_pages: u64,
    /// Attempts to fold that failed because a page was busy (DMA).
    pub busy_pages: u64,
    /// Pages that held only zeroes and were given back to the host.
    pub zero_pages: u64,
    /// Pages given back as zeroes that the guest has not written since, as of the last sync with
    /// the kernel's tables.
    pub zero_saved_pages: u64,
    /// Pages in views of the image of the snapshot that the VM runs from.
    pub template_pages: u64,
    /// Pages in views of the image that the guest has written since (private copies).
    pub template_copied_pages: u64,
    /// Pages in views of the image that hold data there and that the guest has not written since.
    #[serde(default)]
    pub template_shared_pages: u64,
    /// Private copies that equalled the image again and were dropped.
    pub folded_back_pages: u64,
    /// Mappings of the QEMU process at the last full sync.
    pub mappings: u64,
    /// Pauses of the VM for folding again in a VM with direct I/O.
    pub pauses: u64,
    /// Longest of these pauses, in milliseconds.
    pub pause_max_ms: u64,
    /// Longest time for which a run was frozen, in nanoseconds.
    pub freeze_max_ns: u64,
    /// Histogram of freeze times: bucket i counts runs frozen for 2^i to 2^(i+1) ns.
    pub freeze_histogram: Vec<u64>,
}

/// Statistics of one trust domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DomainStats {
    /// Name of the trust domain.
    pub domain: String,
    /// Device number of the page store's file.
    pub store_dev: u64,
    /// Inode number of the page store's file.
    pub store_ino: u64,
    /// Bytes in the page store, in memory or swap.
    pub store_bytes: u64,
    /// Maximum number of bytes that the page store may hold.
    pub store_cap_bytes: u64,
    /// Whether the store accepts no new content, because of its cap or an error.
    pub store_full: bool,
    /// Pages appended to the store since the daemon began.
    pub appended_pages: u64,
    /// Pages punched out of the store since the daemon began.
    pub punched_pages: u64,
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

/// Statistics of the whole engine. `case_*` count compared pages by path and content.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EngineStats {
    /// Whether the operator has paused folding.
    pub paused: bool,
    /// Reason why the daemon keeps the engine from sharing more; null if the engine may share.
    #[serde(default)]
    pub braked: Option<String>,
    /// CPU time of the engine's thread in seconds, without the time for reports.
    pub engine_cpu_s: f64,
    /// CPU time of the engine's thread for reports, in seconds.
    pub report_cpu_s: f64,
    /// CPU time of the library threads for the engine's orders, in seconds.
    pub library_cpu_s: f64,
    /// CPU budget as a share of one core, 0 to 1.
    pub cpu_share: f64,
    /// Limit of pages processed per second, if one is set.
    pub pages_per_second: Option<u64>,
    /// Median time from hint to fold, in seconds, of pages hinted while folding was on.
    pub hint_to_fold_p50_s: Option<f64>,
    /// 95th percentile of the time from hint to fold, in seconds, of pages hinted while folding was
    /// on.
    pub hint_to_fold_p95_s: Option<f64>,
    /// Pages with the same path and the same bytes.
    pub case_same_path_same_content: u64,
    /// Pages with the same path and other bytes.
    pub case_same_path_different_content: u64,
    /// Pages with another path (same name and size) and the same bytes.
    pub case_different_path_same_content: u64,
    /// Pages with another path (same name and size) and other bytes.
    pub case_different_path_different_content: u64,
    /// Number of times that the engine gave up a file for a while because its bytes kept differing.
    pub files_given_up: u64,
    /// Pages not folded, because too few pages of their huge page cache files.
    pub huge_kept_pages: u64,
    /// Runs not folded, because the VM has nearly as many mappings as the kernel allows.
    pub mapping_budget_runs: u64,
    /// Hints of all VMs that wait to be processed.
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
    fn latency_percentiles_are_weighted_by_pages() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.percentile_s(95), None);
        latencies.count(1050, 95);
        latencies.count(30_000, 5);
        assert_eq!(latencies.percentile_s(50), Some(1.1));
        assert_eq!(latencies.percentile_s(95), Some(1.1));
        assert_eq!(latencies.percentile_s(96), Some(30.1));
    }
}

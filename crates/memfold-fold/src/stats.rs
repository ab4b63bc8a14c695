//! What the engine has done, in figures that the report and the studies show.

use memfold_store::StoreIdentity;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Times from hint to fold, in 100 ms steps up to 60 s.
#[derive(Clone, Debug)]
pub struct Latencies {
    steps: Vec<u64>,
}

impl Default for Latencies {
    fn default() -> Self {
        Self {
            steps: vec![0; 600],
        }
    }
}

impl Latencies {
    /// Counts `pages` pages that were folded `ms` milliseconds after their hint.
    pub fn count(&mut self, ms: u128, pages: u64) {
        let step = usize::try_from(ms / 100)
            .unwrap_or(usize::MAX)
            .min(self.steps.len() - 1);
        self.steps[step] += pages;
    }

    /// The time within which `percent` of the pages were folded, in seconds; `None` before the
    /// first.
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

/// Totals since the engine took the VM on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmStats {
    /// The VM's name.
    pub name: String,
    /// Its trust domain.
    pub domain: String,
    /// Why the VM is not folded, if it isn't.
    pub problem: Option<String>,
    /// Whether the guest's agent is connected and its first inventory complete.
    pub agent_ready: bool,
    /// Runs that the agent offered.
    pub hint_runs: u64,
    /// Pages in them.
    pub hint_pages: u64,
    /// Pages offered that lie outside the VM's RAM, or of files never introduced: the agent is
    /// wrong or lies.
    pub bogus_pages: u64,
    /// Pages not taken on because the tables reached the limit for this VM.
    pub over_limit_pages: u64,
    /// Hints dropped because the stack was full.
    pub hints_dropped: u64,
    /// Ring-buffer events that the guest lost.
    pub events_lost: u64,
    /// CPU time of the guest's agent in microseconds, as it says.
    pub agent_cpu_us: u64,
    /// Resident set of the guest's agent in bytes, as it says.
    pub agent_rss_bytes: u64,
    /// Pages whose file is known now.
    pub cached_pages: u64,
    /// Runs of them that are consecutive in guest memory and in their file. To fold all of them
    /// takes about as many mappings.
    pub cached_runs: u64,
    /// Of the cached, pages that another VM of the domain caches too, or that the store holds.
    pub matched_pages: u64,
    /// Of the matched, pages that are folded and not copied since, or a snapshot's, as of the last
    /// look at the kernel's tables.
    pub matched_folded_pages: u64,
    /// Pages where the page store is mapped.
    pub mapped_pages: u64,
    /// Of these, pages that the guest wrote since (private copies).
    pub copied_pages: u64,
    /// Pages folded from anonymous memory.
    pub folded_pages: u64,
    /// Pages folded again.
    pub refolded_pages: u64,
    /// Pages whose bytes differed.
    pub differing_pages: u64,
    /// Pages that were busy (DMA).
    pub busy_pages: u64,
    /// Pages of zeroes given back to the host.
    pub zero_pages: u64,
    /// Of these, pages that the guest has not written since, as of the last look at the kernel's
    /// tables.
    pub zero_saved_pages: u64,
    /// Pages that lie in views of the image of the snapshot that the VM runs from.
    pub template_pages: u64,
    /// Of these, pages that the guest wrote since (private copies).
    pub template_copied_pages: u64,
    /// Pages in such views that hold something in the image and that the guest has not written
    /// since.
    #[serde(default)]
    pub template_shared_pages: u64,
    /// Private copies that held again what the image holds, and were given back.
    pub folded_back_pages: u64,
    /// Mappings of the QEMU process at the last look.
    pub mappings: u64,
    /// Pauses made to fold again in a VM with direct I/O.
    pub pauses: u64,
    /// Longest of them in milliseconds.
    pub pause_max_ms: u64,
    /// Longest time that a run was frozen, in nanoseconds.
    pub freeze_max_ns: u64,
    /// Freeze times: bucket i counts runs frozen for 2^i to 2^(i+1) ns.
    pub freeze_histogram: Vec<u64>,
}

/// One trust domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DomainStats {
    /// Its name.
    pub domain: String,
    /// Device of the store's file.
    pub store_dev: u64,
    /// Inode of the store's file.
    pub store_ino: u64,
    /// Bytes that the page store holds.
    pub store_bytes: u64,
    /// Its cap.
    pub store_cap_bytes: u64,
    /// Whether the cap keeps new content out.
    pub store_full: bool,
    /// Pages appended since the daemon began.
    pub appended_pages: u64,
    /// Pages punched out since the daemon began.
    pub punched_pages: u64,
}

impl DomainStats {
    /// The file of its store.
    #[must_use]
    pub const fn store(&self) -> StoreIdentity {
        StoreIdentity {
            dev: self.store_dev,
            ino: self.store_ino,
        }
    }
}

/// The engine as a whole. `case_*`: the four cases of study C, in pages judged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EngineStats {
    /// Whether folding is paused by the operator.
    pub paused: bool,
    /// Why the daemon keeps the engine from sharing more, while it does.
    #[serde(default)]
    pub braked: Option<String>,
    /// CPU time of the engine's thread, in seconds, without that of reports like this.
    pub engine_cpu_s: f64,
    /// CPU time of the engine's thread for reports, in seconds.
    pub report_cpu_s: f64,
    /// CPU time of the library threads for our orders, in seconds.
    pub library_cpu_s: f64,
    /// CPU budget as a share of one core, 0 to 1.
    pub cpu_share: f64,
    /// Limit of pages looked at in a second, if one is set.
    pub pages_per_second: Option<u64>,
    /// Of the pages hinted while folding was on, half were folded within this many seconds of their
    /// hint.
    pub hint_to_fold_p50_s: Option<f64>,
    /// Of the pages hinted while folding was on, 95 % were folded within this many seconds of their
    /// hint.
    pub hint_to_fold_p95_s: Option<f64>,
    /// Same path, same bytes.
    pub case_same_path_same_content: u64,
    /// Same path, other bytes.
    pub case_same_path_different_content: u64,
    /// Another path (same name and size), same bytes.
    pub case_different_path_same_content: u64,
    /// Another path (same name and size), other bytes.
    pub case_different_path_different_content: u64,
    /// Files given up for a while because their bytes keep differing.
    pub files_given_up: u64,
    /// Pages left in huge pages because too few of their neighbours could be folded.
    pub huge_kept_pages: u64,
    /// Runs left because the VM has nearly as many mappings as the kernel allows.
    pub mapping_budget_runs: u64,
    /// Hints waiting.
    pub hints_waiting: u64,
    /// Memory of the engine's tables, in bytes.
    pub own_bytes: u64,
    /// Seconds since these figures were taken: 0, unless the engine waits for a VM that does not
    /// answer.
    #[serde(default)]
    pub age_s: f64,
    /// Per VM.
    pub vms: Vec<VmStats>,
    /// Per domain.
    pub domains: Vec<DomainStats>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_count_pages() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.percentile_s(95), None);
        latencies.count(1050, 95);
        latencies.count(30_000, 5);
        assert_eq!(latencies.percentile_s(50), Some(1.1));
        assert_eq!(latencies.percentile_s(95), Some(1.1));
        assert_eq!(latencies.percentile_s(96), Some(30.1));
    }
}

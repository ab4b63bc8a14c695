//! Counts a VM's pages by what prevents KSM from merging them, and computes how far the kernel's
//! thread ksmd has scanned them. `memfold ksm explain` reports the result.

use super::facts::{Facts, HostSide};

/// Number of a VM's pages in each class, such as merged, swapped or folded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    pub(super) guest: u64,
    pub(super) mergeable: u64,
    pub(super) present: u64,
    pub(super) merged: u64,
    pub(super) swapped: u64,
    pub(super) huge: u64,
    pub(super) shared: u64,
    pub(super) hugetlb: u64,
    pub(super) pmem: u64,
    pub(super) folded: u64,
    pub(super) file: u64,
    pub(super) unadvised: u64,
}

impl Places {
    pub(super) fn of(facts: &Facts) -> Self {
        let mut sum = Self::default();
        let mut told = false;
        for mapping in &facts.mappings {
            let pages = mapping.pages();
            sum.guest += pages;
            if mapping.has("ht") {
                sum.hugetlb += pages;
            } else if mapping.has("sh") || mapping.permissions.ends_with('s') {
                // Memory files count as shared memory. Other files are meant to outlive the VM.
                let memory = ["/memfd:", "/dev/shm/", "/dev/zero"];
                if memory.iter().any(|root| mapping.path.starts_with(root)) {
                    sum.shared += pages;
                } else {
                    sum.pmem += pages;
                }
            } else if mapping.path.contains("memfold:") {
                sum.folded += pages;
            } else if !mapping.path.is_empty() && !mapping.is_mergeable() {
                sum.file += pages;
            } else if mapping.is_mergeable() {
                sum.mergeable += pages;
                sum.present += mapping.anonymous_pages;
                sum.swapped += mapping.swapped_pages;
                sum.huge += mapping.huge_pages;
                sum.merged += mapping.merged_pages.unwrap_or(0);
                told |= mapping.merged_pages.is_some();
            } else {
                sum.unadvised += pages;
            }
        }
        if !told {
            sum.merged = facts.process.status.ksm_merging_pages.unwrap_or(0);
        }
        sum.merged = sum.merged.min(sum.present);
        sum
    }

    /// Returns the number of mergeable pages in memory that are not merged.
    pub(super) const fn unmerged(&self) -> u64 {
        self.present - self.merged
    }
}

/// Progress of ksmd's passes over a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Passes {
    /// Duration of ksmd's full scan of the host in seconds; `None` if ksmd scans nothing.
    pub(super) pass_s: Option<f64>,
    /// Fraction of the VM's mergeable pages that ksmd has scanned, 0 to 1.
    pub(super) visited: f64,
    /// Whether ksmd has not completed two passes since the VM started.
    pub(super) young: bool,
}

impl Passes {
    pub(super) fn of(facts: &Facts, places: &Places) -> Self {
        let Some(host) = &facts.host else {
            return Self::default();
        };
        let pass_s = pass_s(host);
        let items = facts.process.status.ksm_rmap_items;
        let present = places.present.max(1) as f64;
        let visited = items.map_or(1.0, |items| (items as f64 / present).min(1.0));
        let twice = |pass: f64| facts.age_s < 2.0 * pass;
        let scans = facts.steered.as_ref().map(|s| s.scans);
        let scans = scans.or(host.status.full_scans);
        let young =
            visited < 0.9 || pass_s.is_some_and(twice) || scans.is_some_and(|scans| scans < 2);
        Self {
            pass_s,
            visited,
            young: young && places.unmerged() > 0,
        }
    }

    /// Returns the time in seconds until ksmd has scanned all of the VM's memory twice; `None` if
    /// ksmd scans nothing.
    pub(super) fn first_merge_s(&self) -> Option<f64> {
        Some((2.0 - self.visited) * self.pass_s?)
    }
}

/// Assumed CPU time of ksmd per page in seconds, until enough pages were scanned.
const COST_S: f64 = 3e-6;

/// Returns the duration of a full scan of the host at KSM's present settings, in seconds; `None` if
/// ksmd scans nothing.
pub(super) fn pass_s(host: &HostSide) -> Option<f64> {
    let batch = host.settings.pages_to_scan.filter(|&pages| pages > 0)? as f64;
    let sleep_s = host.settings.sleep_millisecs? as f64 / 1e3;
    let cost_s = match (host.ksmd_cpu_s, host.status.pages_scanned) {
        (Some(cpu), Some(scanned)) if scanned >= 1000 => cpu / scanned as f64,
        _ => COST_S,
    };
    let batches = (host.mergeable_pages as f64 / batch).ceil();
    Some(batches * sleep_s + host.mergeable_pages as f64 * cost_s)
}

//! Explains why KSM merges a VM's memory or does not: every cause, with the number of pages that it
//! affects.
//!
//! Each page of guest memory is in exactly one class: of a kind that KSM does not scan, not advised
//! mergeable, not in memory, merged, not yet scanned twice, or scanned without a match. Causes that
//! hold for the whole host (such as a stopped KSM) affect all pages that are not merged.
//!
//! [`weigh`] only computes; [`super::facts`] reads the kernel's files.

use memfold_units::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::cause::Cause;
use super::explain_words::{fix, words};
use super::facts::Facts;
use super::passes::{Passes, Places};

pub use super::facts::Steered;

/// Reason why KSM does not merge some pages of a VM, and the number of these pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// Reason why KSM does not merge some pages of the VM.
    pub cause: Cause,
    /// Whether pages with this cause cannot merge at all until somebody changes something.
    pub blocks: bool,
    /// Number of pages that KSM does not merge for this reason; 0 if the number is unknown.
    pub pages: u64,
    /// Size of the pages that KSM does not merge for this reason, in bytes.
    pub bytes: u64,
    /// Description of the reason for the operator.
    pub words: String,
    /// Change by which the operator would let these pages merge, as text.
    pub fix: String,
}

/// Explanation of how much of a VM's memory KSM has merged, and why no more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// Name of the VM.
    pub vm: String,
    /// Process number of the VM's QEMU.
    pub pid: i32,
    /// Trust domain of the VM; null if the VM has none or no daemon knows the VM.
    pub domain: Option<String>,
    /// Size of the VM's guest memory, in bytes: mappings of RAM and other large mappings that the
    /// guest sees.
    pub guest_bytes: u64,
    /// Size of the guest memory that is advised mergeable, in bytes.
    pub mergeable_bytes: u64,
    /// Size of the guest memory that is advised mergeable and in the host's RAM, in bytes.
    pub present_bytes: u64,
    /// Size of the guest memory that KSM has merged, in bytes: pages mapped to a page that others
    /// map too, and pages mapped to the kernel's zero page.
    pub merged_bytes: u64,
    /// Bytes that merging saves in the QEMU process, less KSM's metadata about it
    /// (`ksm_process_profit`); null if the kernel does not report them.
    pub profit_bytes: Option<i64>,
    /// Size of ksmd's metadata about the QEMU process, in bytes; null if the kernel does not report
    /// enough.
    pub rmap_overhead_bytes: Option<u64>,
    /// Time since the QEMU process started, in seconds.
    pub age_s: f64,
    /// Duration of a full scan of the host's mergeable memory at the present `pages_to_scan` and
    /// `sleep_millisecs`, in seconds; null if ksmd scans nothing.
    pub pass_s: Option<f64>,
    /// Maximum time until the VM's first pages merge if equal pages exist, in seconds; null if some
    /// are merged already or nothing can merge.
    pub first_merge_s: Option<f64>,
    /// Summary in one line: how much of the VM's memory is merged, and the main reason why no more.
    pub verdict: String,
    /// Reasons why pages of the VM are not merged. Reasons for which pages cannot merge at all come
    /// first, then those with the most pages.
    pub causes: Vec<Finding>,
}

/// Determines why KSM does not merge the VM's pages, and how many pages each cause affects.
#[must_use]
pub fn weigh(facts: &Facts) -> Explanation {
    let places = Places::of(facts);
    let passes = Passes::of(facts, &places);
    let mut found = Vec::new();
    of_host(facts, &places, &mut found);
    of_kind(facts, &places, &mut found);
    of_content(facts, &places, &passes, &mut found);
    found.sort_by_key(|(cause, pages)| (!cause.blocks(), std::cmp::Reverse(*pages), *cause));
    let causes: Vec<Finding> = found
        .into_iter()
        .map(|(cause, pages)| Finding {
            cause,
            blocks: cause.blocks(),
            pages,
            bytes: pages * PAGE_SIZE,
            words: words(cause, facts, &passes),
            fix: fix(cause, facts),
        })
        .collect();
    let status = &facts.process.status;
    let merged = places.merged + status.ksm_zero_pages.unwrap_or(0);
    let run = facts.host.as_ref().and_then(|host| host.settings.run);
    let waits = run == Some(1) && merged == 0 && passes.young;
    let first_merge_s = waits.then(|| passes.first_merge_s()).flatten();
    Explanation {
        vm: facts.vm.clone(),
        pid: facts.process.pid,
        domain: facts.domain.clone(),
        guest_bytes: places.guest * PAGE_SIZE,
        mergeable_bytes: places.mergeable * PAGE_SIZE,
        present_bytes: places.present * PAGE_SIZE,
        merged_bytes: merged * PAGE_SIZE,
        profit_bytes: status.ksm_process_profit,
        rmap_overhead_bytes: facts.process.rmap_overhead_bytes(),
        age_s: facts.age_s,
        pass_s: passes.pass_s,
        first_merge_s,
        verdict: verdict(&places, merged, &causes),
        causes,
    }
}

fn verdict(places: &Places, merged: u64, causes: &[Finding]) -> String {
    let size = |pages: u64| memfold_units::PageCount(pages).bytes();
    // Pages that are shared already, or not in memory, do not prevent merging.
    let rests = |finding: &&Finding| {
        !matches!(
            finding.cause,
            Cause::Folded
                | Cause::FileView
                | Cause::NotPresent
                | Cause::HugePages
                | Cause::UseZeroPages
        )
    };
    let first = causes.iter().find(rests).map(|finding| &finding.words);
    let begins = match merged {
        0 => "nothing is merged".to_owned(),
        merged => format!(
            "{} of {} of mergeable memory are merged",
            size(merged),
            size(places.present.max(merged))
        ),
    };
    match first {
        Some(first) => format!("{begins}; main cause: {first}"),
        None => begins,
    }
}

type Found = Vec<(Cause, u64)>;

fn of_host(facts: &Facts, places: &Places, found: &mut Found) {
    let Some(host) = &facts.host else {
        found.push((Cause::NoKsm, places.guest));
        return;
    };
    let held = facts.steered.as_ref().is_some_and(|s| s.held.is_some());
    match host.settings.run {
        _ if held => found.push((Cause::Held, places.unmerged())),
        Some(1) => {}
        Some(2) => found.push((Cause::Unmerged, places.unmerged())),
        _ => found.push((Cause::Stopped, places.unmerged())),
    }
    if host.settings.merge_across_nodes == Some(0) && host.nodes > 1 {
        found.push((Cause::AcrossNodes, places.unmerged()));
    }
    // The kernel does not report how many pages of this VM are affected.
    if places.mergeable > 0 && host.status.stable_node_chains.is_some_and(|n| n > 0) {
        found.push((Cause::MaxPageSharing, 0));
    }
    let zeroes = facts.zero_pages.filter(|&pages| pages > 0);
    if let (Some(pages), Some(0)) = (zeroes, host.settings.use_zero_pages) {
        found.push((Cause::UseZeroPages, pages));
    }
}

fn of_kind(facts: &Facts, places: &Places, found: &mut Found) {
    let steered = facts.steered.as_ref();
    let unadvised = match (facts.merge_off, facts.known) {
        (true, true) if facts.domain.is_none() => Cause::NoDomain,
        (true, true) if steered.is_some_and(|s| facts.domain.as_ref() != Some(&s.domain)) => {
            Cause::AnotherDomain
        }
        (true, _) => Cause::MergeOff,
        (false, _) if facts.filtered => Cause::Refused,
        (false, _) => Cause::NotAdvised,
    };
    let there = places.present + places.swapped;
    let kinds = [
        (unadvised, places.unadvised),
        (Cause::Shared, places.shared),
        (Cause::Hugetlb, places.hugetlb),
        (Cause::Pmem, places.pmem),
        (Cause::Folded, places.folded),
        (Cause::FileView, places.file),
        (Cause::Swapped, places.swapped),
        (Cause::NotPresent, places.mergeable.saturating_sub(there)),
        (Cause::HugePages, places.huge),
    ];
    found.extend(kinds.into_iter().filter(|(_, pages)| *pages > 0));
}

fn of_content(facts: &Facts, places: &Places, passes: &Passes, found: &mut Found) {
    let Some(host) = &facts.host else { return };
    if host.settings.run != Some(1) || places.unmerged() == 0 {
        return;
    }
    if passes.young {
        found.push((Cause::TooYoung, places.unmerged()));
        return;
    }
    let status = &facts.process.status;
    let visited = match status.ksm_rmap_items {
        Some(items) => items.saturating_sub(facts.process.merged_pages()),
        None => places.unmerged(),
    }
    .min(places.unmerged());
    // The kernel counts unshared and volatile pages only for the whole host. This VM is assumed to
    // have the same ratio.
    let unshared = host.status.pages_unshared.unwrap_or(0);
    let volatile = host.status.pages_volatile.unwrap_or(0);
    let share = u128::from(visited) * u128::from(volatile);
    let share = share.checked_div(u128::from(unshared + volatile));
    let volatile = share.unwrap_or(0).try_into().unwrap_or(0);
    let skipped = host.status.pages_skipped.is_some_and(|n| n > 0);
    let contents = [
        (Cause::NotVisited, places.unmerged() - visited),
        (Cause::Unique, visited - volatile),
        (Cause::Volatile, volatile),
    ];
    found.extend(contents.into_iter().filter(|(_, pages)| *pages > 0));
    if host.settings.smart_scan == Some(1) && skipped && visited > volatile {
        found.push((Cause::SmartScan, 0));
    }
}

#[cfg(test)]
#[path = "explain_tests.rs"]
mod tests;
